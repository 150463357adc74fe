"""A collective is a schedule: the steps of one rank, in the order its data flows.

An algorithm is a short pure function that yields steps. It names pieces of a buffer (chunks)
and peers, and nothing else: no rounds, tags, addresses or temporaries. Order defines data, not
blocking: a step waits only for the earlier steps whose chunks it needs. Who runs, proves, times
or draws a schedule works on this same object.

    step              reads               writes
    Send(peer, c)     chunk c
    Recv(peer, c)                         chunk c, or scratch if it is to be reduced
    Reduce(c)         chunk c, scratch    chunk c
    Copy(s, c)        chunk s             chunk c

The k-th Send to a peer meets the k-th Recv that the peer has from this rank; each message
carries its k, so that either side may post them in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Send(NamedTuple):
    """Send chunk `chunk` to `peer`."""

    peer: int
    chunk: int


class Recv(NamedTuple):
    """Receive from `peer` into chunk `chunk`, or into scratch for the Reduce that follows."""

    peer: int
    chunk: int
    scratch: bool = False


class Reduce(NamedTuple):
    """Combine `chunk` with what the Recv right before this step brought.

    The result is ``incoming op chunk`` if `incoming_first`, else ``chunk op incoming``.
    """

    chunk: int
    incoming_first: bool


class Copy(NamedTuple):
    """Copy chunk `source` to chunk `chunk`."""

    source: int
    chunk: int


Step = Send | Recv | Reduce | Copy


def recv_reduce(peer: int, chunk: int, incoming_first: bool = False) -> Iterator[Step]:
    """Receive from `peer` and combine what came with `chunk`.

    The receive itself does not wait for the chunk, only the reduction does: a fused step that
    held the chunk would deadlock recursive doubling, where both partners send what they reduce.
    """
    yield Recv(peer, chunk, scratch=True)
    yield Reduce(chunk, incoming_first)


class Schedule(NamedTuple):
    """The steps of one rank with what each must wait for.

    Attributes:
        steps: in the author's order.
        number: for a Send or a Recv, how many messages to (from) the same peer came before it.
        waits: how many earlier steps a step waits for.
        successors: the later steps that wait for a step.
    """

    steps: tuple[Step, ...]
    number: tuple[int, ...]
    waits: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]


def compile_schedule(steps: Iterable[Step]) -> Schedule:
    """Infer hazards: a reader waits for the last writer, a writer also for the readers since."""
    ordered = tuple(steps)
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    number: list[int] = []
    predecessors: list[set[int]] = []

    def read(position: int, chunk: int, needs: set[int]) -> None:
        if chunk in last_writer:
            needs.add(last_writer[chunk])
        readers.setdefault(chunk, []).append(position)

    def write(position: int, chunk: int, needs: set[int]) -> None:
        if chunk in last_writer:
            needs.add(last_writer[chunk])
        needs.update(readers.pop(chunk, ()))
        last_writer[chunk] = position

    for position, step in enumerate(ordered):
        needs: set[int] = set()
        count = 0
        match step:
            case Send(peer, chunk):
                count = sent.get(peer, 0)
                sent[peer] = count + 1
                read(position, chunk, needs)
            case Recv(peer, chunk, scratch):
                count = received.get(peer, 0)
                received[peer] = count + 1
                if not scratch:
                    write(position, chunk, needs)
            case Reduce(chunk):
                arrival = ordered[position - 1] if position else None
                if not (isinstance(arrival, Recv) and arrival.scratch and arrival.chunk == chunk):
                    raise ValueError(f"step {position}: {step} does not follow its own Recv")
                needs.add(position - 1)
                write(position, chunk, needs)
            case Copy(source, chunk):
                read(position, source, needs)
                write(position, chunk, needs)
        needs.discard(position)
        number.append(count)
        predecessors.append(needs)

    successors: list[list[int]] = [[] for _ in ordered]
    for position, needs in enumerate(predecessors):
        for earlier in sorted(needs):
            successors[earlier].append(position)
    return Schedule(
        steps=ordered,
        number=tuple(number),
        waits=tuple(len(needs) for needs in predecessors),
        successors=tuple(tuple(later) for later in successors),
    )
