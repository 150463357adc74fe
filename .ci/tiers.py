"""The checks of a change, from nothing: every environment is made new, in a temporary folder.

    .ci/run                 the tier `default`, then further tiers while 20 minutes last
    .ci/run --minutes 60    the same, while an hour lasts
    .ci/run default         this tier alone; also several: .ci/run exhaustive gpu
    .ci/run --list          the tiers, what they are for and how long they take

.ci/tiers.toml describes the tiers. Further ones run in this order: those whose files the change
touches, then the others in rotation, by the number of commits. The change is what CI_BASE (a
commit) lacks, or the branch's upstream; without either, all that was committed in the 12 hours
before the last commit. PYTHON names the interpreter (default: the one that runs this). The default
tier begins with the tests in the folders of what the change touches, and prints each failure as it
happens.

As root on Debian a tier's packages are installed, and there a test that is skipped although its
tools can be had is a failure. Ends with a table of what ran, how long, and what did not, and why.
The exit status is 1 if anything failed. A failure of the default tier ends it all at once.

No step may hang. A tier that takes three times its minutes is ended, and has failed; 10 minutes
after the time is up the tier under way is ended, and the table says so. What a step leaves running
is killed.

Up to three tests that failed in a run of pytest are run once more, alone in one process. Those that
pass then do not fail the run, which other load on the machine may have disturbed, but the table
names them as unsteady: each is a fault, of the test or of pycoll, that waits to be found.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from processes import adopt_orphans, end_descendants, reap_until  # noqa: E402

MINUTES = 20
"""No tier is begun that would end later than this."""
GRACE_MINUTES = 10
"""So much later the tier under way is ended."""
HANGS = 3
"""A tier that takes so many times its minutes does not end."""
DEFAULT_MINUTES = 10
"""What the default tier should take at most; more is said in the table."""
FIRST = "TEST_FIRST_OF_PYCOLL"
"""The variable that names the folders whose tests tests/conftest.py has run first."""
WITHOUT_A_BASE_S = 12 * 3600
MOST_UNSTEADY = 3
"""If more tests fail in one run of pytest, that is no accident."""
TESTS_FAILED = 1
"""The exit status of pytest when tests failed, and nothing else did (tests/conftest.py)."""
UNSTEADY = 20
"""The exit status of tests/rdma/run when what failed has passed when it was run again."""
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
"""Where pytest keeps which tests failed."""
ALONE = "pytest -n 0 --last-failed --last-failed-no-failures none"

# What the default tier does. Two environments: the tests run with what the README tells users to
# install and nothing else. An extension that cannot be built is no error for users, but here it is.
LINT = [
    "CFLAGS=-Werror pip install --quiet -e '.[test,dev]'",
    "python -c 'from pycoll._transports._core import Comm'",
    "ruff check",
    "ruff format --check",
    "mypy -p pycoll",
    "pytest -m '' tests/house/test_typing.py",  # the tests of types need mypy
]
TESTS = "pip install '.[test]' && pytest"
EXAMPLES = [
    "pip install '.[examples]' && pycoll-run -n 4 examples/train_digits.py",
    *(f"pycoll-run -n 3 examples/{name}.py" for name in ("hello", "pi", "objects", "my_algorithm")),
    "python examples/train_digits.py",
]


class Failed(Exception):
    """A step failed; its text says which and how, and its second argument is the exit status,
    None if it did not end.
    """


class NotHere(Exception):
    """A tier cannot run on this machine, or not to its end; its text says why."""


@dataclass
class Row:
    """A line of the table at the end."""

    tier: str
    minutes: float
    outcome: str


@dataclass
class Tier:
    """A tier of .ci/tiers.toml; the fields are explained there."""

    name: str
    says: str
    minutes: float
    steps: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    debian: list[str] = field(default_factory=list)
    prepare: str = ""
    commands: list[str] = field(default_factory=list)
    pip: list[str] = field(default_factory=lambda: [".[test]"])
    interpreter: str = ""
    shared: bool = False
    may_skip: list[str] = field(default_factory=list)

    def touched_by(self, files: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, path) for name in files for path in self.paths)


def tiers() -> dict[str, Tier]:
    """Those of .ci/tiers.toml by name, `default` first."""
    with (ROOT / ".ci/tiers.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)
    listed = [{"name": "default", **table["default"]}, *table["tier"]]
    return {one["name"]: Tier(**one) for one in listed}


def git(*words: str) -> str:
    """What git prints; "" if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def changed() -> list[str]:
    """The files that the change touches, what is not committed included."""
    base = os.environ.get("CI_BASE", "") or git("merge-base", "HEAD", "@{upstream}")
    if not base or base == git("rev-parse", "HEAD"):
        last_s = int(git("log", "-1", "--format=%ct") or 0)
        limit = f"--before=@{last_s - WITHOUT_A_BASE_S}"
        base = git("rev-list", "-1", limit, "HEAD") or git("rev-list", "--max-parents=0", "HEAD")
    return git("diff", "--name-only", base.split("\n")[0]).splitlines()


def folders_of(files: Sequence[str]) -> list[str]:
    """The folders of tests/ that test these files; what has none is the house's."""
    folders = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    found = set()
    for name in files:
        first, *rest = name.split("/")
        below = rest[0].lstrip("_") if len(rest) > 1 else ""
        found.add(below if below in folders else first if first in folders else "house")
    return sorted(found)


def in_order(further: Sequence[Tier]) -> list[Tier]:
    """Those that the change touches first, then the others, beginning with another each time."""
    files = changed()
    touched = [tier for tier in further if tier.touched_by(files)]
    others = [tier for tier in further if tier not in touched]
    if others:
        first = turn() % len(others)
        others = others[first:] + others[:first]
    return touched + others


def turn() -> int:
    """The number of commits, by which takes turns what is not run every time."""
    return int(git("rev-list", "--count", "HEAD") or 0)


class Run:
    """One run: its temporary folder, its environments, its table."""

    def __init__(self, folder: Path, last_minute: float = math.inf) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.rows: list[Row] = []
        self.last_minute = last_minute  # after the start, when the tier under way is ended
        self.limit = math.inf  # minutes after the start when the tier under way hangs
        self.unsteady: list[str] = []
        self.python = os.environ.get("PYTHON") or sys.executable
        self.may_install = os.geteuid() == 0 and shutil.which("apt-get") is not None
        self.variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        for name in ("PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV"):
            self.variables.pop(name, None)

    def minutes(self) -> float:
        return (time.monotonic() - self.started) / 60

    def step(self, command: str, environment: Path | None = None) -> None:
        """Run a command with an environment's programs first on PATH."""
        print(f"\nci: [{60 * self.minutes():4.0f} s] $ {command}", flush=True)
        variables = dict(self.variables)
        if environment is not None:
            variables["PATH"] = f"{environment / 'bin'}:{variables['PATH']}"
        words = ["bash", "-euo", "pipefail", "-c", command]
        process = subprocess.Popen(words, cwd=ROOT, env=variables)
        minutes = min(self.limit, self.last_minute)
        status = reap_until(process, self.started + 60 * minutes)
        end_descendants()
        if status is None and minutes == self.last_minute:
            raise NotHere(f"stopped half-way, {self.last_minute:.0f} minutes after the start")
        if status is None:
            raise Failed(f"no end: {command}", None)
        if status == UNSTEADY:
            self.unsteady.append(f"some of {command} (above)")
        elif status:
            raise Failed(f"status {status}: {command}", status)

    def tests(self, command: str, environment: Path) -> None:
        """Run a command that ends with pytest; if few tests failed, these once more, one by one."""
        LAST_FAILED.unlink(missing_ok=True)
        try:
            self.step(command, environment)
        except Failed as failure:
            failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
            if failure.args[1] != TESTS_FAILED or not 0 < len(failed) <= MOST_UNSTEADY:
                raise
            variables = self.variables
            self.variables = {**variables, "TEST_SKIPS_OF_PYCOLL": "(?!)"}  # no skip is a good one
            try:
                self.step(command.rpartition("&& ")[2].replace("pytest", ALONE, 1), environment)
            finally:
                self.variables = variables
            self.unsteady += failed

    def environment(self, name: str, python: str = "") -> Path:
        """The folder of a virtual environment, which is made when it is first asked for."""
        path = self.folder / name
        if not path.exists():
            subprocess.run([python or self.python, "-m", "venv", path], check=True)
        return path

    def install(self, tier: Tier) -> None:
        """Install the Debian packages that the tier needs, where that can be done."""
        if not self.may_install:
            return
        wanted = []
        for package in tier.debian:
            known = subprocess.run(["dpkg", "-s", package], capture_output=True, check=False)
            if known.returncode != 0:
                wanted.append(package)
        get = "apt-get -q -y install --no-install-recommends"
        if wanted:
            self.step(f"(apt-get -q update && {get} {' '.join(wanted)}) >/dev/null")

    def allow_skips(self, tier: Tier, default: Tier) -> None:
        """Have tests/conftest.py fail for what is skipped for another reason than may be."""
        if self.may_install:
            reasons = "|".join([*default.may_skip, *tier.may_skip])
            self.variables["TEST_SKIPS_OF_PYCOLL"] = reasons

    def default(self, tier: Tier) -> None:
        tools = self.environment("tools")
        for command in LINT:
            self.step(command, tools)
        clean()
        user = self.environment("user")
        self.variables[FIRST] = " ".join(folders_of(changed()))
        self.tests(TESTS, user)
        del self.variables[FIRST]
        for command in EXAMPLES:
            self.step(command, user)

    def further(self, tier: Tier) -> None:
        self.prepare(tier)
        clean()
        if tier.shared:
            environment = self.environment("user")
            if not (environment / "bin/pytest").exists():
                self.step("pip install --quiet '.[test]'", environment)
        else:
            environment = self.environment(tier.name, interpreter(tier.interpreter))
            oldest = self.folder / "oldest.txt"
            oldest.write_text("\n".join(oldest_dependencies()))
            words = " ".join(f"'{word}'" for word in tier.pip if not word.startswith("-"))
            options = " ".join(word for word in tier.pip if word.startswith("-"))
            options = options.replace("-c oldest", f"-c {oldest}")
            self.step(f"pip install --quiet {options} {words}", environment)
        for command in tier.steps:
            run = self.tests if command.startswith("pytest") else self.step
            run(command.replace("{turn}", str(turn())), environment)

    def prepare(self, tier: Tier) -> None:
        if tier.prepare and self.may_install:
            self.step(f"{tier.prepare} >/dev/null", Path(self.python).parent.parent)
        missing = [name for name in tier.commands if shutil.which(name) is None]
        if missing:
            raise NotHere(f"needs {', '.join(missing)}")

    def tier(self, tier: Tier, default: Tier) -> bool:
        """Run a tier; return whether it did not fail."""
        before = self.minutes()
        outcome, known = "passed", len(self.unsteady)
        self.limit = before + HANGS * tier.minutes
        print(f"\nci: {tier.name}: {tier.says}", flush=True)
        try:
            self.install(tier)
            self.allow_skips(tier, default)
            self.default(tier) if tier.name == "default" else self.further(tier)
        except Failed as failure:
            outcome = f"FAILED with {failure.args[0]}"
        except NotHere as reason:
            outcome = f"not run: {reason}"
        if outcome == "passed" and len(self.unsteady) > known:
            outcome = "passed, but UNSTEADY"
        took = self.minutes() - before
        if tier.name == "default" and took > DEFAULT_MINUTES:
            outcome += f"; more than {DEFAULT_MINUTES} minutes"
        self.rows.append(Row(tier.name, took, outcome))
        return not outcome.startswith("FAILED")

    def slowness(self, known: dict[str, Tier]) -> float:
        """How many times as long as expected the tiers have taken so far; at least 1."""
        expected = sum(known[row.tier].minutes for row in self.rows if row.minutes)
        return max(1.0, sum(row.minutes for row in self.rows) / expected) if expected else 1.0

    def table(self) -> str:
        width = max(len(row.tier) for row in self.rows)
        lines = [
            f"  {row.tier:{width}}  {row.minutes:5.1f} min  {row.outcome}" for row in self.rows
        ]
        notes = [f"  unsteady: failed, then passed alone: {name}" for name in self.unsteady]
        return "\n".join(["", f"ci: {self.minutes():.1f} minutes", *lines, *notes])


def interpreter(version: str) -> str:
    """The path of another Python, which pyenv has, or "" for no other."""
    if not version:
        return ""
    if shutil.which("pyenv") is None:
        raise NotHere(f"Python {version}: no pyenv on this machine")
    ask = f'pyenv prefix "$(pyenv latest {version})"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotHere(f"Python {version}: pyenv has none installed")
    return f"{done.stdout.strip()}/bin/python"


def oldest_dependencies() -> list[str]:
    """Every ">=" of the dependencies, taken as "=="."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needs: list[str] = tomllib.load(file)["project"]["dependencies"]
    return [one.replace(">=", "==") for one in needs]


def clean() -> None:
    """Remove what an install leaves in the checkout: the next one would pick it up."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    for path in [*ROOT.glob("*.egg-info"), *ROOT.glob("transports/_core*.so")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _end(number: int, frame: object) -> None:
    """End at a signal as at an interrupt: nothing is left running, and no folder left behind."""
    end_descendants()
    sys.exit(128 + number)


def main() -> int:
    """Run the tiers that were asked for."""
    known = tiers()
    parser = argparse.ArgumentParser(
        prog=".ci/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=", ".join(known))
    parser.add_argument("--list", action="store_true", help="print the tiers")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"begin nothing after that ({MINUTES})"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.tiers if name not in known]:
        parser.error(f"no tier {', '.join(unknown)}; there are {', '.join(known)}")
    if options.list:
        for tier in known.values():
            print(f"{tier.name:12} {tier.minutes:3.0f} min  {tier.says}")
        return 0
    default, *further = known.values()
    adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="pycoll-ci.") as folder:
        run = Run(Path(folder), math.inf if options.tiers else options.minutes + GRACE_MINUTES)
        print(f"ci: {run.python} on {os.uname().machine}, {os.cpu_count()} cores; in {folder}")
        chosen = [known[name] for name in options.tiers] or [default, *in_order(further)]
        well = True
        for tier in chosen:
            late = run.minutes() + run.slowness(known) * tier.minutes > options.minutes
            if not options.tiers and tier is not default and late:
                run.rows.append(Row(tier.name, 0.0, "not run: no time left"))
            elif not run.tier(tier, default):
                well = False
                if tier is default:
                    break
        print(run.table(), flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
