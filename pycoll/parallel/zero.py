"""ZeRO in PyTorch: each data-parallel rank has the optimizer's state of a share of the parameters.

Plain data parallelism sums the gradients by all_reduce and lets every rank make the same step. An
all_reduce is a reduce_scatter and an all_gather. ZeRO (Rajbhandari et al. 2020, section 5) makes
the step between the two: a rank gets the sum for its shard, updates that, and the shards are
gathered. As many bytes move, and the state, for Adam two numbers for each parameter, is cut by the
number of ranks.

The parameters come in groups, in the order in which the network uses them. Gradients are summed
from the last group to the first. After the step all groups are being gathered at once, in order:
the forward pass begins when the first is there, and the others arrive behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pycoll import Communicator, Request
from pycoll._support.public_edge import edges


@edges
class ShardedOptimizer:
    """An optimizer whose state is cut over the ranks of `comm`.

    The parameters and their gradients become views of one array a group. Whoever changes them
    changes them in place.

    Args:
        groups: lists of parameters, those of one dtype. The ranks of `comm` pass the same shapes
            and values.
        comm: the data axis; it is used by this optimizer alone until the last `ready`.
        make: returns a PyTorch optimizer for a list of tensors, one that works element by
            element, for example ``lambda shards: torch.optim.Adam(shards, lr=1e-3)``.
        sharded: False: plain data parallelism, for comparison. Every rank has all of the state.

    Cost: 2 (size - 1) / size bytes of the parameters sent by each rank in a step, sharded or not.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        comm: Communicator,
        make: Callable[[list[Tensor]], Any],
        *,
        sharded: bool = True,
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._comm, self._sharded = comm, sharded and comm.size > 1
        shards, self._own = (comm.size, comm.rank) if self._sharded else (1, 0)
        self._values = [_flatten(group, shards) for group in self._groups]
        self._gradients = [torch.zeros_like(values) for values in self._values]
        self._shards = []
        for group, values, gradients in zip(
            self._groups, self._values, self._gradients, strict=True
        ):
            for parameter, value, gradient in zip(
                group, _parts(values, group), _parts(gradients, group), strict=True
            ):
                parameter.data, parameter.grad = value, gradient
            shard = values[self._own].detach()
            shard.grad = gradients[self._own]
            self._shards.append(shard)
        self.optimizer = make(self._shards)
        self._summing: dict[int, Request[Any]] = {}
        self._gathering: dict[int, Request[Any]] = {}

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        for gradients in self._gradients:
            gradients.zero_()

    def reduce(self, group: int) -> None:
        """Begin to sum the gradients of a group, which must be whole on this rank.

        Called as soon as that is so, the sum goes on behind the rest of the backward pass. The
        ranks of `comm` call it for the same groups in the same order.
        """
        gradients = self._gradients[group]
        if self._sharded:
            request = self._comm.ireduce_scatter(gradients, out=gradients[self._own])
        else:
            request = self._comm.iall_reduce(gradients, out=gradients)
        self._summing[group] = request

    def step(self) -> None:
        """Sum what `reduce` has not begun with, update the shards, begin to gather all groups."""
        for group in reversed(range(len(self._groups))):
            if group not in self._summing:
                self.reduce(group)
        for request in self._summing.values():
            request.wait()
        self._summing.clear()
        self.optimizer.step()
        if self._sharded:
            for group, values in enumerate(self._values):
                request = self._comm.iall_gather(values[self._own], out=values)
                self._gathering[group] = request

    def ready(self, group: int | None = None) -> None:
        """Wait until the parameters of a group are there; of all groups, if None."""
        for number in list(self._gathering) if group is None else [group]:
            if number in self._gathering:
                self._gathering.pop(number).wait()

    def whole_state(self) -> list[list[dict[str, Any]]]:
        """Return the state of each parameter of each group, as without sharding. Collective."""
        states = []
        for group, values, shard in zip(self._groups, self._values, self._shards, strict=True):
            whole: list[dict[str, Any]] = [{} for _ in group]
            for name, value in self.optimizer.state[shard].items():
                if value.shape != shard.shape:  # one for all, as the number of steps is
                    parts = [value.clone() for _ in group]
                else:
                    flat = self._comm.all_gather(value) if self._sharded else value
                    parts = [part.clone() for part in _parts(flat.view(values.shape), group)]
                for state, part in zip(whole, parts, strict=True):
                    state[name] = part
            states.append(whole)
        return states

    def load_whole_state(self, states: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Take over what `whole_state` returned, here or with another number of ranks."""
        for group, values, shard, state in zip(
            self._groups, self._values, self._shards, states, strict=True
        ):
            for name, first in state[0].items():
                if first.shape != group[0].shape:
                    self.optimizer.state[shard][name] = first.clone()
                    continue
                flat = torch.zeros_like(values)
                for part, one in zip(_parts(flat, group), state, strict=True):
                    part.copy_(one[name])
                self.optimizer.state[shard][name] = flat[self._own].clone()


def _flatten(group: list[Tensor], shards: int) -> Tensor:
    """Return the values one after the other, filled up with zeros: ``(shards, ...)``."""
    count = sum(parameter.numel() for parameter in group)
    flat = group[0].new_zeros(shards, -(-count // shards))
    for part, parameter in zip(_parts(flat, group), group, strict=True):
        part.copy_(parameter.detach())
    return flat


def _parts(flat: Tensor, group: list[Tensor]) -> list[Tensor]:
    """View the parameters of a group in its flat array."""
    counts = [parameter.numel() for parameter in group]
    parts = flat.view(-1)[: sum(counts)].split(counts)
    return [part.view(p.shape) for part, p in zip(parts, group, strict=True)]
