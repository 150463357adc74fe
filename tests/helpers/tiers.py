"""Which tests run when: `pytest` runs the default tier, `pytest -m exhaustive` the rest.

The default tier has each behaviour once, on the sizes, ways and transports that differ in kind. The
exhaustive tier has more of the same: models, planted faults, tests of test doubles, other sizes,
long seeds. CONTRIBUTING.md says when which of them runs.

Some tests run where what they test was changed: of GPUs and of RDMA, on devices that the tests make
up; of jobs that functions, agents, nodes or other launchers begin, of what is told of jobs, and of
what is left of them; of the plugin for pytest and the commands that measure, tune, simulate and
draw; of programs made of the core's sources (`BY_PATH` in conftest.py marks them). A run of all
tests has a few of them, those marked `smoke`; the others run by `pytest -m gpu` and so on, or where
their file or folder is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from patience import PATIENCE

exhaustive = pytest.mark.exhaustive
rdma = pytest.mark.rdma
smoke = pytest.mark.smoke


def few(values: Iterable[Any], more: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test: some for the default tier, more for the exhaustive one."""
    return [*values, *(pytest.param(value, marks=exhaustive) for value in more)]


# The calls of a pool have no deadline but here.
_DEADLINE = (2, ("--op-timeout", str(20 * PATIENCE)))


def sizes(*counts: Any, more: tuple[Any, ...] = (), deadline: bool = False) -> pytest.MarkDecorator:
    """Run a test on jobs of so many ranks, and on those in `more` in the exhaustive tier.

    A job may also be a tuple of the number and of options.

    With `deadline` also on two ranks whose calls have one.
    """
    values = few(counts, more)
    if deadline:
        values.append(pytest.param(_DEADLINE, id="deadline"))
    return pytest.mark.parametrize("ranks", values, indirect=True, scope="module", ids=_name)


def _name(job: Any) -> str | None:
    return f"{job[0]} {' '.join(job[1])}" if isinstance(job, tuple) else None


TCP = ("--transport", "tcp")
TWO_HOSTS, THREE_HOSTS = ("--emulate-hosts", "2"), ("--emulate-hosts", "3")


# A message of whatever length between two ranks, on every way that it may go; or to oneself.
on_every_way = pytest.mark.parametrize(
    "ranks",
    [
        2,
        (2, ("--transport", "tcp")),
        (2, ("--transport", "zmq")),
        (2, (), {"PYCOLL_SINGLE_COPY": "0"}),
    ],
    indirect=True,
    scope="module",
    ids=["shm", "tcp", "zmq", "segments"],
)
alone = pytest.mark.parametrize("ranks", [1], indirect=True, scope="module", ids=["alone"])
