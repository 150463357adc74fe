"""Relaying what ranks print: what it costs, and where prefixes are left out."""

from __future__ import annotations

import os
import pty
import selectors
import subprocess
import sys
import time

from pycoll._launcher.output import Sink, Stream

LIMIT_S = 60
PIECE = b"x" * 65536


def seconds_to_relay(num_pieces: int, *, tag: bool) -> float:
    """Processor time for one line of so many pieces; what comes out is checked."""
    got: list[int] = []
    end, pipe = os.pipe()
    with selectors.DefaultSelector() as selector:
        stream = Stream(
            end, 0, Sink(lambda _, data: got.append(len(data)), selector), tag=tag, log=None
        )
        started = time.process_time()
        for _ in range(num_pieces):
            os.write(pipe, PIECE)
            assert stream.read()
        os.close(pipe)
        stream.finish()
        took = time.process_time() - started
    assert sum(got) == num_pieces * len(PIECE) + len(b"[0] ") * tag + len(b"\n")
    return took


def test_a_line_without_an_end_is_not_copied_again_for_each_piece_of_it() -> None:
    # 25 MiB, measured in turn: 10 times as long as one copy; it was 300 times.
    pieces = [PIECE] * 400
    took, copies = [], []
    for _ in range(5):
        took.append(seconds_to_relay(len(pieces), tag=True))
        started = time.process_time()
        b"".join(pieces)
        copies.append(time.process_time() - started)
    assert min(took) < 50 * min(copies)


def test_a_terminal_gets_no_prefixes_if_none_are_wanted() -> None:
    ours, theirs = pty.openpty()
    run = [sys.executable, "-m", "pycoll._launcher", "-n", "1", "--no-tag-output"]
    command = [*run, "--", "echo", "hello"]
    done = subprocess.run(command, stdout=theirs, stderr=theirs, timeout=LIMIT_S, check=False)
    os.close(theirs)
    said = os.read(ours, 4096)
    os.close(ours)
    assert (done.returncode, said) == (0, b"hello\r\n")
