"""Whole ranks over simulated RDMA devices: engines and communicators, as threads of one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from patience import PATIENCE
from simulated_device import Fabric

from pycoll._calls.group import Group
from pycoll._communicator.communicator import Communicator, World
from pycoll._runtime.engine import Engine
from pycoll._selection import agreed
from pycoll._transports.core import CoreTransport
from pycoll._transports.rdma import RdmaTransport, completions_for, receives_for

DEADLINE_S = 60.0 * PATIENCE


class Rank(Engine):
    """An engine without a launcher: its notes go straight to the others."""

    ranks: list[Rank]

    def tell(self, peer: int, note: bytes) -> None:
        self.ranks[peer].transport.hear(self.rank, note)

    def listen(self, timeout_s: float) -> Collection[int]:
        return ()


class Job:
    """Ranks of one process, each with a communicator and a simulated device.

    Args:
        size: how many.
        seed: of what the devices do.
        op_timeout: deadline of calls that have none of their own, seconds.
    """

    def __init__(self, size: int, seed: int = 0, op_timeout: float = math.inf) -> None:
        self.fabric = Fabric(seed=seed or size)
        own = {"node": 0, "rdma": {"network": "simulated"}, **agreed.said({}, 1)}
        infos = [own] * size
        settled = agreed.agree(infos)
        ranks: list[Any] = []
        devices: list[RdmaTransport] = []
        for rank in range(size):
            device = self.fabric.device(receives_for(size - 1), completions_for(size - 1))
            rdma = RdmaTransport(rank, device, "simulated")
            devices.append(rdma)
            outside = {peer: rdma for peer in range(size) if peer != rank}
            core = CoreTransport(rank, size, outside=outside)
            ranks.append(Rank(core, size, None, op_timeout))
        addresses = [rdma.address() for rdma in devices]
        for rank in ranks:
            rank.ranks, rank.agreed = ranks, settled
            rank.transport.start([{}] * size, rank)
        for rank in ranks:
            with rank.locked():
                rank.transport.outside.start(devices[rank.rank], addresses, rank)
        self.ranks = ranks
        self.devices = devices
        self.comms = []
        for rank in ranks:
            with rank.locked():
                group = Group(rank, 1, range(size))
            self.comms.append(Communicator(World(rank, rank.rank, size, 0), group))

    def run(self, program: Callable[[Any], Any]) -> list[Any]:
        """Run `program(comm)` on each rank, and return the results."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            running = [pool.submit(program, comm) for comm in self.comms]
            for done in as_completed(running, DEADLINE_S):
                if done.exception() is not None:
                    for rank in self.ranks:  # the others would wait for it
                        rank.close("another rank has failed", 0.0)
                done.result()
        return [done.result() for done in running]

    def close(self) -> None:
        closing = [
            threading.Thread(target=rank.close, args=("the end", 5.0)) for rank in self.ranks
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(DEADLINE_S)
        self.fabric.check()
