"""A small transformer on a grid of data, pipeline and tensor parallel ranks: 3-D parallelism.

    pip install torch tqdm && pycoll-run -n 8 examples/parallel/transformer.py --grid 2 2 2 --check

It learns the bytes of the standard library's own sources, in float64. The weights begin the same on
every grid: each whole tensor is made from a seed of its own, and every rank cuts its part out. So
the loss is that of one rank, but for rounding; --check compares. --save writes whole tensors, from
which --load goes on with any other grid. How each axis works: docs/parallel/three_d.md.
"""

import argparse
import functools
import os
import sysconfig
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

import pycoll
from pycoll.parallel import (
    Clock,
    ShardedOptimizer,
    bounds,
    column_linear,
    cut,
    find_stragglers,
    join,
    row_linear,
    run_pipeline,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)

VOCABULARY = 256  # the bytes
HEADS = 4
SEED = 1


class Settings(NamedTuple):
    """What is trained, the first five, and how; the losses depend on the first five alone."""

    layers: int = 4
    width: int = 32
    length: int = 32  # tokens of a sequence
    batch: int = 16  # sequences of a step, of all data parallel ranks together
    rate: float = 3e-3
    micro_batches: int = 4  # of a data parallel rank
    schedule: str = "1f1b"  # of the pipeline
    stages: int = 1  # that each rank has; more for interleaved schedules
    sequence: bool = False  # sequence parallelism on the tensor axis
    zero: bool = False  # the optimizer's state cut over the data axis
    chunks: int = 1  # of a row-parallel product


def whole_parameters(settings):
    """Yield (name, group, axis cut over the tensor parallel ranks, value): the whole network.

    Group 0 is the embedding, then comes one for each layer, then the head.
    """

    def random(name, group, axis, *shape):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + SEED)
        yield name, group, axis, 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def constant(name, group, axis, value, *shape):
        yield name, group, axis, torch.full(shape, value, dtype=torch.float64)

    def norm(name, group):
        yield from constant(f"{name}.norm.weight", group, None, 1.0, width)
        yield from constant(f"{name}.norm.bias", group, None, 0.0, width)

    layers, width, each = settings.layers, settings.width, settings.width // HEADS
    yield from random("embedding.table", 0, 0, VOCABULARY, width)
    yield from random("embedding.positions", 0, None, settings.length, width)
    for i in range(1, layers + 1):
        yield from norm(f"{i}.attention", i)
        yield from random(f"{i}.attention.in.weight", i, 1, 3, HEADS, each, width)  # q, k, v
        yield from constant(f"{i}.attention.in.bias", i, 1, 0.0, 3, HEADS, each)
        yield from random(f"{i}.attention.out.weight", i, 1, width, HEADS, each)
        yield from constant(f"{i}.attention.out.bias", i, None, 0.0, width)
        yield from norm(f"{i}.mlp", i)
        yield from random(f"{i}.mlp.in.weight", i, 0, 4 * width, width)
        yield from constant(f"{i}.mlp.in.bias", i, 0, 0.0, 4 * width)
        yield from random(f"{i}.mlp.out.weight", i, 1, width, 4 * width)
        yield from constant(f"{i}.mlp.out.bias", i, None, 0.0, width)
    yield from norm("head", layers + 1)
    yield from random("head.weight", layers + 1, 0, VOCABULARY, width)


class Stage:
    """The layers of one pipeline stage, of which this rank has its tensor parallel part."""

    def __init__(self, settings, number, stages, tp):
        self.settings, self.tp = settings, tp
        layers = bounds(settings.layers, number, stages)
        self.first, self.last = number == 0, number == stages - 1
        groups = list(range(layers.start + 1, layers.stop + 1))
        self.groups = [0] * self.first + groups + [settings.layers + 1] * self.last
        self.parameters, self.axes = {}, {}
        self.names = {group: [] for group in self.groups}
        for name, group, axis, value in whole_parameters(settings):
            if group in self.groups:
                self.parameters[name] = torch.nn.Parameter(cut(value, axis, tp))
                self.axes[name] = axis
                self.names[group].append(name)

    def forward(self, x, targets, ready):
        """Run the layers on one micro-batch: (length, batch) of tokens, or x of the stage before.

        Returns x for the next stage; the last one returns the sum of the tokens' losses.
        """
        for group in self.groups:
            ready(group)
            if group == 0:
                x = self._embed(x)
            elif group <= self.settings.layers:
                x = x + self._attention(self._norm(x, f"{group}.attention"), f"{group}.attention")
                x = x + self._mlp(self._norm(x, f"{group}.mlp"), f"{group}.mlp")
            else:
                logits = self._column(self._norm(x, "head"), "head")
                x = vocabulary_cross_entropy(logits, targets, VOCABULARY, self.tp).sum()
        return x

    def _embed(self, tokens):
        table, positions = (self.parameters[f"embedding.{n}"] for n in ("table", "positions"))
        sequence = self.settings.sequence
        x = vocabulary_embedding(tokens, table, VOCABULARY, self.tp, sequence=sequence)
        if sequence:
            positions = positions[bounds(len(positions), self.tp.rank, self.tp.size)]
        return x + positions[:, None]

    def _attention(self, x, name):
        heads = self.parameters[f"{name}.in.bias"].shape[1]  # of this rank
        qkv = self._column(x, f"{name}.in").unflatten(2, (3, heads, -1))
        q, k, v = qkv.permute(2, 1, 3, 0, 4)  # each (batch, heads, length, width of a head)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._row(y.permute(2, 0, 1, 3).flatten(2), f"{name}.out")

    def _mlp(self, x, name):
        return self._row(functional.gelu(self._column(x, f"{name}.in")), f"{name}.out")

    def _norm(self, x, name):
        weight, bias = (self.parameters[f"{name}.norm.{n}"] for n in ("weight", "bias"))
        return functional.layer_norm(x, weight.shape, weight, bias)

    def _column(self, x, name):
        weight = self.parameters[f"{name}.weight"].flatten(0, -2)
        bias = self.parameters.get(f"{name}.bias")
        bias = None if bias is None else bias.flatten()
        return column_linear(x, weight, bias, self.tp, sequence=self.settings.sequence)

    def _row(self, x, name):
        weight, bias = self.parameters[f"{name}.weight"].flatten(1), self.parameters[f"{name}.bias"]
        how = {"sequence": self.settings.sequence, "chunks": self.settings.chunks}
        return row_linear(x, weight, bias, self.tp, **how)


class Trainer:
    """One rank of the grid: its part of the network, of the batches, of the optimizer's state.

    Attributes:
        steps: how many have been made.
        clock: tells this rank's computing from its waiting.
    """

    def __init__(self, grid, settings):
        self.grid, self.settings, self.steps, self.clock = grid, settings, 0, Clock()
        self.dp, self.pp, self.tp = (self.clock.watch(grid.axis(n)) for n in ("dp", "pp", "tp"))
        if settings.batch < self.dp.size * settings.micro_batches:
            raise ValueError("every micro-batch needs a sequence: make batch larger")
        ranks, stages = self.pp.size, self.pp.size * settings.stages
        if stages > settings.layers:
            raise ValueError(f"{settings.layers} layers are too few for {stages} pipeline stages")
        numbers = range(self.pp.rank, stages, ranks)
        self.stages = [Stage(settings, number, stages, self.tp) for number in numbers]
        self.parameters, self.axes, self.names = {}, {}, {}
        for stage in self.stages:
            self.parameters |= stage.parameters
            self.axes |= stage.axes
            self.names |= stage.names
        groups = [[self.parameters[name] for name in names] for names in self.names.values()]
        adam = functools.partial(torch.optim.Adam, lr=settings.rate)
        self.optimizer = ShardedOptimizer(groups, self.dp, adam, sharded=settings.zero)

    def step(self):
        """Train with one batch; returns the mean loss of all its tokens, on every rank."""
        mine = bounds(self.settings.batch, self.dp.rank, self.dp.size)
        tokens = batch_of(self.settings, self.steps)[:, mine]
        micro_batches = tokens.tensor_split(self.settings.micro_batches, dim=1)
        self.optimizer.zero_grad()
        loss = self._pipeline(micro_batches)
        if self.settings.sequence and self.tp.size > 1:
            self._sum_over_the_sequence()
        self.optimizer.step()
        self.steps += 1
        counted = self.tp.rank == 0  # the others have the same
        with self.clock.waiting():
            return self.grid.all_reduce(loss if counted else 0.0)

    def _pipeline(self, micro_batches):
        """Compute the gradients of all micro-batches; returns the loss, if the last is here."""
        tokens_of_a_step = self.settings.batch * self.settings.length
        groups = list(self.names)

        def forward(action, x):
            stage, tokens = self.stages[action.chunk], micro_batches[action.micro_batch]
            x = tokens[:-1] if stage.first else x.requires_grad_()
            y = stage.forward(x, tokens[1:], lambda g: self.optimizer.ready(groups.index(g)))
            y = y / tokens_of_a_step if stage.last else y
            return y.detach(), (x, y)

        def backward(action, saved, gradient):
            x, y = saved
            y.backward(gradient)
            return x.grad

        run = run_pipeline(
            self.pp,
            self.settings.schedule,
            len(micro_batches),
            forward,
            backward,
            chunks=self.settings.stages,
        )
        return float(sum(run.outputs))

    def _sum_over_the_sequence(self):
        """Sum the gradients of what every rank has whole, and uses on its part of the sequence."""
        names = [name for name, axis in self.axes.items() if axis is None]
        gradients = [self.parameters[name].grad for name in names]
        for gradient, total in zip(gradients, self.tp.all_reduce_many(gradients), strict=True):
            gradient.copy_(total)

    def save(self, path):
        """Write whole tensors, and the optimizer's state of each, to one file. Collective."""
        self.optimizer.ready()
        mine = {}
        whole = self.optimizer.whole_state()
        for names, states in zip(self.names.values(), whole, strict=True):
            for name, state in zip(names, states, strict=True):
                parameter = self.parameters[name].detach()
                for key, value in {"value": parameter, **state}.items():
                    axis = self.axes[name] if value.shape == parameter.shape else None
                    mine[f"{name}/{key}"] = join(value, axis, self.tp).numpy()
        if self.dp.rank == self.tp.rank == 0:
            parts = self.pp.gather(mine, root=0)
            if self.pp.rank == 0:
                everything = {k: v for part in parts for k, v in part.items()}
                with open(f"{path}.part", "wb") as file:
                    np.savez(file, steps=self.steps, **everything)
                os.replace(f"{path}.part", path)  # so that no reader finds half of it
        self.grid.barrier()

    def load(self, path):
        """Go on from a file of `save`, whatever grid has written it."""
        with np.load(path) as file:
            keys = {}
            for key in file.files:
                keys.setdefault(key.partition("/")[0], []).append(key)
            self.steps = int(file["steps"])
            states = []
            for names in self.names.values():
                states.append([])
                for name in names:
                    parameter, state = self.parameters[name], {}
                    for key in keys[name]:
                        value = torch.from_numpy(file[key])
                        axis = self.axes[name] if value.dim() == parameter.dim() else None
                        state[key.partition("/")[2]] = cut(value, axis, self.tp)
                    parameter.data.copy_(state.pop("value"))
                    states[-1].append(state)
        self.optimizer.load_whole_state(states)


@functools.cache
def text():
    """Return the standard library's modules, one after the other, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8))


def batch_of(settings, step):
    """Return the tokens of one step: (length + 1, batch), the same on every grid."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text()) - settings.length, (settings.batch,), generator=generator)
    return text()[starts + torch.arange(settings.length + 1)[:, None]].long()


def make_grid(comm, shape):
    """Return a grid of data, pipeline and tensor parallel ranks."""
    return comm.grid(shape, names=("dp", "pp", "tp"))


def train(trainer, steps, show=False, slow=0.0):
    """Make some steps; returns the losses."""
    losses = []
    progress = tqdm(range(steps), desc="steps", disable=not show)
    for _ in progress:
        time.sleep(slow)
        losses.append(trainer.step())
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    trainer.optimizer.ready()
    return losses


def arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--grid", type=int, nargs=3, metavar=("DP", "PP", "TP"), help="default: all data parallel"
    )
    parser.add_argument("--steps", type=int, default=50)
    for name, default in Settings()._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--check", action="store_true", help="compare the losses with one rank's")
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint at the end")
    parser.add_argument("--load", metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--slow", type=int, metavar="RANK", help="make one rank a straggler")
    return parser.parse_args()


def main():
    """Train on the grid, then report."""
    options = arguments()
    torch.set_num_threads(1)  # else the threads of the ranks would get in each other's way
    settings = Settings(*(getattr(options, name) for name in Settings._fields))
    with pycoll.init() as comm:
        grid = make_grid(comm, options.grid or (comm.size, 1, 1))
        trainer = Trainer(grid, settings)
        if options.load:
            trainer.load(options.load)
        begin = trainer.steps
        slow = 0.05 if comm.rank == options.slow else 0.0
        trainer.clock.read()
        losses = train(trainer, options.steps, show=comm.rank == 0, slow=slow)
        stragglers = find_stragglers(comm, *trainer.clock.read())
        sent = [int(grid.axis(name).counters().sent_bytes.sum()) for name in grid.names]
        sent = comm.all_reduce(np.array(sent), op="max") // options.steps
        if options.save:
            trainer.save(options.save)
        worst = 0.0
        if options.check and comm.rank == 0:
            alone = Trainer(make_grid(comm.sub([0]), (1, 1, 1)), settings)
            expected = train(alone, begin + options.steps)[begin:]
            worst = max(abs(a / b - 1.0) for a, b in zip(losses, expected, strict=True))
        worst = comm.broadcast(worst, root=0)

    if comm.rank == 0:
        print(f"steps {begin} to {trainer.steps}: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
        print(stragglers)
        print("bytes sent in a step by the busiest rank:", end=" ")
        print(", ".join(f"{name} {n:,}" for name, n in zip(grid.names, sent, strict=True)))
        if options.check:
            print(f"largest relative difference from the losses of one rank: {worst:.1e}")
    if not worst <= 1e-9:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
