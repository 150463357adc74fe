"""What tests of the simulated RDMA device share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import simulated_device


@pytest.fixture
def close_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The devices that a test makes are closed at its end."""
    made: list[Any] = []
    make = simulated_device.Fabric.device

    def remember(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(simulated_device.Fabric, "device", remember)
    yield
    for device in made:
        device.close()
