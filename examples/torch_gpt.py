"""A small GPT in PyTorch that learns to write like Python's standard library, by DDP or FSDP2.

    pip install '.[torch,examples]'
    pycoll-run -n 2 examples/torch_gpt.py --plot gpt.png
    pycoll-run -n 2 --restarts 2 examples/torch_gpt.py --parallel fsdp --checkpoint checkpoints
    torchrun --nproc-per-node 2 examples/torch_gpt.py --backend gloo

The name of the backend is all that it has of pycoll. Each step's batch is the same sequences on any
number of ranks, and each rank takes its share: so one rank or many, DDP or FSDP, pycoll or gloo
come to the same loss, but for rounding. With --checkpoint a program that was ended goes on where it
was, by other ranks and the other --parallel, too. docs/torch.md shows what comes out.
"""

import argparse
import math
import os
import shutil
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

try:
    from tqdm import tqdm
except ImportError:  # then without a progress bar
    tqdm = None

BYTES = 256  # the tokenizer: a byte is a token


class Block(nn.Module):
    """Attention to the bytes before, then a network for each byte."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        by_head = (*x.shape[:2], self.heads, -1)
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.reshape(by_head).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.after_attention(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Bytes, (sequences, length), to the logits of the byte that follows each."""

    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        x = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.bytes.weight)  # the head is the embedding


def distribute(model, parallel):
    """Return the model in DDP, or cut by FSDP2: then each rank holds a part of each parameter."""
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def read_sources():
    """Return the bytes of the standard library's modules: to learn from, and to validate with."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = bytearray(b"".join(file.read_bytes() for file in files))
    text = torch.frombuffer(sources, dtype=torch.uint8)
    return text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])


def batch_of(text, number, args):
    """Return this rank's share of a batch: (sequences, context), and the bytes that follow."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
    sequences = text[mine[:, None] + torch.arange(args.context + 1)].long()
    return sequences[:, :-1], sequences[:, 1:]


def loss_of(model, batch):
    """Return the mean loss of a byte, in nats."""
    x, following = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), following.flatten())


def mean(loss):
    """Return the mean of the ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def validate(model, text, args, batches=4):
    """Return the loss of text that is not learned from."""
    return mean(sum(loss_of(model, batch_of(text, i, args)) for i in range(batches)) / batches)


@torch.no_grad()
def write(model, args):
    """Let the model write, byte by byte; on all ranks, for each may have a part of it alone."""
    generator = torch.Generator().manual_seed(1)
    text = torch.tensor([list(b"def ")])
    for _ in range(args.write):
        logits = model(text[:, -args.context :])[0, -1]
        drawn = torch.multinomial((logits / 0.8).softmax(0), 1, generator=generator)
        text = torch.cat([text, drawn[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def rate_at(step, args):
    """Return the learning rate: it rises for a twentieth of the steps, then falls as a cosine."""
    rising = max(1, args.steps // 20)
    if step < rising:
        return args.rate * (step + 1) / rising
    fallen = (step - rising) / max(1, args.steps - rising)
    return args.rate * (0.55 + 0.45 * math.cos(math.pi * fallen))


def complete(folder):
    """Return the checkpoints in a folder that are complete, the oldest first."""
    return sorted(folder.glob("step-*[0-9]"))


def save(folder, model, optimizer, progress):
    """Write a checkpoint, each rank its part; until it is complete it has another name."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    path = folder / f"step-{progress['step']:09d}"
    part = path.with_suffix(".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a job that was killed in here
    dcp.save({"model": of_model, "optimizer": of_optimizer, **progress}, checkpoint_id=part)
    if dist.get_rank() == 0:  # all ranks have written
        part.rename(path)
        for old in complete(folder)[:-2]:
            shutil.rmtree(old)


def load(folder, model, optimizer, progress):
    """Go on from the newest checkpoint, if there is one."""
    newest = complete(folder)[-1:] if dist.get_rank() == 0 else []
    found = [newest]
    dist.broadcast_object_list(found)  # all take the one that rank 0 has seen
    if found[0]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, **progress}
        dcp.load(state, checkpoint_id=found[0][0])
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        progress.update({name: state[name] for name in progress})


def say(text):
    """Print a line, on rank 0 alone, and above the progress bar."""
    if dist.get_rank() == 0:
        (tqdm.write if tqdm else print)(text)


def train(args):
    """Train, and return the losses: of each step, and by step those of validation."""
    learned, kept_back = read_sources()
    torch.manual_seed(1)  # the same model on every rank
    model = distribute(GPT(args.layers, args.width, args.heads, args.context), args.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    progress = {"step": 0, "losses": [], "validation": []}
    if args.checkpoint:
        load(args.checkpoint, model, optimizer, progress)
    first, losses, validation = progress.values()
    say(f"{args.parallel} on {dist.get_world_size()} ranks begins at step {first}")
    steps = range(first, args.steps)
    if tqdm:
        hidden = dist.get_rank() > 0
        steps = tqdm(steps, desc="steps", initial=first, total=args.steps, disable=hidden)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args)
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(learned, step, args))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean(loss))
        if tqdm:
            steps.set_postfix(loss=f"{losses[-1]:.3f}")
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            validation.append((step + 1, validate(model, kept_back, args)))
            say(f"step {step + 1}: loss {losses[-1]:.4f}, validation {validation[-1][1]:.4f}")
            progress["step"] = step + 1
            if args.checkpoint:
                save(args.checkpoint, model, optimizer, progress)
    say(write(model, args))
    return losses, validation


def draw(path, losses, validation):
    """Draw the losses."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="silver", label="of each step's batch")
    axes.plot(*zip(*validation, strict=True), marker="o", label="of text not learned from")
    axes.axhline(math.log(BYTES), color="gray", linestyle=":", label="of guessing")
    axes.set(xlabel="step", ylabel="nats per byte", title="A GPT of the standard library")
    axes.legend()
    figure.savefig(path, dpi=100)


def options():
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--backend", default="pycoll", help="of torch.distributed")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of --heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step, of all ranks")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--every", type=int, default=50, help="steps from validation to validation")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save there, and go on")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses")
    parser.add_argument("--write", type=int, default=400, help="bytes to write in the end")
    return parser.parse_args()


def main():
    """Train, on as many ranks as the launcher has started."""
    args = options()
    # Else each rank would use all cores, and the ranks would get in each other's way.
    threads = torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, threads))
    dist.init_process_group(args.backend)
    if args.batch % dist.get_world_size() or args.width % args.heads:
        raise SystemExit("--batch must be a multiple of the ranks, and --width of --heads")
    losses, validation = train(args)
    if args.plot and dist.get_rank() == 0:
        draw(args.plot, losses, validation)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
