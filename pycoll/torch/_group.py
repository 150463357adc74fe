"""The process group: what PyTorch calls, its Python and its C++ (DDP's reducer), by its names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.constants import default_pg_timeout

import pycoll
from pycoll.torch._collectives import TensorCollectives as Calls
from pycoll.torch._memory import TensorReduction, row, tensors_of
from pycoll.torch._work import NO_LIMIT, CallQueue, CallWork, GroupWork, MessageWork, translating
from pycoll.torch._world import GroupSeat


def make(opts: Any) -> PycollGroup:
    """Make the group that PyTorch asks for, on each of its ranks."""
    ranks, seconds = list(opts.global_ranks_in_group), opts.timeout.total_seconds()
    name = f"group {ranks if len(ranks) <= 8 else opts.group_id}" if ranks else "torch.distributed"
    with translating:
        seat = GroupSeat(opts.store, opts.group_rank, opts.group_size, seconds, name)
    if opts.timeout == default_pg_timeout and seat.comm.op_timeout < float("inf"):
        seconds = seat.comm.op_timeout  # of --op-timeout: the program has named none
    return PycollGroup(seat, seconds)


def _by(group: PycollGroup, opts: Any) -> TensorReduction:
    """Return how a call reduces; programs may pass an operator in place of options."""
    op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    found = group.reductions.get(op)
    if found is None:
        found = TensorReduction(op, group.size())
        if op != ReduceOp.PREMUL_SUM:  # those differ in their factors
            group.reductions[op] = found
    return found


def _collective(call: Callable[..., None], count: int, more: str = "") -> Any:
    """Return a method that takes so many arguments, and options: the call gets "by" and "root".

    The first argument is filled: a tensor, a list of tensors, or one of lists.
    """

    def method(self: PycollGroup, *args: Any, opts: Any = None) -> GroupWork:
        if len(args) > count:
            args, opts = args[:count], args[count]
        if "by" in more:
            args = (*args, _by(self, opts))
        if "root" in more:
            args = (*args, getattr(opts, "rootRank", opts))
        return self._begin(opts, call, *args)

    return method


class PycollGroup(ProcessGroup):
    """A process group whose calls are those of a communicator, within so many seconds each."""

    def __init__(self, seat: GroupSeat, seconds: float) -> None:
        super().__init__(seat.comm.rank, seat.comm.size)
        self._seat, self._comm, self._timeout = seat, seat.comm, seconds
        self._calls = Calls(seat.comm)
        self._queue = CallQueue(f"pycoll {seat.comm.name}")
        self.reductions: dict[Any, TensorReduction] = {}
        self._coalesced: list[GroupWork] | None = None
        self._name = self._description = ""

    supports_splitting = supports_coalescing = False

    def getBackendName(self) -> str:
        return "pycoll"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    def _get_backend(self, device: Any) -> PycollGroup:
        return self

    @property
    def _device_types(self) -> list[Any]:
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    allreduce = _collective(Calls.all_reduce, 1, "by")
    allreduce_coalesced = _collective(Calls.all_reduce_each, 1, "by")
    reduce = _collective(Calls.reduce, 1, "by root")
    reduce_scatter = _collective(Calls.reduce_scatter, 2, "by")
    reduce_scatter_single = _collective(Calls.reduce_scatter_single, 2, "by")
    reduce_scatter_single_coalesced = _collective(Calls.reduce_scatter_each, 2, "by")
    broadcast = _collective(Calls.broadcast, 1, "root")
    allgather = _collective(Calls.all_gather, 2)
    allgather_coalesced = _collective(Calls.all_gather_lists, 2)
    all_gather_single = _collective(Calls.all_gather_single, 2)
    all_gather_single_coalesced = _collective(Calls.all_gather_each, 2)
    gather = _collective(Calls.gather, 2, "root")
    scatter = _collective(Calls.scatter, 2, "root")
    alltoall = _collective(Calls.all_to_all, 2)
    all_to_all_single = _collective(Calls.all_to_all_single, 4)
    barrier = _collective(Calls.barrier, 0)

    def _begin(self, opts: Any, call: Callable[..., object], *args: Any) -> GroupWork:
        """Make ``call(*args, seconds)``, or have it made when those before it are done."""
        seconds, timeout = self._timeout, getattr(opts, "timeout", NO_LIMIT)
        if timeout > NO_LIMIT:
            seconds = timeout.total_seconds()
        is_async = getattr(opts, "asyncOp", True)
        if not is_async and self._queue.begin():
            try:
                with translating:
                    call(self._calls, *args, seconds)
            finally:
                self._queue.done()
            return GroupWork(args[:1])
        if torch.is_inference_mode_enabled():  # another thread may not fill such tensors
            call = torch.inference_mode()(call)
        gpus = [tensor.device for tensor in tensors_of(args[:1]) if tensor.is_cuda]
        if gpus:  # another thread has another current stream
            call = partial(_on_stream, torch.cuda.current_stream(gpus[0]), call)
        work = CallWork(self._queue, args[:1], call, self._calls, *args, seconds)
        self._queue.add(work)
        if not is_async:
            work.wait()
        return self._noted(work)

    def _noted(self, work: GroupWork) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None
        return self._begin(None, lambda *_: [work.wait() for work in works])

    # Messages are bytes: whoever receives them says what they mean.

    def send(self, tensors: Sequence[Any], dest: int, tag: int = 0) -> GroupWork:
        with translating:
            request = self._comm.isend(row(tensors[0]).view(torch.uint8), dest, tag)
        return self._noted(MessageWork(tensors, request, self._timeout))

    def recv(self, tensors: Sequence[Any], source: int, tag: int = 0) -> GroupWork:
        place, status = row(tensors[0]), pycoll.Status(0, 0, 0)
        with translating:
            request = self._comm.irecv(source, tag, place.view(torch.uint8), status)
        return self._noted(MessageWork(tensors, request, self._timeout, place, status))

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> GroupWork:
        return self.recv(tensors, pycoll.ANY_SOURCE, tag)

    def shutdown(self) -> None:
        self._queue.end()  # when the calls that were made are done
        try:
            self._seat.leave()
        except pycoll.Error as exc:  # PyTorch would keep half of its groups
            warnings.warn(f"pycoll: {exc}", RuntimeWarning, stacklevel=2)

    def abort(self) -> None:
        self._seat.leave()


def _on_stream(stream: Any, call: Callable[..., object], *args: Any) -> None:
    with torch.cuda.stream(stream):
        call(*args)
