"""Scripts as those of script_jobs.py, run by a pool of ranks, which costs them no start.

A script's `comm` is one of its own. What it changes beyond that (a method, a signal's handler) it
puts back: `cleanup` is an ExitStack that is closed at its end.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ranks_pool import Pools
from script_jobs import PRELUDE

NAME = "script.py"

WITHOUT_PYTHON = """
def without_python(*names):
    "From now on these methods must be the core's, unless another thread of Python's is at work."
    def watched(name, method):
        def call(self, *args, **kwargs):
            busy = self._group.engine.transport.core.python_busy
            assert busy, f"{name} went through Python"
            return method(self, *args, **kwargs)
        return call

    for name in names:
        method = getattr(pycoll.Communicator, name)
        cleanup.callback(setattr, pycoll.Communicator, name, method)
        setattr(pycoll.Communicator, name, watched(name, method))
"""


class Scripts:
    """Runs scripts on ranks that stay up."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def __call__(
        self, n: int, text: str, transport: str = "shm", *options: str, **environment: str
    ) -> None:
        """Run a script on `n` ranks, each of which must call `ok`.

        Args:
            n: number of ranks.
            text: of the script.
            transport: by which the ranks communicate.
            options: more for pycoll-run.
            environment: variables of the ranks; each set of them needs a pool of its own.
        """
        if transport != "shm":  # which is how ranks of one host communicate anyhow
            options = ("--transport", transport, *options)
        ended_well = self._pools(n, options, environment)(run, text)
        assert all(ended_well), f"these ranks did not call ok(): {ended_well}"


def run(comm: Any, text: str) -> bool:
    """Run a script as `__main__`; return whether it has called `ok`."""
    script, before = ModuleType("__main__"), sys.modules["__main__"]
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    names = vars(script)
    sys.modules["__main__"] = script
    try:
        with nothing_unseen(), contextlib.ExitStack() as cleanup:
            exec(compile("import numpy as np\n" + PRELUDE + WITHOUT_PYTHON, NAME, "exec"), names)
            names |= {"comm": comm, "rank": comm.rank, "size": comm.size, "cleanup": cleanup}
            names["ok"] = lambda: names.update(is_ok=True)
            exec(compile(text, NAME, "exec"), names)
        return bool(names.get("is_ok"))
    finally:
        sys.modules["__main__"] = before
        names.clear()


@contextlib.contextmanager
def nothing_unseen() -> Iterator[None]:
    """Fail the script for what a thread of it, or a finalizer, has raised and nobody caught."""
    unseen: list[BaseException] = []

    def note(args: Any) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            unseen.append(args.exc_value)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = note, note
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before
    said = [line for error in unseen for line in traceback.format_exception(error)]
    assert not said, "raised where nobody catches it:\n" + "".join(said)
