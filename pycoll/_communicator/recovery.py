"""What a communicator does about failures: revoke, agree, shrink, abort."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from pycoll._calls import arguments, subgroups
from pycoll._calls.group import Group
from pycoll._communicator.running import Running
from pycoll._runtime.agreement import Agreement
from pycoll._runtime.task import Call
from pycoll._support.public_edge import part_of
from pycoll._support.wording import a_kind

if TYPE_CHECKING:
    from pycoll._communicator.communicator import Communicator


@part_of("Communicator")
class Recovery(Running):
    """How a program goes on after a failure, or ends; a part of `Communicator`."""

    if TYPE_CHECKING:

        def _made(self, group: Group) -> Communicator: ...

    def revoke(self) -> None:
        """Make this communicator unusable on all its ranks. Not collective; returns at once.

        Every call of it that a rank is in, and every later one, raises `Revoked`; or what it
        raised before, if it was unusable already. `agree` and `shrink` go on working. A failed rank
        makes all its communicators unusable by itself; this is for ranks that wait for one that has
        an error of its own. Other communicators are untouched.

        Raises:
            Error: this communicator is closed.
        """
        self._check_open()
        engine = self._group.engine
        with engine.locked():
            engine.revoke(self._group.context)

    def agree(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Return whether all living ranks have passed True: the same on all of them.

        A collective call, which works on a communicator that is unusable, too, and when ranks fail
        meanwhile. Ranks that have failed, have left the job or do so before all others have called
        it do not count.

        Args:
            flag: bool; or an int, or an array without dimensions, of which only 0 is false.
            timeout: seconds; when they have passed this raises, but the flag has been given, and
                the others may agree.

        Raises:
            MismatchError: on all living ranks: some have called `shrink` instead.
        """
        return self._agree("agree()", _check_flag(flag), timeout).flag

    def shrink(self, *, name: str | None = None, timeout: float | None = None) -> Communicator:
        """Return a new communicator of the living ranks, in their order, the same on all of them.

        A collective call, which works on a communicator that is unusable, too, and when ranks fail
        meanwhile. Ranks that have failed, or have left the job, are not in the new communicator. If
        one fails after this was decided, the new communicator is unusable, too: shrink that one.
        Of a grid it returns a communicator, which is no grid.

        Under `pycoll-run --survive` ranks that a shrink has left out no longer count for the exit
        status of the job.

        Args:
            name: what messages call it; None: this one "without" the ranks that are gone.
            timeout: seconds; when they have passed this raises, but the others may have a
                communicator that this rank belongs to.

        Raises:
            MismatchError: on all living ranks: some have called `agree` instead.
        """
        name = subgroups.check_name(name)
        agreed = self._agree("shrink()", True, timeout)
        return self._made(subgroups.shrunk(self._group, agreed.number, agreed.ranks, name))

    def _agree(self, text: str, flag: bool, timeout: float | None) -> Agreement:
        self._check_open()
        call = Call(text, -1, self._group.context)
        return self._group.engine.agree(call, flag, self._seconds(timeout))

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job at once; `pycoll-run` exits with `code`."""
        code = arguments.check_int(code, "code")
        engine = self._group.engine
        if engine.control is not None and engine.closed is None:
            with engine.locked():
                engine.control.post("abort", code=code)
                engine.control.close(2.0)
        os._exit(code & 0xFF)


def _check_flag(flag: object) -> bool:
    if isinstance(flag, bool | int) or getattr(flag, "shape", None) == ():
        return bool(flag)
    raise TypeError(f"flag is a bool, not {a_kind(flag)}")
