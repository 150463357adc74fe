"""ZeRO in PyTorch: data-parallel ranks cut the optimizer's state, the gradients, the parameters.

An all_reduce of gradients (stage 0) is a reduce_scatter and an all_gather, and the optimizer's step
fits between the two. So a rank needs the state of its shard alone (stage 1), gradients until they
are summed (stage 2), and a layer's parameters while it computes (stage 3). All of this moves while
the ranks compute: a layer's gradients as soon as the backward pass has them, parameters before the
layer needs them. Source: Rajbhandari et al. 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pycoll import Communicator, Request
from pycoll._support.public_edge import edge, edges, mark_users


class _Group:
    """Parameters that are views of one array, ``(shards, n)``, filled up with zeros."""

    def __init__(self, parameters: list[Tensor], shards: int, own: int, cut: bool) -> None:
        self.parameters, self.own, self.cut = parameters, own, cut
        self.counts = [parameter.numel() for parameter in parameters]
        self.shape = shards, -(-sum(self.counts) // shards)
        self.gradients: Any = None
        self.come = 0  # how many gradients in this step
        values = self.flatten([parameter.detach() for parameter in parameters])
        self.hold_values(values)
        self.shard = values[own].clone() if cut else values[own]
        self.hold_values(None)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = self.parameters[0].detach().new_zeros(self.shape)
        for part, tensor in zip(self.parts(flat), tensors, strict=True):
            part.copy_(tensor)
        return flat

    def parts(self, flat: Tensor) -> list[Tensor]:
        parts = flat.view(-1)[: sum(self.counts)].split(self.counts)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def hold_values(self, flat: Tensor | None) -> None:
        """Have parameters in this array; or, if they are cut, none, but what has their shapes."""
        if flat is None and not self.cut:
            return
        self.values: Any = flat
        self.whole = flat is not None  # or on its way
        for i, p in enumerate(self.parameters):
            p.data = p.new_empty(()).expand(p.shape) if flat is None else self.parts(flat)[i]

    def hold_gradients(self, flat: Tensor | None) -> None:
        self.gradients = flat
        for i, p in enumerate(self.parameters):
            p.grad = None if flat is None else self.parts(flat)[i]

    def pack(self, x: Tensor) -> Any:
        """Return what autograd keeps: of parameters that are cut, or a view of one, the place."""
        if not self.cut or x.untyped_storage().data_ptr() != self.values.data_ptr():
            return x
        return x.shape, x.stride(), x.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else self.values.as_strided(*kept)


@edges
class ShardedOptimizer:
    """A PyTorch optimizer of data-parallel ranks, whose gradients are summed.

    The parameters become views of one array a group: change them in place. Every backward pass
    computes all groups, by `run`, in the same order on all ranks, and gives each parameter a
    gradient; else `step` raises a ValueError.

    Args:
        groups: lists of parameters, those of one dtype. All ranks pass the same shapes and values.
        comm: the data axis. Nothing else uses it from the first `run` of a step to the last.
        make: returns an optimizer of tensors that works element by element, as torch.optim.Adam.
        stage: what is cut over the ranks: 0 nothing, 1 the state, 2 gradients, too, 3 everything.
        backwards: backward passes of a step, one for each micro-batch. Stages 0 and 1 sum the
            gradients in the last one, the others in each.
    """

    @edge
    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        comm: Communicator,
        make: Callable[[list[Tensor]], torch.optim.Optimizer],
        *,
        stage: int = 1,
        backwards: int = 1,
    ) -> None:
        lists = [list(group) for group in groups]
        _check(lists, comm, stage, backwards)
        self._comm, self._stage, self._backwards = comm, stage, backwards
        shards, own = (comm.size, comm.rank) if stage else (1, 0)
        self._groups = [_Group(parameters, shards, own, stage == 3) for parameters in lists]
        for number, group in enumerate(self._groups):
            for parameter in group.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._come, number))
        self.optimizer = make([group.shard for group in self._groups])
        self._gathering: dict[int, Request[Any]] = {}
        self._summing: dict[int, Request[Any]] = {}
        self._order: list[int] = []  # in which groups have been summed in this step
        self._agreed: list[int] = []  # with the other ranks

    def run(self, group: int, layer: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return ``layer(*args)``, for which the parameters of a group are there; backward, too."""
        if not 0 <= group < len(self._groups):
            raise ValueError(f"there is no group {group} of {len(self._groups)}")
        self._ready(group)
        if group + 1 < len(self._groups):
            self._gather(group + 1)
        chosen = self._groups[group]
        try:
            with saved_tensors_hooks(chosen.pack, chosen.unpack):
                y = layer(*args)
        except Exception as exc:
            mark_users(exc, f"rank {self._comm.rank} ran group {group} of the parameters")
            raise
        if y.requires_grad:
            y.register_hook(partial(self._begin_backward, group))
        chosen.hold_values(None)
        return y

    def ready(self) -> None:
        """Wait until the parameters are there; in stage 3 they are when they run only."""
        for number in list(self._gathering) if self._stage == 3 else range(len(self._groups)):
            self._ready(number)

    def step(self) -> None:
        """Wait for the sums, update the shards, forget the gradients, gather the first group."""
        for number, group in enumerate(self._groups):
            if group.come != len(group.parameters) * self._backwards:
                raise ValueError(f"group {number}: a parameter has got no gradient, or too many")
        if self._order != self._agreed:
            if any(order != self._order for order in self._comm.all_gather(self._order)):
                raise ValueError("the ranks have computed the groups in different orders")
            self._agreed = self._order
        self._add()
        self.optimizer.step()
        self._order = []
        self.ready()  # stage 3 may have gathered more than was needed
        for group in self._groups:
            group.come, group.shard.grad = 0, None
            group.hold_gradients(None)
            group.whole = not self._stage
            group.hold_values(None)
        self._gather(0)

    def whole_state(self) -> list[dict[str, Any]]:
        """Return each group's state as without sharding; "value" is that of the parameters.

        A name has a list of a tensor for each parameter, or one for all, as "step". Collective.
        """
        states = []
        for group in self._groups:
            state: dict[str, Any] = {"value": group.shard, **self.optimizer.state[group.shard]}
            for name, value in state.items():
                if value.shape == group.shard.shape:
                    flat = self._comm.all_gather(value) if self._stage else value
                    state[name] = [part.clone() for part in group.parts(flat)]
                else:
                    state[name] = value.clone()
            states.append(state)
        return states

    def load_whole_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from what `whole_state` returned in any stage, with any number of ranks."""
        self.ready()
        for group, state in zip(self._groups, states, strict=True):
            for name, value in state.items():
                part = group.flatten(value)[group.own] if isinstance(value, list) else value
                if name == "value":
                    group.shard.copy_(part)
                else:
                    self.optimizer.state[group.shard][name] = part.clone()
            group.whole = not self._stage

    def _gather(self, number: int) -> None:
        group = self._groups[number]
        if not group.whole:
            group.whole = True
            if self._stage == 3:
                group.hold_values(group.shard.new_empty(group.shape))
            self._gathering[number] = self._comm.iall_gather(group.shard, out=group.values)

    def _ready(self, number: int) -> None:
        self._gather(number)
        if number in self._gathering:
            self._gathering.pop(number).wait()

    def _begin_backward(self, number: int, gradient: Tensor) -> None:
        """Called with the gradient of what a group returned."""
        self._ready(number)
        if number:
            self._gather(number - 1)
        if self._stage >= 2 and number in self._summing:
            self._add()
        group = self._groups[number]
        if group.gradients is None:
            group.hold_gradients(torch.zeros_like(group.values))

    @edge
    def _come(self, number: int, parameter: Tensor) -> None:
        """Called with each gradient; begins to sum those of a group when the last has come."""
        group = self._groups[number]
        if group.gradients is None:
            raise ValueError(f"group {number} was not computed by run()")
        group.come += 1
        if group.come % (len(group.parameters) * (self._backwards if self._stage < 2 else 1)):
            return
        if self._stage >= 2:
            self._add()  # so no more than two groups have gradients
        group.hold_values(None)
        mine = group.gradients[group.own]
        if self._stage:
            self._summing[number] = self._comm.ireduce_scatter(group.gradients, out=mine)
        else:
            self._summing[number] = self._comm.iall_reduce(mine, out=mine)
        self._order.append(number)

    def _add(self) -> None:
        """Wait for the sums; add them to those of earlier backward passes."""
        for number, request in self._summing.items():
            request.wait()
            group = self._groups[number]
            total, before = group.gradients[group.own], group.shard.grad
            if self._stage >= 2:
                total = total.clone() if before is None else before + total
                group.hold_gradients(None)
            group.shard.grad = total
        self._summing.clear()


def _check(groups: list[list[Any]], comm: Any, stage: int, backwards: int) -> None:
    if not hasattr(comm, "ireduce_scatter"):
        raise TypeError(f"comm is a communicator, not {type(comm).__name__}")
    if stage not in (0, 1, 2, 3) or backwards < 1:
        raise ValueError(f"stage={stage} is from 0 to 3, backwards={backwards} at least 1")
    every = [parameter for group in groups for parameter in group]
    if not all(isinstance(p, Tensor) and p.is_leaf and p.requires_grad for p in every):
        raise TypeError("parameters are tensors that require a gradient, and no results")
    if not all(groups) or len(set(map(id, every))) < len(every):
        raise ValueError("each group has a parameter, and each parameter one group")
    if any(len({(p.dtype, p.device) for p in group}) > 1 for group in groups):
        raise TypeError("the parameters of a group have one dtype and one device")
    raw = (p.detach().cpu().reshape(-1).view(torch.uint8).numpy() for p in every)
    mine = [stage, backwards, [(tuple(p.shape), str(p.dtype)) for p in every], *map(crc32, raw)]
    if any(theirs != mine for theirs in comm.all_gather(mine)):
        raise ValueError("the ranks have different stages, parameters, or values of them")
