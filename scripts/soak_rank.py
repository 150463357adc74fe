"""A rank of the jobs of scripts/soak_failures.

It runs one random program of `programs_writer` after the other, whose values it checks, until
SIGUSR1 has come to `pycoll-run`, and tells what happens in lines of JSON. With --survive it goes on
with those that live. The first argument is a folder that all attempts of the job have. If the last
one is "alone", SIGUSR1 ends this rank with status 0, and SIGUSR2 has it raise an exception.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from programs_steps import OP_TIMEOUT_S, Rank, Step
from programs_writer import Writer

import pycoll

STEPS = 40

# What a failure makes wrong: that a receive is not done, and that all hear of calls that differ.
# Hosts of a program are blocks of ranks, which those that are left may not be. A rank that computes
# is late to hear of a failure.
WITHOUT = ["doom", "mismatch", "split_by_host", "compute"]

RANK, ATTEMPT = int(os.environ["PYCOLL_RANK"]), int(os.environ["PYCOLL_ATTEMPT"])


def say(what: str, **fields: Any) -> None:
    """Tell something, in one piece."""
    line = json.dumps({"what": what, "rank": RANK, "attempt": ATTEMPT, **fields})
    os.write(1, f"{line}\n".encode())


def take_place(folder: str) -> None:
    """Make sure that this rank of the attempt before has ended, here or on another host."""
    place = os.open(f"{folder}/place.{RANK}", os.O_RDWR | os.O_CREAT)  # until this process ends
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("is double")
        raise


class Boom(Exception):
    """Raised by SIGUSR2."""


def boom(signum: int, frame: object) -> None:
    raise Boom


def hurry(comm: pycoll.Communicator, *seed: int) -> None:
    """Make many calls of one kind, one right behind the other: ranks wait for a free slot."""
    choose = random.Random(str(seed))
    x, root = np.full(choose.choice((1, 100, 20_000)), comm.rank), choose.randrange(comm.size)
    out, right, left = np.empty_like(x), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    call = choose.choice(
        (
            lambda: comm.broadcast(x if comm.rank == root else out, root),
            lambda: comm.reduce(x, "sum", root, out if comm.rank == root else None),
            lambda: comm.all_reduce(x, out=out),
            lambda: comm.sendrecv(x, right, left, out=out),
        )
    )
    for _ in range(100):
        call()


def run(rank: Rank, program: Sequence[Step], survives: bool) -> None:
    """Run a program; if it fails, have all know who are in a call with this rank."""
    try:
        rank.run(program)
    except (pycoll.PeerFailed, pycoll.Revoked):
        if survives:  # a communicator without the rank that was lost waits for this one
            for comm in rank.comms.values():
                comm.revoke()
        raise


def failure_of(comm: pycoll.Communicator) -> pycoll.PeerFailed:
    """Return how a rank of a communicator has failed of which one has."""
    try:
        comm.barrier()
    except pycoll.PeerFailed as error:
        return error
    raise AssertionError(f"no rank of {comm} has failed")


def work(comm: pycoll.Communicator, seed: int, survives: bool, asked: list[int]) -> None:
    """Run programs until this is asked to end, on all ranks or on those that are left."""
    number = 0
    while True:
        try:
            number = comm.all_reduce(number, op="max")  # some may be a program ahead
            while not comm.all_reduce(bool(asked)):
                if comm.size == 1:
                    time.sleep(0.05)  # there is nobody to do anything with
                else:
                    program = Writer((seed, number), comm.size, 1, False, WITHOUT).write(STEPS)
                    with comm.dup() as world:
                        hurry(world, seed, number)
                        run(Rank(world, (seed, number), 0), program, survives)
                number += 1
                say("done", number=number)
            is_finished = True
        except (pycoll.PeerFailed, pycoll.Revoked) as error:
            if not survives:
                raise
            failed = failure_of(comm) if isinstance(error, pycoll.Revoked) else error
            say("lost", of=failed.rank, reason=failed.reason)
            is_finished = False
        if comm.agree(is_finished):
            return
        comm = comm.shrink()
        say("shrunk", members=comm.members)


def main(folder: str, seed: int, how: str) -> None:
    """Be the rank; what it raises ends it with status 1."""
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: asked.append(signum))
    if how == "alone":
        signal.signal(signal.SIGUSR1, lambda signum, frame: os._exit(0))
        signal.signal(signal.SIGUSR2, boom)
    faulthandler.register(signal.SIGTERM, chain=True)  # where is a rank that has to be ended?
    take_place(folder)
    say("started", pid=os.getpid(), parent=os.getppid(), host=os.uname().nodename)
    try:
        # With a deadline pycoll says what hangs; users have mostly none.
        comm = pycoll.init(op_timeout=OP_TIMEOUT_S if seed % 2 else None)
        say("joined", size=comm.size)
        work(comm, seed, how == "survives", asked)
    except pycoll.PeerFailed as error:
        say("failed", error="PeerFailed", of=error.rank, reason=error.reason)
        raise
    except pycoll.Error as error:
        say("failed", error=type(error).__name__, text=str(error)[:1000])
        raise
    say("over")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
