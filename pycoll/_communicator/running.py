"""How a call whose arguments were checked (`CallPlan`) is run to its end, along its route."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from pycoll._calls import arguments
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.calls import Calls
from pycoll._calls.group import Group
from pycoll._calls.shared_memory import BY_MESSAGES
from pycoll._runtime.task import Call, caller
from pycoll._transports.base import Operation
from pycoll.errors import Error


class Running:
    """Runs the calls of one communicator; a part of `Communicator`."""

    _group: Group
    _calls: Calls
    _nonblocking_calls: Calls

    def _check_open(self) -> None:
        if self._group.engine.closed is not None:
            raise Error(self._group.engine.closed)
        if self._group.context.is_closed:
            raise Error("this communicator is closed")

    def _run(self, plan: CallPlan[Any], timeout: float | None) -> Any:
        """Run a call to its end; returns what the caller gets."""
        self._check_open()
        group, text = self._group, plan.text
        deadline = time.monotonic() + self._seconds(timeout)  # one for all that it consists of

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        got: Any = BY_MESSAGES
        if plan.route is Route.SHARED_MEMORY:
            assert group.shm is not None
            call = Call(text, group.number, group.context)
            self._fetch(plan, call, left())
            got = group.shm.run(call, left(), plan.in_shared_memory)
        if got is BY_MESSAGES:
            collective = plan.is_collective
            call = Call(text, group.number if collective else -1, group.context)
            signature = f"{text}\0{caller()}".encode() if collective else b""
            got = group.engine.run(call, partial(plan.steps, signature), left(), collective)
        value, late = plan.conclude(got)
        if late:
            self._await(late, Call(text, -1, group.context), left(), plan.is_collective)
        return value

    def _fetch(self, plan: CallPlan[Any], call: Call, timeout: float) -> None:
        """Have what a call reads in host memory; the call has begun, whatever comes."""
        engine = self._group.engine
        stages = [value.stage for value in plan.reads if value.stage is not None]
        if stages:
            from pycoll._cuda.copies import all_of

            pulls = all_of(stage.pull(engine) for stage in stages)
            self._await(pulls, call, timeout, collective=True)

    def _await(
        self, copies: Sequence[Operation], call: Call, timeout: float, collective: bool
    ) -> None:
        """Wait for copies, as a part of a call."""
        engine = self._group.engine
        try:
            for copy in copies:
                engine.watch(copy)
            for copy in copies:
                engine.wait(copy, call, timeout)
                if copy.error is not None:
                    raise copy.error
        except BaseException as exc:
            for copy in copies:
                copy.cancel()
            if collective:
                engine.give_up(call, exc)
            raise

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._group.op_timeout
        return arguments.check_timeout(timeout, "timeout")
