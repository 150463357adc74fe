"""The random programs of test_rdma_programs.py, with memory of GPUs among theirs.

Longer: RDMA_SEEDS=10000 pytest -m "".
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from rdma_programs import AFTER, BEFORE, GUARD, NUMBER, SEEDS, Message, Program
from rdma_world import World, check_at_rest
from tiers import few

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

from pycoll._cuda import cuda
from pycoll._gpu.gpudirect import GpuMemory
from pycoll._transports.base import Arrival, Reach, Transfer

NOTHING = 0xEE  # what the staging buffer of an array holds that is reached on its GPU


@pytest.fixture(autouse=True)
def gpu(fake_driver: Path) -> Iterator[None]:
    fake_cuda.load(fake_driver)
    gc.collect()
    fake_cuda.reset()
    yield
    assert fake_cuda.stats()["illegal_accesses"] == 0


class Reached:
    """An array on a GPU and its staging buffer, while a transport reaches it."""

    def __init__(self, nbytes: int, content: bytes) -> None:
        self.array = fakegpu.empty((nbytes + 4096 + 3,), np.uint8)[3 : 3 + nbytes]
        self.pointer, self.nbytes = self.array.pointer, nbytes
        self.poke(content)
        self.buffer = np.full(nbytes, NOTHING, np.uint8)
        self.place = GpuMemory(cuda.device(0), self.pointer, nbytes, self.array)
        self.reach: Reach | None = None

    def poke(self, content: bytes) -> None:
        fake_cuda.poke(self.pointer, content)

    def peek(self) -> bytes:
        cuda.device(0).flush()
        return fake_cuda.peek(self.pointer, self.nbytes)

    def close(self) -> None:
        assert self.reach is not None
        self.reach.close()


class GpuProgram(Program):
    """A random program in which some of what is sent and received is on a GPU."""

    def __init__(self, seed: int, dies: bool = False) -> None:
        super().__init__(seed, dies)
        self.sources: dict[int, Reached] = {}  # by number of the message
        self.targets: dict[int, Reached] = {}
        self.reached = 0
        self.given_back: list[tuple[Reached, bytes]] = []
        if self.random.random() < 0.2:
            for device in self.world.fabric.devices:
                device.refuses_dmabufs = self.random.random() < 0.3

    def send_to(self, source: int, dest: int) -> None:
        if self.random.random() < 0.4:
            return super().send_to(source, dest)
        data = self.bytes.bytes(self.random.choice([66_561, 100_000, (1 << 20) + 1, 3 << 20]))
        held = Reached(len(data), data)
        transport = self.world.transport(source)
        held.reach = transport.reach(held.buffer.data, held.place)
        if held.reach is None:
            return super().send_to(source, dest)
        self.reached += 1
        message = Message(len(self.messages), source, dest, [])
        message.data = data
        self.messages.append(message)
        self.sources[message.number] = held
        self.expected[source, dest].append(message.number)
        message.sending = transport.send(dest, NUMBER.pack(message.number), [held.buffer.data])
        message.sending.then(lambda _: self.sent(message))
        return None

    def overwrite(self, message: Message) -> None:
        held = self.sources.pop(message.number, None)
        if held is not None:
            held.close()
            held.poke(bytes([AFTER]) * held.nbytes)
        super().overwrite(message)

    def accept_one(self, message: Message) -> None:
        arrival, nbytes = message.arrival, len(message.data)
        assert arrival is not None
        held = Reached(nbytes + GUARD, bytes([BEFORE]) * (nbytes + GUARD)) if nbytes else None
        if held is not None and self.random.random() < 0.6:
            held.reach = arrival.reach(held.buffer[:nbytes].data, held.place)
        if held is None or held.reach is None:
            return super().accept_one(message)
        self.reached += 1
        self.targets[message.number] = held
        message.into = held.buffer
        message.receiving = arrival.accept(held.buffer[:nbytes].data)
        message.receiving.then(lambda _: self.received(message))
        return None

    def received(self, message: Message) -> None:
        held = self.targets.pop(message.number, None)
        if held is not None:
            held.close()
            assert message.receiving is not None
            assert held.reach is not None
            nbytes = len(message.data)
            if message.receiving.error is None and not held.reach.is_in_buffer:
                assert set(message.into.tolist()) == {NOTHING}
                message.into[:] = np.frombuffer(held.peek(), np.uint8)
            else:
                message.into[nbytes:] = BEFORE
            self.keep(held)
        super().received(message)

    def give_up(self) -> None:
        super().give_up()
        self.let_go(lambda message: message.is_given_up)

    def redirect(self) -> None:
        super().redirect()
        self.let_go(lambda message: message.into is not self.targets[message.number].buffer)

    def let_go(self, condition: Any) -> None:
        """The GPU's memory of a receive is ours again."""
        for number in list(self.targets):
            if condition(self.messages[number]):
                held = self.targets.pop(number)
                held.close()
                self.keep(held)

    def keep(self, held: Reached) -> None:
        held.peek()
        held.poke(bytes([AFTER]) * held.nbytes)
        self.given_back.append((held, bytes([AFTER]) * held.nbytes))

    def check(self) -> None:
        assert not self.targets or self.dead is not None
        for held, content in self.given_back:
            assert held.peek() == content
        super().check()


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("seed", few(range(2), range(2, SEEDS)))
def test_a_random_program_with_memory_of_gpus(seed: int) -> None:
    program = GpuProgram(seed)
    program.run()
    assert program.reached or any(device.refuses_dmabufs for device in program.world.fabric.devices)


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("seed", few(range(2), range(2, SEEDS // 2)))
def test_a_random_program_in_which_a_rank_dies(seed: int) -> None:
    GpuProgram(seed, dies=True).run()


def accepted(world: World, data: bytes) -> tuple[Reached, Transfer]:
    """Rank 0 has sent to rank 1, which has accepted to a GPU; nothing is written."""
    world.connect()
    world.send(0, 1, b"", data)
    arrival: Arrival = world.arrivals(1, 1)[0]
    held = Reached(len(data), bytes(len(data)))
    held.reach = arrival.reach(held.buffer.data, held.place)
    return held, arrival.accept(held.buffer.data)


def test_what_has_come_but_is_not_seen_yet_is_not_lost_when_it_is_received_elsewhere() -> None:
    world, data = World(2, 1), bytes(np.arange(3 << 20, dtype=np.uint32).view(np.uint8)[: 3 << 20])
    held, receiving = accepted(world, data)
    world.run(lambda: world.fabric.counts["bytes_written"] > 0)
    world.settle([0])
    assert not receiving.done
    spare = bytearray(len(data))
    receiving.redirect(memoryview(spare))
    held.close()
    world.settle()
    assert receiving.done
    assert spare == data
    check_at_rest(world)
    world.close()
