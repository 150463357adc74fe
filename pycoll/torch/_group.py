"""The process group: what torch.distributed calls, by its own names.

Its Python and its C++ (DDP's reducer, functional collectives) come here; each call is begun, and
answered with a Work.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.constants import default_pg_timeout

import pycoll
from pycoll.torch import _collectives as collectives
from pycoll.torch._memory import TensorReduction, bytes_of, row
from pycoll.torch._queue import CallQueue
from pycoll.torch._work import CallWork, GroupWork, MessageWork, translated, translating
from pycoll.torch._world import GroupSeat

Tensors = Sequence[Any]
Lists = Sequence[Tensors]
_NONE = timedelta(0)
_MOST_SHOWN = 8  # of a group's ranks in its name


def make(opts: Any) -> PycollGroup:
    """Make the group that PyTorch asks for, on each of its ranks."""
    ranks, name = list(opts.global_ranks_in_group), "torch.distributed"
    if ranks:  # it is not the default group
        name = f"group {ranks if len(ranks) <= _MOST_SHOWN else opts.group_id}"
    seconds = opts.timeout.total_seconds()
    with translating():
        seat = GroupSeat(opts.store, opts.group_rank, opts.group_size, seconds, name)
    if opts.timeout == default_pg_timeout and seat.comm.op_timeout < math.inf:
        seconds = seat.comm.op_timeout  # of --op-timeout: the program has named none
    return PycollGroup(seat, seconds)


class PycollGroup(distributed.ProcessGroup):
    """A process group of torch.distributed whose calls are those of a communicator of pycoll's.

    Args:
        seat: this rank's communicator.
        seconds: default deadline of every call.
    """

    def __init__(self, seat: GroupSeat, seconds: float) -> None:
        super().__init__(seat.comm.rank, seat.comm.size)
        self._seat, self._comm, self._timeout = seat, seat.comm, seconds
        self._queue = CallQueue(f"pycoll {seat.comm.name}")
        self._reductions: dict[Any, TensorReduction] = {}
        self._coalesced: list[GroupWork] | None = None
        self._name = self._description = ""

    # --- what it is ------------------------------------------------------------------------

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
        """Set the deadline of calls that are made from now on."""
        self._timeout = timeout.total_seconds()

    # --- how calls begin -------------------------------------------------------------------

    def _begin(
        self, opts: Any, filled: Tensors, call: Callable[..., object], *args: Any
    ) -> GroupWork:
        """Make ``call(comm, *args, seconds)``, or have it made when those before it are done."""
        seconds, timeout = self._timeout, getattr(opts, "timeout", _NONE)
        if timeout > _NONE:
            seconds = timeout.total_seconds()
        is_async = getattr(opts, "asyncOp", True)
        if not is_async and self._queue.begin():
            try:
                call(self._comm, *args, seconds)
            except pycoll.Error as exc:
                raise translated(exc) from exc
            finally:
                self._queue.done()
            return GroupWork(filled)
        if torch.is_inference_mode_enabled():  # another thread may not fill such tensors
            call = torch.inference_mode()(call)
        gpus = [tensor.device for tensor in filled if tensor.is_cuda]
        if gpus:  # another thread has another current stream
            args = (torch.cuda.current_stream(gpus[0]), call, self._comm, *args)
            work = CallWork(self._queue, filled, _on_stream, *args, seconds)
        else:
            work = CallWork(self._queue, filled, call, self._comm, *args, seconds)
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
        return self._begin(None, [], lambda *_: [work.wait() for work in works])

    def _by(self, opts: Any) -> TensorReduction:
        op = distributed.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        found = self._reductions.get(op)
        if found is None:
            found = TensorReduction(op, self._comm.size)
            if op != distributed.ReduceOp.PREMUL_SUM:  # those differ in their factors
                self._reductions[op] = found
        return found

    # --- collectives -----------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> GroupWork:
        tensors, by = _listed(tensors), self._by(opts)
        return self._begin(opts, tensors, collectives.all_reduce, *tensors, by)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> GroupWork:
        by = self._by(opts)
        return self._begin(opts, tensors, collectives.all_reduce_many, tensors, by)

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        (tensor,), by, root = tensors, self._by(opts), opts.rootRank
        return self._begin(opts, tensors, collectives.reduce, tensor, by, root)

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any) -> GroupWork:
        (output,), (items,), by = outputs, inputs, self._by(opts)
        return self._begin(opts, outputs, collectives.reduce_scatter, output, items, by)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> GroupWork:
        call, by = collectives.reduce_scatter_single, self._by(opts)
        return self._begin(opts, [output], call, output, tensor, by)

    def reduce_scatter_single_coalesced(self, outs: Tensors, xs: Tensors, opts: Any) -> GroupWork:
        call, by = collectives.reduce_scatter_single, self._by(opts)
        return self._begin(opts, outs, collectives.each, call, outs, xs, by)

    def broadcast(self, tensors: Any, opts: Any) -> GroupWork:
        tensors, root = _listed(tensors), getattr(opts, "rootRank", opts)
        return self._begin(opts, tensors, collectives.broadcast, *tensors, root)

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> GroupWork:
        (items,), (tensor,) = outputs, inputs
        return self._begin(opts, items, collectives.all_gather, items, tensor)

    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Any) -> GroupWork:
        filled = [tensor for of_rank in outputs for tensor in of_rank]
        by_input = [*zip(*outputs, strict=True)]
        call = collectives.all_gather
        return self._begin(opts, filled, collectives.each, call, by_input, inputs)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> GroupWork:
        return self._begin(opts, [output], collectives.all_gather_single, output, tensor)

    def all_gather_single_coalesced(
        self, outs: Tensors, xs: Tensors, opts: Any = None
    ) -> GroupWork:
        call = collectives.all_gather_single
        return self._begin(opts, outs, collectives.each, call, outs, xs)

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any) -> GroupWork:
        items, (tensor,), root = [*outputs[0]] if outputs else [], inputs, opts.rootRank
        return self._begin(opts, items, collectives.gather, items, tensor, root)

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any) -> GroupWork:
        (output,), items, root = outputs, [*inputs[0]] if inputs else [], opts.rootRank
        return self._begin(opts, outputs, collectives.scatter, output, items, root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        return self._begin(opts, outputs, collectives.all_to_all, outputs, inputs)

    def all_to_all_single(
        self, output: Any, tensor: Any, of_out: Any, of_tensor: Any, opts: Any = None
    ) -> GroupWork:
        call, lengths = collectives.all_to_all_single, ([*of_out], [*of_tensor])
        return self._begin(opts, [output], call, output, tensor, *lengths)

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._begin(opts, [], lambda comm, seconds: comm.barrier(timeout=seconds))

    # --- messages --------------------------------------------------------------------------

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> GroupWork:
        (tensor,) = tensors
        with translating():
            request = self._comm.isend(bytes_of(row(tensor)), dest, tag)
        return self._noted(MessageWork(request, tensor, self._timeout, None, None))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        (tensor,), status = tensors, pycoll.Status(0, 0, 0)
        place = row(tensor)
        with translating():
            request = self._comm.irecv(source, tag, bytes_of(place), status)
        return self._noted(MessageWork(request, tensor, self._timeout, place, status))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        return self.recv(tensors, pycoll.ANY_SOURCE, tag)

    # --- its end ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give the group up, when the calls that were made are done."""
        self._queue.end()
        try:
            self._seat.leave()
        except pycoll.Error as exc:  # PyTorch would keep half of its groups
            warnings.warn(f"pycoll: {exc}", RuntimeWarning, stacklevel=2)

    def abort(self) -> None:
        """Give the group up at once: what is under way fails."""
        self._seat.leave()

    # Names in other versions of PyTorch.
    _set_default_timeout = set_timeout
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _listed(tensors: Any) -> Tensors:
    """Programs that call a group themselves may pass a tensor, or an operator for the options."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _on_stream(stream: Any, call: Callable[..., object], *args: Any) -> None:
    with torch.cuda.stream(stream):
        call(*args)
