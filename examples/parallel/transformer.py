"""A small transformer on a grid of ranks: 3-D parallelism, and two axes more.

    pip install torch tqdm && pycoll-run -n 8 examples/parallel/transformer.py --grid 2 2 2 --check
    pycoll-run -n 4 examples/parallel/transformer.py --context 2 --experts 8 --zero 3 --check

It learns the bytes of the standard library's own sources, in float64. The network is the same on
every grid (transformer_model.py), so the loss is that of one rank, but for rounding; --check
compares. --save writes whole tensors, from which --load goes on with any other grid. How each axis
works: docs/parallel/three_d.md.
"""

import argparse
import functools
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from experts import balance
from stragglers import Clock, find_stragglers
from tqdm import tqdm
from transformer_model import HEADS, Settings, Stage, cut, join

import pycoll
from pycoll.parallel import ShardedOptimizer, bounds, run_pipeline

AXES = "data", "context", "pipeline", "tensor", "experts"


class Trainer:
    """One rank of the grid: its part of the network, of the batches, of the optimizer's state.

    Attributes:
        steps: how many have been made, those before a checkpoint included.
        clock: tells this rank's computing from its waiting.
        clocks: the same, counting what waits on one axis.
        comms: by axis, the ranks along which this one exchanges something.
        most: bytes of parameters, gradients and optimizer's state, the most held at a time.
    """

    def __init__(self, grid, settings):
        check(settings, grid)
        self.grid, self.settings, self.steps, self.made = grid, settings, 0, 0
        self.comms = {name: grid.axis(name) for name in grid.names}
        # Gradients are summed over the batch and over the sequence.
        self.comms["data"] = grid.axis("data", "context")
        self.comms["experts"] = self.comms["data"].dup()
        self.clock, self.clocks = Clock(), {name: Clock() for name in AXES}
        watched = {n: self.clock.watch(self.clocks[n].watch(self.comms[n])) for n in AXES}
        self.pp, self.tp, self.ep = (watched[n] for n in ("pipeline", "tensor", "experts"))
        ranks, stages = self.pp.size, self.pp.size * settings.stages
        numbers = range(self.pp.rank, stages, ranks)
        self.stages = [Stage(settings, number, stages, watched) for number in numbers]
        self.parameters, self.axes, self.names, self.expert_names = {}, {}, {}, {}
        for stage in self.stages:
            self.parameters |= stage.parameters
            self.axes |= stage.axes
            self.names |= stage.names
            self.expert_names |= stage.expert_names
        self.optimizer = self._optimizer(self.names, watched["data"], settings.zero)
        # An expert has had the tokens of all data parallel ranks, so its gradients are whole.
        self.of_experts = None
        if settings.experts:
            self.of_experts = self._optimizer(self.expert_names, grid.sub([grid.rank]), 0)
        self.sent_before, self.most = self.sent(), (0, 0, 0)

    def _optimizer(self, names, comm, stage):
        groups = [[self.parameters[name] for name in group] for group in names.values()]
        adam = functools.partial(torch.optim.Adam, lr=self.settings.rate)
        passes = self.settings.micro_batches
        return ShardedOptimizer(groups, comm, adam, stage=stage, backwards=passes)

    def step(self):
        """Train with one batch; returns the mean loss of all its tokens, on every rank."""
        sequences = bounds(self.settings.batch, *place(self.grid, "data"))
        part = bounds(self.settings.length, *place(self.grid, "context"))
        tokens = batch_of(self.settings, self.steps)[part.start : part.stop + 1, sequences]
        loss = self._pipeline(tokens.tensor_split(self.settings.micro_batches, dim=1))
        self.optimizer.step()
        if self.of_experts:
            self.of_experts.step()
            self._balance()
        self.steps += 1
        self.made += 1
        if self.made == 1:  # it has sent more: ranks compare what they do
            self.optimizer.ready()
            self.sent_before = self.sent()
        counted = self.tp.rank == 0  # the others have the same
        with self.clock.waiting():
            return self.grid.all_reduce(loss if counted else 0.0)

    def sent(self):
        """Return how many bytes this rank has sent so far, by axis."""
        return np.array([self.comms[name].counters().sent_bytes.sum() for name in AXES])

    def _pipeline(self, micro_batches):
        """Compute the gradients of all micro-batches; returns the loss, if the last is here."""
        tokens_of_a_step = self.settings.batch * self.settings.length

        def forward(action, x):
            stage, tokens = self.stages[action.chunk], micro_batches[action.micro_batch]
            x = tokens[:-1] if stage.first else x.requires_grad_()
            y = stage.forward(x, tokens[1:], self._run)
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

    def _run(self, group, layer, *args):
        """Run a layer with its parameters there, and note how many bytes that makes."""

        def noted(*args):
            self._note()
            return layer(*args)

        run, number = self.optimizer.run, list(self.names).index(group)
        if group in self.expert_names:
            of_experts = list(self.expert_names).index(group)
            y = self.of_experts.run(of_experts, run, number, noted, *args)
        else:
            y = run(number, noted, *args)
        y.register_hook(lambda _: self._note())
        return y

    def _note(self):
        """Count what ZeRO cuts: what all data parallel ranks would have else."""
        optimizer = self.optimizer.optimizer
        shards = [shard for group in optimizer.param_groups for shard in group["params"]]
        own = [self.parameters[name] for names in self.names.values() for name in names] + shards
        state = [value for shard in shards for value in optimizer.state[shard].values()]
        gradients = [tensor.grad for tensor in own if tensor.grad is not None]
        held = map(memory, (own, gradients, [value for value in state if value.dim()]))
        self.most = tuple(map(max, self.most, held))

    def _balance(self):
        for stage in self.stages:
            for group, busy in stage.busy.items():
                balance(stage.biases[group], self.ep.all_reduce(busy))
                busy.zero_()

    def save(self, path):
        """Write whole tensors, and the optimizer's state of each, to one file. Collective."""
        first, mine = self.comms["data"].rank == 0, {}
        for stage in self.stages:
            mine |= {f"{i}.biases/value": biases.numpy() for i, biases in stage.biases.items()}
        for names, optimizer in self._optimizers():
            for group, state in zip(names.values(), optimizer.whole_state(), strict=True):
                for key, values in state.items():
                    each = values if isinstance(values, list) else [values] * len(group)
                    for name, value in zip(group, each, strict=True):
                        axis = self.axes[name] if value.dim() else None
                        whole = join(value, axis, self.tp)
                        if first or optimizer is self.of_experts:  # the others have the same
                            mine[f"{name}/{key}"] = whole.numpy()
        if self.tp.rank == 0:
            parts = self.grid.axis("data", "context", "pipeline").gather(mine, root=0)
            if self.grid.rank == 0:
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
                name, _, what = key.partition("/")
                keys.setdefault(name, []).append(what)
            self.steps = int(file["steps"])

            def part(name, key):
                value = torch.from_numpy(file[f"{name}/{key}"])
                return cut(value, self.axes[name] if value.dim() else None, self.tp)

            for stage in self.stages:
                for i, biases in stage.biases.items():
                    biases.copy_(torch.from_numpy(file[f"{i}.biases/value"]))
            for names, optimizer in self._optimizers():
                states = []
                for group in names.values():
                    states.append({k: [part(n, k) for n in group] for k in keys[group[0]]})
                    for key, values in states[-1].items():
                        if values[0].dim() == 0:  # one for all, as the number of steps is
                            states[-1][key] = values[0]
                optimizer.load_whole_state(states)

    def _optimizers(self):
        both = (self.names, self.optimizer), (self.expert_names, self.of_experts)
        return [(names, optimizer) for names, optimizer in both if optimizer]


def check(settings, grid):
    """Raise if a grid has no network of these settings."""
    data, context, pipeline, tensor = grid.shape
    of_experts, stages = data * context, pipeline * settings.stages
    for wrong, text in (
        (settings.width % HEADS, f"width must be divisible by the {HEADS} heads"),
        (tensor > HEADS, f"{HEADS} heads are too few for {tensor} tensor parallel ranks"),
        (settings.batch < data * settings.micro_batches, "every micro-batch needs a sequence"),
        (settings.length < context, "every rank of the context axis needs a token"),
        (
            settings.sequence and any(n % tensor for n in lengths(settings.length, context)),
            f"a part of the sequence is not divisible by {tensor} tensor parallel ranks",
        ),
        (
            stages > settings.layers,
            f"{settings.layers} layers are too few for {stages} pipeline stages",
        ),
        (
            settings.experts and settings.experts < max(of_experts, settings.top),
            f"{settings.experts} experts are too few for {of_experts} ranks, or for --top",
        ),
        (settings.top < 1 or settings.layers < 1, "top and layers must be at least 1"),
    ):
        if wrong:
            raise ValueError(text)


def lengths(count, parts):
    """Return how long the parts are into which something is cut."""
    cuts = [bounds(count, i, parts) for i in range(parts)]
    return [one.stop - one.start for one in cuts]


def place(grid, name):
    """Return this rank's number on an axis, and how many the axis has."""
    axis = grid.axis(name)
    return axis.rank, axis.size


def memory(tensors):
    """Return the bytes of the memory that the tensors share; of those that have some."""
    storages = [(t.untyped_storage(), t.nbytes) for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s, n in storages if s.nbytes() >= n}.values())


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
    """Return a grid of data, context, pipeline and tensor parallel ranks."""
    return comm.grid(shape, names=("data", "context", "pipeline", "tensor"))


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


def train_alone(comm, settings, steps):
    """Return the losses of one rank."""
    return train(Trainer(make_grid(comm.sub([comm.rank]), (1, 1, 1, 1)), settings), steps)


class Report:
    """What the ranks sent and held, and for whom they waited, in so many steps. Collective."""

    def __init__(self, comm, trainer, steps):
        self.stragglers = find_stragglers(comm, *trainer.clock.read())
        waiting = [trainer.clocks[name].read()[1] for name in AXES]
        self.waiting = comm.all_gather(np.array(waiting)) / steps  # seconds: (ranks, axes)
        sent = trainer.sent() - trainer.sent_before
        self.sent = comm.all_reduce(sent, op="max") // max(1, steps - 1)
        self.most = comm.all_reduce(np.array(trainer.most), op="max")

    def print(self):
        """Print what does not depend on the machine last."""
        print(self.stragglers)
        sent = ", ".join(f"{name} {n:,}" for name, n in zip(AXES, self.sent, strict=True))
        print(f"bytes sent in a step by the busiest rank: {sent}")
        parameters, gradients, state = self.most
        print(
            f"most bytes held by a rank: parameters {parameters:,}, gradients {gradients:,},"
            f" optimizer's state {state:,}"
        )


def draw(path, grid, losses, expected, report, steps):
    """Draw the losses, what each rank did with its time, and what the axes have sent."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    shape = " x ".join(map(str, grid.shape))
    left.plot(expected, label="one rank", linewidth=5, color="lightgray")
    left.plot(losses, label=f"grid of {shape}", linewidth=1.5)
    left.set(xlabel="step", ylabel="loss", title="The losses are the same")
    left.legend()
    bottom = np.array(report.stragglers.computing_s) / steps
    ranks = range(len(bottom))
    middle.bar(ranks, bottom, label="computing", color="lightgray")
    used = [i for i, name in enumerate(AXES) if report.waiting[:, i].max() > 0]
    for i in used:
        middle.bar(ranks, report.waiting[:, i], bottom=bottom, label=AXES[i], color=f"C{i}")
        bottom = bottom + report.waiting[:, i]
    middle.set(xlabel="rank", ylabel="seconds of a step", title="Computing, and waiting on an axis")
    middle.set_ylim(0, 1.5 * bottom.max())
    middle.legend(ncols=2, loc="upper center")
    names = [AXES[i] for i in used]
    bars = right.bar(names, report.sent[used] / 1e3, color=[f"C{i}" for i in used])
    right.bar_label(bars, [f"{n / 1e3:,.0f}" for n in report.sent[used]])
    right.margins(y=0.15)
    right.set(ylabel="kB a step", title="Sent by the busiest rank")
    figure.savefig(path, dpi=110)


def arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--grid", type=int, nargs=3, metavar=("DP", "PP", "TP"), help="default: all data parallel"
    )
    parser.add_argument("--context", type=int, default=1, help="ranks that cut the sequence")
    parser.add_argument("--steps", type=int, default=50)
    for name, default in Settings()._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--check", action="store_true", help="compare the losses with one rank's")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses and what the axes cost")
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
        data, *others = options.grid or (comm.size // options.context, 1, 1)
        try:
            grid = make_grid(comm, (data, options.context, *others))
            trainer = Trainer(grid, settings)
        except ValueError as exc:
            raise SystemExit(str(exc)) from None
        if options.load:
            trainer.load(options.load)
        begin = trainer.steps
        slow = 0.05 if comm.rank == options.slow else 0.0
        for clock in (trainer.clock, *trainer.clocks.values()):
            clock.read()
        losses = train(trainer, options.steps, show=comm.rank == 0, slow=slow)
        report = Report(comm, trainer, options.steps)
        if options.save:
            trainer.save(options.save)
        worst = 0.0
        if (options.check or options.plot) and comm.rank == 0:
            expected = train_alone(comm, settings, begin + options.steps)[begin:]
            worst = max(abs(a / b - 1.0) for a, b in zip(losses, expected, strict=True))
            if options.plot:
                draw(options.plot, grid, losses, expected, report, options.steps)
        worst = comm.broadcast(worst, root=0)

    if comm.rank == 0:
        print(f"steps {begin} to {trainer.steps}: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
        report.print()
        if options.check:
            print(f"largest relative difference from the losses of one rank: {worst:.1e}")
    if not worst <= 1e-9:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
