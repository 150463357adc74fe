"""Copies between arrays that lie at an awkward distance: 1 to 31 bytes, modulo a page.

There memmove and the kernel are slow on many processors.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiers import few

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "transports" / "_core"

# What every rank has for the others, every result at a distance of its own behind a page.
PROGRAM = """
from pycoll._transports import _core

KINDS = {"broadcast": 1, "gather": 4, "all_gather": 5, "scatter": 6, "all_to_all": 8}
SPLITTING, STACKING = ("scatter", "all_to_all"), ("gather", "all_gather", "all_to_all")
# Around a slot, a page, half of a message that two ranks copy, and a piece that is moved.
SIZES = (8184, 12289, 65535, 70001, 131073)
EDGE = 64

def placed(nbytes, distance):
    "Bytes at this distance behind a page, with some on either side."
    memory = np.full(nbytes + 4096 + 3 * EDGE, 0xEE, np.uint8)
    begin = -(memory.ctypes.data + EDGE) % 4096 + EDGE + distance
    return memory[begin - EDGE : begin + nbytes + EDGE]

CYCLE = (np.arange(4 * SIZES[-1]) % 251).astype(np.uint8)

def value(rank, nbytes):
    return CYCLE[rank * 7 : rank * 7 + nbytes]

def check(name, nbytes, distance):
    me, n = comm.rank, comm.size
    rows = [value(rank, nbytes * (n if name in SPLITTING else 1)) for rank in range(n)]
    x = placed(rows[me].nbytes, 0)[EDGE:-EDGE]
    x[:] = rows[me]
    memory = placed(nbytes * (n if name in STACKING else 1), distance)
    out = memory[EDGE:-EDGE]
    want = rows[0]
    if name == "send":
        if me == 0:
            comm.send(x, 1)
            comm.recv(1, out=out)
            want = rows[1]
        elif me == 1:
            comm.recv(0, out=out)
            comm.send(x, 0)
        else:
            return
    elif name == "broadcast":
        comm.broadcast(x if me == 0 else out)
        if me == 0:
            return
    else:
        given = x.reshape(n, -1) if name in SPLITTING else x
        result = out.reshape(n, -1) if name in STACKING else out
        if name == "scatter":
            comm.scatter(given if me == 0 else None, out=result)
            want = want.reshape(n, -1)[me]
        else:
            getattr(comm, name)(given, out=result)
            if name == "gather" and me != 0:
                return
            parts = [row.reshape(n, -1)[me] if name == "all_to_all" else row for row in rows]
            want = np.concatenate(parts)
    assert (out == want).all(), (name, nbytes, distance)
    beside = np.concatenate([memory[:EDGE], memory[-EDGE:]])
    assert (beside == 0xEE).all(), (name, nbytes, distance)

for direct in (1, 1 << 40):
    for kind in KINDS.values():
        _core.set_direct_from(kind, direct)
    for index, nbytes in enumerate(SIZES):
        for distance in range(index % 3, 65, 3) if direct == 1 else (0, 1, 16, 31):
            for name in ("send", *KINDS):
                check(name, nbytes, distance)
ok()
"""


def test_arrays_at_any_distance_are_copied_right(job: Any) -> None:
    done = job(2, PROGRAM)
    assert done.content == [0, 1], done


@pytest.mark.skipif(
    shutil.which("gcc") is None or not CORE.is_dir(),
    reason="needs gcc and a checkout's sources of the core",
)
@pytest.mark.parametrize("slow", few(["memmove", "kernel"], ["", "memmove kernel"]))
def test_copies_are_left_to_what_is_quick_at_their_distance(slow: str, tmp_path: Path) -> None:
    renamed = {
        "memmove": "seen_memmove",
        "process_vm_readv": "seen_readv",
        "process_vm_writev": "seen_writev",
    }
    tests = ROOT / "tests" / "core"
    common = ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    common += [f"-I{CORE}", "-c"]
    hooks = [f"-D{name}={ours}" for name, ours in renamed.items()]
    for command in (
        [*common, *hooks, CORE / "base/copy.c"],
        [*common, CORE / "base/processor.c", tests / "copies.c"],
        ["gcc", "copy.o", "processor.o", "copies.o", "-o", "copies"],
    ):
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
    run = subprocess.run(
        [tmp_path / "copies", *slow.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout
