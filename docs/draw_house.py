"""Draw the two pictures of docs/design.md: the packages, and a byte's way to the socket.

    python docs/draw_house.py house [--check]    # docs/pictures/house.svg
    python docs/draw_house.py way [--check]      # docs/pictures/way.svg; builds the core, a minute

With --check nothing is written; it fails if the picture is not up to date. The packages are those
of the table in design.md, which a test compares with the source. The way is what runs: a core in
which every function is called, and none built in, is made in a folder of its own, and two ranks
reduce an array over tcp. Whoever calls sendmsg then is asked for its callers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PICTURES = DOCS / "pictures"

FONT = 'font-family="DejaVu Sans, Verdana, sans-serif"'
CODE = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12"'
PUBLIC, PRIVATE, LINE = "#fdd49e", "#cfe3f3", "#7a8a99"

# ------------------------------------------------------------------------------ the packages

WIDTH, HEIGHT, GAP, BETWEEN = 215, 42, 18, 30


def packages() -> dict[str, tuple[str, set[str]]]:
    """Each package: what it is, and what it imports, by the table in design.md."""
    text = (DOCS / "design.md").read_text(encoding="utf-8").split("| package |", 1)[1]
    found = {}
    for line in text.split("\n\n", 1)[0].splitlines()[2:]:
        names, what, inside, _ = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = what, set(re.findall(r"`([^`]+)`", inside))
    return found


def house() -> str:
    """The packages, each above all that it imports. Lines that follow from others are left out."""
    table = packages()
    imports = {name: inside for name, (_, inside) in table.items()}

    @cache
    def reached(name: str) -> frozenset[str]:
        return frozenset(imports[name]).union(*map(reached, imports[name]))

    @cache
    def level(name: str) -> int:
        return 1 + max(map(level, imports[name]), default=-1)

    lines = {
        (name, other)
        for name, inside in imports.items()
        for other in inside
        if not any(other in reached(third) for third in inside - {other})
    }
    levels = [[n for n in table if level(n) == i] for i in range(1 + max(map(level, table)))]
    widest = max(map(len, levels))
    total = widest * (WIDTH + GAP) + GAP
    place: dict[str, tuple[float, float]] = {}
    for i, names in enumerate(levels):
        # Beside what they import, so that lines are short.
        wanted = {n: [place[o][0] for o in imports[n] if (n, o) in lines] for n in names}
        names.sort(key=lambda n: sum(wanted[n]) / len(wanted[n]) if wanted[n] else 0.0)
        left = (total - len(names) * (WIDTH + GAP) + GAP) / 2
        for k, name in enumerate(names):
            y = (len(levels) - 1 - i) * (HEIGHT + BETWEEN) + GAP
            place[name] = left + k * (WIDTH + GAP) + WIDTH / 2, y
    high = len(levels) * (HEIGHT + BETWEEN) + GAP - BETWEEN + GAP
    drawn = []
    for name, other in sorted(lines):
        (x1, y1), (x2, y2) = place[name], place[other]
        y1 += HEIGHT
        bend = (y2 - y1) / 2
        drawn.append(
            f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} '
            f'{x2:.0f} {y2:.0f}" fill="none" stroke="{LINE}" stroke-width="1.2"/>'
        )
    for name, (x, y) in place.items():
        color = PRIVATE if name.startswith("_") and name != "__init__" else PUBLIC
        shown = {"__init__": "pycoll", "__main__": "python -m pycoll"}.get(name, name)
        what = re.split("[,;:]", table[name][0].replace("`", ""))[0]
        drawn += [
            f'<rect x="{x - WIDTH / 2:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="4" '
            f'fill="{color}" stroke="{LINE}"/>',
            f'<text x="{x:.0f}" y="{y + 17:.0f}" text-anchor="middle" {CODE}>{shown}</text>',
            f'<text x="{x:.0f}" y="{y + 33:.0f}" text-anchor="middle" {FONT} '
            f'font-size="10">{escape(what)}</text>',
        ]
    return svg(total, high, drawn, "The packages of pycoll; each imports only what is below it")


# ------------------------------------------------------------------------------ a byte's way

PROGRAM = """
import os, numpy as np, pycoll
comm = pycoll.init()
x, out = np.ones(64), np.empty(64)
for _ in range(5):  # the first calls make plans and connections
    comm.all_reduce(x, out=out)
    comm.barrier()
if comm.rank == 0:
    open(os.environ["WAY"], "w").close()
comm.all_reduce(x, out=out)
if comm.rank == 0:
    os.rename(os.environ["WAY"], os.environ["WAY"] + ".done")
assert (out == comm.size).all()
"""

WATCH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Stands before the system's: notes who calls it, while the file is there. */
ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (real == NULL)
        *(void **)&real = dlsym(RTLD_NEXT, "sendmsg");
    const char *path = getenv("WAY");
    FILE *file = path != NULL && getenv("PYCOLL_RANK")[0] == '0' ? fopen(path, "r+") : NULL;
    if (file != NULL) {
        void *frames[64];
        int count = backtrace(frames, 64);
        fseek(file, 0, SEEK_END);
        for (int i = 1; i < count; i++) {
            Dl_info info;
            if (dladdr(frames[i], &info) && strstr(info.dli_fname, "/_core.") != NULL)
                fprintf(file, "%s %zx\n", info.dli_fname,
                        (char *)frames[i] - (char *)info.dli_fbase - 1);
        }
        fprintf(file, "\n");
        fclose(file);
    }
    return real(socket, message, flags);
}
"""


def callers() -> list[tuple[str, str]]:
    """The functions between the method and sendmsg, in the order of calls, and their files."""
    with tempfile.TemporaryDirectory(prefix="pycoll-way.") as name:
        folder = Path(name)
        (folder / "setup.cfg").write_text(f"[build]\nbuild_base = {folder}/build\n")
        flags = os.environ | {
            "CFLAGS": "-g -fno-inline -fno-optimize-sibling-calls",
            "DIST_EXTRA_CONFIG": str(folder / "setup.cfg"),
        }
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "built"]
        subprocess.run([*pip, str(ROOT)], cwd=folder, env=flags, check=True)
        (folder / "watch.c").write_text(WATCH)
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-shared", "-fPIC", "-O1", "watch.c", "-o", "watch.so", "-ldl"]
        subprocess.run(command, cwd=folder, check=True)
        (folder / "program.py").write_text(PROGRAM)
        environ = os.environ | {
            "PYTHONPATH": str(folder / "built"),
            "LD_PRELOAD": str(folder / "watch.so"),
            "WAY": str(folder / "way"),
        }
        launcher = [sys.executable, "-P", "-m", "pycoll._launcher", "-n", "2"]
        job = [*launcher, "--transport", "tcp", "program.py"]
        subprocess.run(job, cwd=folder, env=environ, check=True)
        first = (folder / "way.done").read_text().split("\n\n", 1)[0].splitlines()
        library = first[0].split()[0]
        found: list[tuple[str, str]] = []
        for address in (line.split()[1] for line in first):
            line = subprocess.run(
                ["addr2line", "-f", "-e", library, f"0x{address}"],
                capture_output=True, text=True, check=True,
            ).stdout.split()  # fmt: skip
            file = re.sub(r".*/_core/", "", line[1].partition(":")[0])
            found.append((line[0], file))
        return found[::-1]


def way() -> str:
    """A byte's way from the method of the communicator to the socket."""
    steps = [("comm.all_reduce(x)", "the user's program"), *callers(), ("sendmsg", "the kernel")]
    drawn = []
    for k, (function, file) in enumerate(steps):
        y = GAP + k * 34
        ends = k in (0, len(steps) - 1)
        drawn += [
            f'<rect x="40" y="{y}" width="250" height="24" rx="4" '
            f'fill="{PUBLIC if ends else PRIVATE}" stroke="{LINE}"/>',
            f'<text x="50" y="{y + 16}" {CODE}>{escape(function)}</text>',
            f'<text x="305" y="{y + 16}" {FONT} font-size="12" fill="#555">{escape(file)}</text>',
        ]
        if not ends:
            drawn.append(f'<text x="12" y="{y + 16}" {FONT} font-size="12" fill="#555">{k}</text>')
        if k:
            drawn.append(
                f'<path d="M165 {y - 10} V{y}" stroke="{LINE}" stroke-width="1.5" fill="none"/>'
            )
    title = "From comm.all_reduce on rank 0 to the socket, over tcp"
    return svg(580, 2 * GAP + len(steps) * 34, drawn, title)


def svg(width: float, height: float, drawn: list[str], title: str) -> str:
    """A picture of its parts."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    )
    white = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", white, *drawn, "</svg>\n"])


def main(arguments: list[str]) -> int:
    """Write a picture, or compare it."""
    makers = {"house": house, "way": way}
    checks = "--check" in arguments
    names = [word for word in arguments if word != "--check"]
    if len(names) != 1 or names[0] not in makers:
        print(__doc__)
        return 2
    path = PICTURES / f"{names[0]}.svg"
    made = makers[names[0]]()
    if checks:
        if not path.is_file() or path.read_text(encoding="utf-8") != made:
            print(f"{path} is not up to date: python docs/draw_house.py {names[0]}")
            return 1
        return 0
    PICTURES.mkdir(exist_ok=True)
    path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
