"""A small training that ranks do together, and one process alone with all their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS, BATCH, WIDTH = 3, 6, 8  # a batch is for each rank


class Network(nn.Module):
    """Three layers, the last of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Any, short: bool = False) -> Any:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x[:, :3] if short else self.last(x)


def network() -> Network:
    torch.manual_seed(7)
    return Network()


def batches(step: int, size: int) -> Any:
    """Inputs and targets of all ranks, ``(size * BATCH, ...)``."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size * BATCH, WIDTH, generator=generator)
    return x, torch.randn(size * BATCH, 3, generator=generator)


def own(step: int, rank: int, size: int) -> Any:
    """One rank's part of them."""
    return tuple(all_of.chunk(size)[rank] for all_of in batches(step, size))


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    model: Any,
    data: Callable[[int], Any],
    optimizer: Any = None,
    forward: Callable[..., Any] | None = None,
) -> None:
    """Three steps of SGD."""
    optimizer = optimizer or sgd(model.parameters())
    for step in range(STEPS):
        x, target = data(step)
        optimizer.zero_grad()
        y = model(x) if forward is None else forward(model, x, step)
        nn.functional.mse_loss(y, target).backward()
        optimizer.step()


def alone(size: int, forward: Callable[..., Any] | None = None) -> dict[str, Any]:
    """The parameters after one process has trained with the data of all ranks."""
    model = network()
    train(model, lambda step: batches(step, size), forward=forward)
    return {name: value.detach() for name, value in model.state_dict().items()}


def check(model: Any, expected: dict[str, Any]) -> None:
    """The parameters of a model are those of one process, but for the order of additions."""
    values = model if isinstance(model, dict) else model.state_dict()
    names = {name.removeprefix("module."): value for name, value in values.items()}
    assert names.keys() == expected.keys()
    for name, value in names.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
