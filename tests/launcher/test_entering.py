"""Waiting at the door of a host's agent until all ranks of the job have come."""

from __future__ import annotations

import socket
import time

import pytest

from pycoll._launcher import agent_socket, entering
from pycoll.errors import BootstrapError


@pytest.mark.parametrize(
    ("missing", "late"), [([2], "rank 2 of 4"), ([1, 2], "ranks 1-2 of 4"), (None, "all ranks")]
)
def test_who_is_missing_is_named_when_the_agent_ends_first(
    missing: list[int] | None, late: str
) -> None:
    ours, agents = socket.socketpair()
    with ours:
        with agents:
            if missing is not None:
                agent_socket.send(agents, {"missing": missing})
        now = time.monotonic()
        with pytest.raises(BootstrapError, match=f"ended before {late} had joined"):
            entering._wait(ours, 0, 4, now, now + 60)
