"""Memory of GPUs that the RDMA device reaches by itself (GPUDirect RDMA), as dma-bufs.

Whether this device can read and write a GPU's memory is tried once for each GPU: that it can be
registered is not enough.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Hashable

from pycoll._transports.base import EAGER_LIMIT, Elsewhere
from pycoll._transports.rdma_queues import Endpoint, Queue
from pycoll._transports.registrations import GpuRegistration
from pycoll._transports.verbs import PROBE_S, Region
from pycoll._transports.verbs_errors import SUCCESS, VerbsError, explain
from pycoll.errors import TransportError

SAMPLE = 16 * 1024
"""Bytes that are written from one place of a GPU's memory to another, for a trial."""


class Reaches:
    """How one rank's device comes to what is in the memory of GPUs.

    Args:
        rank: this rank's number, for warnings.
        endpoint: whose device it is.
    """

    def __init__(self, rank: int, endpoint: Endpoint) -> None:
        self._rank = rank
        self._endpoint = endpoint
        self._can: bool | None = None
        self._works: dict[Hashable, bool] = {}

    def reach(self, view: memoryview, elsewhere: Elsewhere) -> GpuRegistration | None:
        """Register the memory whose staging buffer `view` is; None: it cannot be."""
        if len(view) <= EAGER_LIMIT:
            return None  # the processor copies it into frames
        if self._can is None:
            self._can = self._endpoint.device.can_register_dmabuf()
        if not self._can or not self._is_tried(elsewhere):
            return None
        registered = self._register(elsewhere, len(view))
        if registered is None:
            return None
        return self._endpoint.registrations.reach(view, elsewhere, *registered)

    def _register(self, elsewhere: Elsewhere, nbytes: int) -> tuple[Region, int] | None:
        exported = elsewhere.export()
        if exported is None:
            return None
        descriptor, offset = exported
        try:
            return self._endpoint.device.register_dmabuf(descriptor, offset, nbytes), offset
        except VerbsError:
            return None
        finally:
            os.close(descriptor)

    # --- whether it works ------------------------------------------------------------------

    def _is_tried(self, elsewhere: Elsewhere) -> bool:
        """Whether the device can read and write memory of that GPU: found out the first time."""
        works = self._works.get(elsewhere.device)
        if works is None:
            works = self._works[elsewhere.device] = False
            try:
                works = self._try(elsewhere.another(SAMPLE))
            except (TransportError, VerbsError) as exc:
                self._warn(str(exc))
            self._works[elsewhere.device] = works
        return works

    def _try(self, sample: Elsewhere) -> bool:
        registered = self._register(sample, SAMPLE)
        if registered is None:
            return False
        region, offset = registered
        try:
            half = os.urandom(SAMPLE // 2)
            sample.write(half + bytes(SAMPLE // 2))
            status = self._write_within(region, offset, SAMPLE // 2)
            found = bytearray(SAMPLE)
            sample.read(memoryview(found))
        finally:
            region.close()
        if status == SUCCESS and found == half + half:
            return True
        self._warn(explain(status) if status else "what it has written is not there")
        return False

    def _write_within(self, region: Region, begin: int, nbytes: int) -> int:
        """Write the first half of a region to the second; returns the completion's status."""
        endpoint = self._endpoint
        queues: list[Queue] = []
        try:
            queues += [Queue(endpoint, None), Queue(endpoint, None)]
            for queue, other in (queues, queues[::-1]):
                queue.pair.connect(endpoint.device.peer(other.pair))
            work = queues[0].begin(None)
            key, into = region.local_key, begin + nbytes
            queues[0].pair.write(work, begin, nbytes, key, into, region.remote_key, None)
            deadline = time.monotonic() + PROBE_S
            while time.monotonic() < deadline and not endpoint.failure:
                endpoint.poll()
                for completion in endpoint.arrived:
                    if endpoint.queue_of(completion) is queues[0]:
                        return int(completion.status)
            raise TransportError("a write within it did not end")
        finally:
            for queue in queues:
                queue.close()  # its completions are dropped when the transport comes to them

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"rdma: rank {self._rank}: the RDMA device cannot reach the GPU's memory ({reason}), "
            "so arrays on it travel through host memory. PYCOLL_GPUDIRECT=0 does not try.",
            RuntimeWarning,
            stacklevel=2,
        )
