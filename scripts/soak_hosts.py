"""Jobs of scripts/soak_failures on several hosts, which are pretended (tests/helpers/hosts_bed.py).

A job has two to as many hosts as there are, rank 0 on any of them, and runs random programs
(soak_rank.py) by one transport or another. Up to three times something happens to it: a rank or the
host's agent or `pycoll-run` is stopped for a moment, a cable is out, or loses much; and in
the middle of that, or without, ranks, an agent, a host or `pycoll-run` are killed, or a host is cut
off for good. With --survive the ranks that live must go on, with --restarts the next attempt must
begin on the hosts that are left; at last SIGUSR1 to `pycoll-run` ends all ranks well.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/helpers"))

from hosts_bed import PYCOLL_RUN, Bed, bed, why_not
from soak_judge import (
    SOCKETS,
    Blow,
    Wrong,
    await_nothing,
    judge_ranks,
    judge_report,
    judge_traces,
)

RANK = Path(__file__).with_name("soak_rank.py")
HANG_S = 120.0  # nothing takes so long, also beside other programs

MODES = {
    "ends": (),
    "survives": ("--survive",),
    "begins again": ("--restarts", "9"),
    "survives or begins again": ("--survive", "--restarts", "9"),
}
TRANSPORTS = (("auto",), ("auto",), ("tcp",), ("zmq",), ("auto", "--encrypt"))
KILLED = "killed by signal 9 (SIGKILL)"

MOMENTS = {
    "nothing": 0.0,
    "a rank stops": 4.0,
    "an agent stops": 3.0,
    "pycoll-run stops": 1.5,  # after 3 s ranks that lose a connection blame nobody
    "a cable is out": 2.5,
    "a cable is bad": 4.0,
}
"""What passes, and for how many seconds at most: no job may end by it."""

BLOWS = {
    "nothing": 2,
    "a rank is killed": 3,
    "two ranks are killed": 1,
    "an agent is killed": 2,
    "a host is cut off": 1,
    "a host loses power": 1,
    "pycoll-run is killed": 1,
}
"""What is for good, and how often it is drawn, about."""


class HostsJob:
    """One job, all that its ranks tell, and what is done to it.

    Attributes:
        done: what was done, for the account of the whole soak.
    """

    def __init__(self, hosts: Bed, seed: int, folder: Path) -> None:
        self.hosts, self.seed, self.folder = hosts, seed, folder
        self.choose = choose = random.Random(seed)
        names = choose.sample(hosts.names, choose.randint(2, len(hosts.names)))
        self.layout = {name: choose.randint(1, 3 if len(names) == 2 else 2) for name in names}
        self.mode = choose.choice([*MODES])
        self.survives, self.restarts = "survives" in self.mode, "again" in self.mode
        self.transport = choose.choice(TRANSPORTS)
        self.done = [f"job that {self.mode}", f"job by {' '.join(self.transport)}"]
        self.told: list[dict[str, Any]] = []
        self.attempt = 0
        self.lost: set[int] = set()  # ranks of this attempt
        self.lost_hosts: set[str] = set()  # that this attempt has begun with
        self.is_disturbed = False  # not all ranks may have had time to tell how they end
        self.is_over = False
        self.cut: set[str] = set()
        self.changed = threading.Condition()
        (folder / "tmp").mkdir()
        self.stderr = (folder / "stderr").open("w+")
        self.start()

    def __str__(self) -> str:
        layout = ",".join(f"{name}:{count}" for name, count in self.layout.items())
        return f"-H {layout} {' '.join(self.transport)}: {'; '.join(self.done[2:])}"

    # What is told.

    def start(self) -> None:
        """Start pycoll-run on the first host; it says its number there first."""
        layout = ",".join(f"{name}:{count}" for name, count in self.layout.items())
        words = ["--no-tag-output", "-H", layout, "--transport", *self.transport]
        words += [*MODES[self.mode], "-x", f"TMPDIR={self.folder}/tmp", str(RANK)]
        words += [str(self.folder), str(self.seed), "survives" if self.survives else "ends"]
        self.launcher = self.hosts.popen(
            "hosta",
            *("sh", "-c", f'mkdir -p {SOCKETS}; echo $$; exec "$@"', "sh"),
            *("env", f"TMPDIR={self.folder}/tmp", f"XDG_RUNTIME_DIR={SOCKETS}"),
            *PYCOLL_RUN,
            *words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
        )
        assert self.launcher.stdout is not None
        self.pid = int(self.launcher.stdout.readline())
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Collect what ranks tell, until nobody can any more."""
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            with self.changed:
                try:
                    self.told.append(json.loads(line))
                except ValueError:
                    self.told.append({"what": "nonsense", "attempt": -1, "rank": -1, "line": line})
                self.changed.notify_all()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def of(self, what: str, attempt: int | None = None) -> dict[int, dict[str, Any]]:
        """What each rank of the attempt has told of that kind, the last."""
        wanted = what, self.attempt if attempt is None else attempt
        told = list(self.told)
        return {each["rank"]: each for each in told if (each["what"], each["attempt"]) == wanted}

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until it is so."""
        deadline = time.monotonic() + HANG_S
        with self.changed:
            while not is_so():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Wrong(f"it hangs: not in {HANG_S:g} s: {what}")
                if self.is_over:
                    raise Wrong(f"it has ended with {self.launcher.wait(HANG_S)} before: {what}")
                self.changed.wait(left)

    def wait_for_all(self) -> None:
        """Wait until all ranks have joined."""
        self.wait("all have joined", lambda: len(self.of("joined")) == self.size)

    @property
    def size(self) -> int:
        """How many ranks this attempt has begun with."""
        return sum(self.layout.values())

    def where(self, ranks: frozenset[int] | None = None) -> dict[int, str]:
        """The host of each rank that lives, or of these."""
        living = {r: each["host"] for r, each in self.of("started").items() if r not in self.lost}
        return living if ranks is None else {r: living[r] for r in ranks if r in living}

    @property
    def others(self) -> list[str]:
        """The hosts of this attempt that have an agent, and are not lost."""
        return sorted(set(self.layout) - self.lost_hosts - {"hosta"})

    # The course of it.

    def run(self) -> None:
        """Let things happen, and check what becomes of the job.

        Raises:
            Wrong: it is not what it must be.
        """
        for number in range(self.choose.randint(1, 3)):
            is_early = number == 0 and self.choose.random() < 0.2
            if not self.happen(is_early):
                return
        self.wait_for_all()
        self.signal(signal.SIGUSR1, self.pid, "hosta")
        self.done.append("all are asked to end")
        self.end({0})
        if missing := set(self.where()) - set(self.of("over")):
            raise Wrong(f"ranks {sorted(missing)} have ended with 0, but not told that")

    def happen(self, is_early: bool) -> bool:
        """Let one thing happen; returns whether the job goes on."""
        choose = self.choose
        if is_early:
            time.sleep(choose.random() * 4.0)  # a random moment: nothing is waited for
        else:
            self.wait_for_all()
            time.sleep(choose.random())
        moments = [each for each in MOMENTS if "agent" not in each or self.others]
        moment = "nothing" if is_early else choose.choice([*["nothing"] * 3, *moments])
        length = choose.random() * MOMENTS[moment]
        self.is_disturbed |= moment != "nothing"
        undo = self.disturb(moment)
        time.sleep(length / 2)
        # By ZeroMQ, which dials once, a rank may blame one that pycoll-run knows to be cut off.
        by_zmq = self.transport in (("zmq",), ("auto", "--encrypt"))
        blows = {n: of for n, of in BLOWS.items() if not (by_zmq and n.startswith("a host"))}
        blow = self.strike(*choose.choices([*blows], [*blows.values()]))
        time.sleep(length / 2)
        undo()
        for name in (f"for {length:.1f} s {moment}" if length else "", blow.name):
            if name and name != "nothing":
                self.done.append(f"{name}{' while it starts' * is_early}")
        if blow.name == "nothing":
            return True
        if blow.name == "pycoll-run is killed":
            self.end({-signal.SIGKILL})
            return False
        return self.see_early(blow) if is_early else self.see(blow)

    def see(self, blow: Blow) -> bool:
        """See that the job does what it must after a blow; returns whether it goes on."""
        living = set(self.where()) - blow.ranks
        left = self.left_after(blow)
        if not blow.ranks:  # of a host that had none any more
            self.lost_hosts |= blow.hosts
            return True
        if self.survives and living:
            self.lost |= blow.ranks
            self.lost_hosts |= blow.hosts
            self.wait(
                f"ranks {sorted(living)} have shrunk",
                lambda: all(
                    rank in self.of("shrunk") and set(self.of("shrunk")[rank]["members"]) == living
                    for rank in living
                ),
            )
            judge_ranks(self, "lost", living, blow)
            for rank in blow.ranks:
                judge_report(self, rf"rank {rank} failed after .*; the others go on", blow)
            return True
        if self.restarts and left:
            judge_ranks(self, "failed", set(), blow)
            self.begin_again(left)
            judge_report(self, rf"restart {self.attempt} of 9: rank \d+ failed after .*", blow)
            return True
        self.end({blow.status})
        told = set() if self.is_disturbed or self.survives else living
        judge_ranks(self, "failed", told & set(self.of("joined")), blow)
        judge_report(self, r"rank \d+ failed after .*", blow)
        return False

    def see_early(self, blow: Blow) -> bool:
        """See the same where ranks may not have met, or not have been started, at the blow."""
        number = self.attempt

        def members() -> set[int]:
            """The ranks that have all shrunk to each other."""
            told = [frozenset(each["members"]) for each in self.of("shrunk", number).values()]
            least = min(told, key=len, default=frozenset())
            return set(least) if told.count(least) == len(least) else set()

        self.wait(
            "it has ended, or goes on",
            lambda: self.is_over or bool(self.of("started", number + 1) or members()),
        )
        if self.is_over:
            is_sure = self.mode == "ends" and "killed" in blow.name
            self.end({blow.status} if is_sure else set(range(1, 256)))
            return False
        if self.of("started", number + 1):
            self.begin_again(self.left_after(blow))
        else:
            self.lost = set(range(self.size)) - members()
            self.lost_hosts |= blow.hosts
        return True

    def left_after(self, blow: Blow) -> dict[str, int]:
        """The hosts, and their ranks, with which the job could begin again."""
        lost = self.lost_hosts | blow.hosts
        return {name: count for name, count in self.layout.items() if name not in lost}

    def begin_again(self, left: dict[str, int]) -> None:
        """Wait for the next attempt, on these hosts."""
        self.attempt, self.layout = self.attempt + 1, left
        self.lost, self.lost_hosts, self.is_disturbed = set(), set(), False
        self.wait(
            f"attempt {self.attempt} has begun with {self.size} ranks on {', '.join(left)}",
            lambda: len(self.of("joined")) == self.size,
        )
        hosts = sorted(self.where().values())
        if hosts != sorted(name for name, count in left.items() for _ in range(count)):
            raise Wrong(f"attempt {self.attempt} is on {hosts}, not on {left}")

    def end(self, statuses: set[int]) -> None:
        """Wait for the end of pycoll-run, with one of these statuses."""
        try:
            status = self.launcher.wait(HANG_S)
        except subprocess.TimeoutExpired:
            raise Wrong(f"it hangs: not over in {HANG_S:g} s") from None
        self.reader.join(HANG_S)
        if status not in statuses:
            shown = sorted(statuses) if len(statuses) < 9 else "a failure"
            raise Wrong(f"status {status}, not {shown}")

    # What is done to it.

    def signal(self, signum: int, pid: int, host: str) -> None:
        """Send a signal to a process of a host, which may have ended."""
        self.hosts.run(host, "kill", f"-{int(signum)}", str(pid))

    def disturb(self, moment: str) -> Callable[[], object]:
        """Let something happen that passes; returns what ends it."""
        choose, started = self.choose, self.of("started")
        where, agents = self.where(), moment == "an agent stops"
        ranks = [rank for rank in where if where[rank] in self.others or not agents]
        if not ranks:
            return lambda: None
        rank = choose.choice(sorted(ranks))
        pid, agent, host = (started[rank][name] for name in ("pid", "parent", "host"))
        if moment == "a rank stops":
            self.signal(signal.SIGSTOP, pid, host)
            return lambda: self.signal(signal.SIGCONT, pid, host)
        if agents:
            self.signal(signal.SIGSTOP, agent, host)
            return lambda: self.signal(signal.SIGCONT, agent, host)
        if moment == "pycoll-run stops":
            self.signal(signal.SIGSTOP, self.pid, "hosta")
            return self.go_on
        if moment == "a cable is out":
            self.hosts.cut(host)
            return lambda: host in self.cut or self.hosts.heal(host)
        if moment == "a cable is bad":
            self.hosts.narrow(host, choose.choice(("1mbit", "4mbit", "20mbit")))
            return lambda: self.hosts.narrow(host, "")
        return lambda: None

    def go_on(self) -> None:
        """Continue pycoll-run, and nsenter, which stops with it."""
        self.signal(signal.SIGCONT, self.pid, "hosta")
        self.launcher.send_signal(signal.SIGCONT)

    def strike(self, name: str) -> Blow:
        """Do something for good."""
        choose, where, started = self.choose, self.where(), self.of("started")
        others, agents = self.others, sorted(set(where.values()) & set(self.others))
        if name == "pycoll-run is killed":
            self.signal(signal.SIGKILL, self.pid, "hosta")
            return Blow(name)
        if "rank" in name and where:
            chosen = choose.sample(sorted(where), min(len(where), 1 + name.startswith("two")))
            for rank in chosen:
                self.signal(signal.SIGKILL, started[rank]["pid"], where[rank])
            return Blow(name, frozenset(chosen), reasons=(KILLED,), status=128 + signal.SIGKILL)
        if name == "an agent is killed" and agents:
            host = choose.choice(agents)
            pid = next(started[rank]["parent"] for rank in where if where[rank] == host)
            self.signal(signal.SIGKILL, pid, host)
            return self.loss(name, [host])
        if name == "a host is cut off" and others and choose.random() < 0.3:
            self.cut_off("hosta")  # which loses all the others
            return self.loss(name, others)
        if name.startswith("a host") and others:
            host = choose.choice(others)
            self.cut_off(host)
            if name == "a host loses power":
                self.hosts.end_all(host)
            return self.loss(name, [host])
        return Blow("nothing")

    def cut_off(self, host: str) -> None:
        """Pull the cable out for good."""
        self.cut.add(host)
        self.hosts.cut(host)

    def loss(self, name: str, hosts: list[str]) -> Blow:
        """The blow by which these hosts are lost."""
        ranks = frozenset(rank for rank, host in self.where().items() if host in hosts)
        reasons = tuple(f"lost with its host {host}: " for host in hosts)
        return Blow(name, ranks, frozenset(hosts), reasons, 1)

    def close(self) -> None:
        """End what is left, and put all cables in again."""
        self.launcher.kill()
        self.launcher.wait()
        for host in self.cut:
            self.hosts.heal(host)
        for host in self.cut:
            self.hosts.until_reached("hosta", host)
        self.stderr.close()


def play(hosts: Bed, seed: int, folder: Path) -> tuple[list[str], list[str]]:
    """Run one job; returns what was done and what was wrong."""
    job = HostsJob(hosts, seed, folder)
    wrong = []
    try:
        job.run()
        judge_traces(job)
    except Wrong as exc:
        wrong.append(str(exc))
        job.signal(signal.SIGKILL, job.pid, "hosta")
    try:
        wrong += await_nothing(hosts)
    finally:
        job.close()
    job.reader.join(HANG_S)
    if wrong:
        wrong = [str(job), *wrong]
        wrong += [json.dumps(each) for each in job.told if each["what"] != "done"]
        wrong.append((folder / "stderr").read_text())
    names = [re.sub(r"for [0-9.]+ s ", "", name) for name in job.done]
    return names, wrong


@contextlib.contextmanager
def on_hosts(
    count: int, folder: Path
) -> Iterator[Callable[[int, Path], tuple[list[str], list[str]]]]:
    """Have so many hosts; gives what plays a job there.

    Raises:
        SystemExit: they cannot be pretended here.
    """
    if why := why_not():
        sys.exit(f"soak_failures: {why}")
    with bed(folder, count) as hosts:
        for host in hosts.names:
            hosts.run(host, "mkdir", "-p", SOCKETS)
        yield lambda seed, own: play(hosts, seed, own)
