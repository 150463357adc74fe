"""Ctrl-C in `pycoll.run`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

HANGING = """
import pycoll, threading

def hang(comm):
    if comm.rank == 1:
        comm.recv(0)
    while True:  # until the launcher knows that rank 1 waits
        try:
            comm.recv(0, timeout=0.05)
        except pycoll.OperationTimeout as exc:
            if "rank 1: recv" in str(exc):
                break
    print("ready", flush=True)
    threading.Event().wait()

pycoll.run(hang, 2)
"""


def test_the_interrupt_shows_the_callers_line_and_what_each_rank_was_doing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGING)
    # A background job of a shell ignores SIGINT, and so would what it starts.
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert re.search(
        r'\A.*\n  File ".*/script.py", line 16, in <module>\n    pycoll.run\(hang, 2\)\n'
        r"KeyboardInterrupt\nwhat each rank did:\n"
        r"    rank 0: not waiting in pycoll.*\n"
        r"    rank 1: recv\(source=0, tag=ANY\) at script.py:6, for .* s\n",
        said,
    ), said
