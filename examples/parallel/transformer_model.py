"""The transformer of transformer.py: the whole network, and the part of it that a rank has.

Each whole tensor is made from a seed of its own, so the network is the same on every grid. A rank
has the layers of its pipeline stages, of each the tensor parallel part, and some of the experts.
What surrounds the layers' parts is of pycoll.parallel; attention over a sequence that is cut is of
ring_attention.py, the layer of experts of experts.py.
"""

import zlib
from typing import NamedTuple

import torch
from experts import expert_layer
from ring_attention import ring_attention
from torch.nn import functional

from pycoll.parallel import bounds, column_linear, copy_to, reduce_from, row_linear

VOCABULARY = 256  # the bytes
HEADS = 4
SEED = 1


class Settings(NamedTuple):
    """What is trained, and how; the losses depend on those above the line alone."""

    layers: int = 4
    width: int = 32
    length: int = 32  # tokens of a sequence
    batch: int = 16  # sequences of a step, of all data parallel ranks together
    rate: float = 3e-3
    experts: int = 0  # of each layer, in place of its MLP; spread over the data axis
    top: int = 1  # experts of a token
    # ---
    micro_batches: int = 4  # of a data parallel rank
    schedule: str = "1f1b"  # of the pipeline
    stages: int = 1  # that each rank has; more for interleaved schedules
    sequence: bool = False  # sequence parallelism on the tensor axis
    zero: int = 1  # what is cut over the data axis: 0 nothing, 1 state, 2 gradients, 3 parameters
    chunks: int = 1  # of a row-parallel product


class Whole(NamedTuple):
    """A tensor of the whole network."""

    name: str
    group: int  # 0: the embedding; then one for each layer; then the head
    axis: int | None  # along which tensor parallel ranks cut it
    value: torch.Tensor
    expert: int | None = None


def whole_network(settings):
    """Yield all tensors of the network."""
    layers, width, each = settings.layers, settings.width, settings.width // HEADS

    def random(name, group, axis, *shape, expert=None):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + SEED)
        value = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return Whole(name, group, axis, value, expert)

    def constant(name, group, axis, value, *shape):
        return Whole(name, group, axis, torch.full(shape, value, dtype=torch.float64))

    def norm(name, group):
        yield constant(f"{name}.norm.weight", group, None, 1.0, width)
        yield constant(f"{name}.norm.bias", group, None, 0.0, width)

    yield random("embedding.table", 0, 0, VOCABULARY, width)
    yield random("embedding.positions", 0, None, settings.length, width)
    for i in range(1, layers + 1):
        yield from norm(f"{i}.attention", i)
        yield random(f"{i}.attention.in.weight", i, 1, 3, HEADS, each, width)  # q, k, v
        yield constant(f"{i}.attention.in.bias", i, 1, 0.0, 3, HEADS, each)
        yield random(f"{i}.attention.out.weight", i, 1, width, HEADS, each)
        yield constant(f"{i}.attention.out.bias", i, None, 0.0, width)
        yield from norm(f"{i}.mlp", i)
        if settings.experts:
            yield random(f"{i}.router", i, None, settings.experts, width)
        else:
            yield random(f"{i}.mlp.in.weight", i, 0, 4 * width, width)
            yield constant(f"{i}.mlp.in.bias", i, 0, 0.0, 4 * width)
            yield random(f"{i}.mlp.out.weight", i, 1, width, 4 * width)
            yield constant(f"{i}.mlp.out.bias", i, None, 0.0, width)
        for e in range(settings.experts):
            yield random(f"{i}.expert.{e}.in", i, 0, 4 * width, width, expert=e)
            yield random(f"{i}.expert.{e}.out", i, 1, width, 4 * width, expert=e)
    yield from norm("head", layers + 1)
    yield random("head.weight", layers + 1, 0, VOCABULARY, width)


class Stage:
    """The layers of one pipeline stage, of which this rank has its part.

    Attributes:
        groups: of parameters, in the order of the forward.
        parameters: by name.
        axes: by name, along which tensor parallel ranks have cut it.
        names: of the parameters that all data parallel ranks have, by group.
        expert_names: of those of the experts here, by group.
        biases: of the experts, which make them equally busy, by group; the same on all ranks.
        busy: by group how many tokens of this rank each expert had.
    """

    def __init__(self, settings, number, stages, axes):
        self.settings = settings
        self.tp, self.cp, self.ep = axes["tensor"], axes["context"], axes["experts"]
        layers = bounds(settings.layers, number, stages)
        self.first, self.last = number == 0, number == stages - 1
        own = list(range(layers.start + 1, layers.stop + 1))
        self.groups = [0] * self.first + own + [settings.layers + 1] * self.last
        self.parameters, self.axes, self.names, self.expert_names = {}, {}, {}, {}
        experts = range(settings.experts)[bounds(settings.experts, self.ep.rank, self.ep.size)]
        for name, group, axis, value, expert in whole_network(settings):
            if group in self.groups and (expert is None or expert in experts):
                self.parameters[name] = torch.nn.Parameter(cut(value, axis, self.tp))
                self.axes[name] = axis
                names = self.names if expert is None else self.expert_names
                names.setdefault(group, []).append(name)
        self.biases = {i: torch.zeros(len(router)).double() for i, router in self._routers()}
        self.busy = {i: torch.zeros(len(router)).long() for i, router in self._routers()}

    def forward(self, x, targets, run):
        """Run the layers on one micro-batch: (length, batch) of tokens, or x of the stage before.

        `run` calls a group's layer. Returns x for the next stage; the last one returns the sum of
        the tokens' losses.
        """
        for group in self.groups:
            if group == 0:
                x = run(group, self._embed, x)
            elif group <= self.settings.layers:
                x = run(group, self._layer, x, group)
            else:
                x = run(group, self._loss, x, targets)
        return x

    def _embed(self, tokens):
        table, positions = (self.parameters[f"embedding.{n}"] for n in ("table", "positions"))
        sequence = self.settings.sequence
        x = vocabulary_embedding(tokens, table, self.tp, sequence)
        positions = positions[bounds(len(positions), self.cp.rank, self.cp.size)]
        if sequence:
            part = bounds(len(positions), self.tp.rank, self.tp.size)
            positions = copy_to(positions, self.tp)[part]
        return x + positions[:, None]

    def _layer(self, x, group):
        x = x + self._attention(self._norm(x, f"{group}.attention"), f"{group}.attention")
        feed = self._experts if self.settings.experts else self._mlp
        return x + feed(self._norm(x, f"{group}.mlp"), group)

    def _attention(self, x, name):
        heads = self.parameters[f"{name}.in.bias"].shape[1]  # of this rank
        qkv = self._column(x, f"{name}.in").unflatten(2, (3, heads, -1))
        q, k, v = qkv.permute(2, 1, 3, 0, 4)  # each (batch, heads, length, width of a head)
        if self.cp.size > 1:
            y = ring_attention(q, k, v, self.cp)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._row(y.permute(2, 0, 1, 3).flatten(2), f"{name}.out")

    def _mlp(self, x, group):
        return self._row(functional.gelu(self._column(x, f"{group}.mlp.in")), f"{group}.mlp.out")

    def _experts(self, x, group):
        """Send each token to its experts, of each of which this rank has the tensor parallel part.

        So what comes back are parts of a sum, also of the gradients of the router.
        """
        whole = copy_to(x, self.tp, sequence=self.settings.sequence)
        router = copy_to(self.parameters[f"{group}.router"], self.tp)
        weights = [self.parameters[name] for name in self.expert_names[group]]
        experts = [
            lambda x, a=a, b=b: functional.linear(functional.gelu(functional.linear(x, a)), b)
            for a, b in zip(weights[::2], weights[1::2], strict=True)
        ]
        rows, biases = whole.flatten(0, 1), self.biases[group]
        y, busy = expert_layer(rows, router, biases, experts, self.settings.top, self.ep)
        self.busy[group] += busy
        return reduce_from(y.view_as(whole), self.tp, sequence=self.settings.sequence)

    def _loss(self, x, targets):
        logits = self._column(self._norm(x, "head"), "head")
        return vocabulary_cross_entropy(logits, targets, self.tp).sum()

    def _norm(self, x, name):
        weight, bias = (self.parameters[f"{name}.norm.{n}"] for n in ("weight", "bias"))
        if self.settings.sequence:  # used for a part of the sequence only
            weight, bias = copy_to(weight, self.tp), copy_to(bias, self.tp)
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

    def _routers(self):
        names = ((i, f"{i}.router") for i in self.groups)
        return [(i, self.parameters[name]) for i, name in names if name in self.parameters]


def vocabulary_embedding(tokens, table, tp, sequence):
    """Return the rows of a table of which each rank has a part: whole[tokens], then g."""
    elsewhere, local = words_of(tokens, tp)
    rows = functional.embedding(local, table).masked_fill(elsewhere[..., None], 0.0)
    return reduce_from(rows, tp, sequence=sequence)


def vocabulary_cross_entropy(logits, targets, tp):
    """Return -log softmax(whole logits)[targets], of logits of which each rank has some columns.

    Three numbers for each token are reduced, instead of its whole row of logits.
    """
    elsewhere, local = words_of(targets, tp)
    shifted = logits - tp.all_reduce(logits.detach().amax(-1), "max")[..., None]
    own = shifted.gather(-1, local[..., None])[..., 0].masked_fill(elsewhere, 0.0)
    total, target = reduce_from(torch.stack([shifted.exp().sum(-1), own]), tp)
    return total.log() - target


def words_of(tokens, tp):
    """Return which tokens are other ranks', and the places of the others in this rank's part."""
    mine = bounds(VOCABULARY, tp.rank, tp.size)
    elsewhere = (tokens < mine.start) | (tokens >= mine.stop)
    return elsewhere, (tokens - mine.start).masked_fill(elsewhere, 0)


def cut(whole, axis, comm):
    """Return a copy of this rank's part of a whole tensor, cut along `axis`; of all, if None."""
    if axis is None:
        return whole.clone()
    mine = bounds(whole.shape[axis], comm.rank, comm.size)
    return whole.narrow(axis, mine.start, mine.stop - mine.start).clone()


def join(part, axis, comm):
    """Return the whole tensor, on every rank: the reverse of `cut`."""
    if axis is None:
        return part
    return torch.cat(comm.all_gatherv(part.contiguous()), dim=axis)
