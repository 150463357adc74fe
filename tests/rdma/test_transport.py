"""The transport contract on real devices: the tests of test_transports.py, and what only they show.

Several ranks in one process, each of which opens the device for itself.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycoll._transports.base import EAGER_LIMIT

# A file of the folder above, which is on no path.
_spec = importlib.util.spec_from_file_location(
    "test_transports", Path(__file__).parents[1] / "transports/test_transports.py"
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


def test_a_close_leaves_no_descriptor_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        world = World("rdma", 3)
        world.send(0, 1, b"", b"x")
        world.send(1, 0, b"", bytes(EAGER_LIMIT + 1))
        world.arrivals(1, 1)
        world.receive(world.arrivals(0, 1)[0])
        world.close()
    assert set(os.listdir("/proc/self/fd")) == before


def exchanged(world: World, x: Any, out: Any) -> None:
    """Send `x` from rank 0 to rank 1, into `out`."""
    number = len(world.nodes[1].arrivals) + 1
    sending = world.send(0, 1, b"h", x.data)
    receiving = world.arrivals(1, number)[-1].accept(memoryview(out))
    world.run(lambda: sending.done and receiving.done)
    np.testing.assert_array_equal(x, out)


@contextlib.contextmanager
def work_requests(world: World) -> Iterator[list[collections.Counter[str]]]:
    """Count what each rank hands to its queue pairs, and the bytes of its frames."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        for node in world.nodes:
            count: collections.Counter[str] = collections.Counter()
            counts.append(count)
            for queue in node.transport.endpoint._queues.values():
                patch.setattr(queue.pair, "send", _counted(queue.pair.send, "send", count))
                patch.setattr(queue.pair, "write", _counted(queue.pair.write, "write", count))
        yield counts


def _counted(real: Callable[..., None], verb: str, count: collections.Counter[str]) -> Any:
    def call(work: int, address: int, nbytes: int, key: int, *rest: Any) -> None:
        count[verb] += 1
        count[f"bytes of {verb}"] += nbytes
        if verb == "send":
            count["inline"] += rest[0]
        real(work, address, nbytes, key, *rest)

    return call


def test_a_large_array_is_written_from_where_it_is_to_where_it_shall_be(pair: World) -> None:
    x = np.arange(3 * 2**20, dtype=np.uint8)
    out = np.zeros_like(x)
    exchanged(pair, x, out)  # makes the lane
    regions = [len(node.transport.endpoint.device._held) for node in pair.nodes]
    with work_requests(pair) as (sender, receiver):
        exchanged(pair, x, out)
    assert (sender["send"], sender["write"]) == (1, 3)  # READY; a write a mebibyte
    assert sender["bytes of write"] == x.nbytes
    assert (receiver["send"], receiver["write"]) == (1, 0)  # GO
    assert sender["bytes of send"] + receiver["bytes of send"] < 200
    assert [len(node.transport.endpoint.device._held) for node in pair.nodes] == regions
    assert [len(node.transport.endpoint.registrations) for node in pair.nodes] == [1, 1]


def test_a_small_message_is_one_inline_send(pair: World) -> None:
    exchanged(pair, np.ones(100, np.uint8), np.zeros(100, np.uint8))  # makes the link
    with work_requests(pair) as (sender, receiver):
        exchanged(pair, np.ones(100, np.uint8), np.zeros(100, np.uint8))
    assert (sender["send"], sender["inline"], sender["write"]) == (1, 1, 0)
    assert not receiver
