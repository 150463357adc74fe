"""What tests of the rendezvous share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rendezvous_world import Job


@pytest.fixture(params=["zmq", "local"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job whose ranks meet, in either way."""
    one = Job(request.param)
    yield one
    one.close()
