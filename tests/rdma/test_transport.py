"""The transport contract on real devices: the tests of test_transports.py, and what only they show.

Several ranks in one process, each of which opens the device for itself.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycoll.transports.rdma import RdmaTransport

# A file of the folder above, which is on no path.
_spec = importlib.util.spec_from_file_location(
    "test_transports", Path(__file__).parents[1] / "test_transports.py"
)
assert _spec is not None
assert _spec.loader is not None
contract: Any = sys.modules.setdefault("test_transports", importlib.util.module_from_spec(_spec))
if not hasattr(contract, "World"):
    _spec.loader.exec_module(contract)
World = contract.World
pattern = contract.pattern

# Collected here, they get the fixtures of this module. Not the one of 3 GiB in one message, which
# names its transports itself: in the virtual machine there is neither the memory nor the time.
_FIXTURES = {"world", "pair"}
for _name, _value in list(vars(contract).items()):
    if _name.startswith("test_") and _FIXTURES & set(inspect.signature(_value).parameters):
        globals()[_name] = _value


@pytest.fixture
def world() -> Iterator[World]:
    made = World("rdma", 3)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[World]:
    made = World("rdma", 2)
    yield made
    made.close()


def test_the_contract_is_run_here() -> None:
    assert "test_a_payload_arrives_unchanged" in globals()
    assert "test_after_cancel_of_a_receive_nothing_more_is_written" in globals()


def registered(world: World) -> list[int]:
    return [len(node.transport.endpoint.registrations) for node in world.nodes]


class Counted:
    """Work requests of one rank, by opcode: counted where they are handed to pyverbs."""

    def __init__(self, transport: RdmaTransport) -> None:
        self.counts: dict[str, int] = {}
        self._transport = transport
        self._queues = [queue.pair for queue in transport.endpoint._queues.values()]

    def __enter__(self) -> dict[str, int]:
        for pair in self._queues:
            self._count(pair, "send")
            self._count(pair, "write")
        return self.counts

    def _count(self, pair: Any, verb: str) -> None:
        real = getattr(pair, verb)

        def counted(*args: Any, **kwargs: Any) -> None:
            self.counts[verb] = self.counts.get(verb, 0) + 1
            real(*args, **kwargs)

        setattr(pair, verb, counted)

    def __exit__(self, *exc_info: object) -> None:
        for pair in self._queues:
            del pair.send, pair.write
