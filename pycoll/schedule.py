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

Several chunks travel as one message if `c` is a tuple or a range of them: the i-th that is sent
becomes the i-th that is received.

The k-th Send to a peer meets the k-th Recv that the peer has from this rank; each message
carries its k, so that either side may post them in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

Chunks = int | range | tuple[int, ...]
"""One chunk, or several that travel as one message."""


class Send(NamedTuple):
    """Send `chunk` to `peer`."""

    peer: int
    chunk: Chunks


class Recv(NamedTuple):
    """Receive from `peer` into `chunk`, or into scratch for the Reduce that follows."""

    peer: int
    chunk: Chunks
    scratch: bool = False


class Reduce(NamedTuple):
    """Combine `chunk` with what the Recv right before this step brought.

    The result is ``incoming op chunk`` if `incoming_first`, else ``chunk op incoming``.
    """

    chunk: Chunks
    incoming_first: bool


class Copy(NamedTuple):
    """Copy chunk `source` to chunk `chunk`."""

    source: int
    chunk: int


Step = Send | Recv | Reduce | Copy


def recv_reduce(peer: int, chunk: Chunks, incoming_first: bool = False) -> Iterator[Step]:
    """Receive from `peer` and combine what came with `chunk`.

    The receive itself does not wait for the chunk, only the reduction does: a fused step that
    held the chunk would deadlock recursive doubling, where both partners send what they reduce.
    """
    yield Recv(peer, chunk, scratch=True)
    yield Reduce(chunk, incoming_first)


def chunks_of(step: Step) -> tuple[int, ...]:
    """Return the chunks that a step names; of a Copy the one that it writes."""
    return (step.chunk,) if isinstance(step.chunk, int) else tuple(step.chunk)


class Schedule(NamedTuple):
    """The steps of one rank with what each must wait for.

    Attributes:
        steps: in the author's order.
        chunks: which each step names (see `chunks_of`).
        number: for a Send or a Recv, how many messages to (from) the same peer came before it.
        waits: how many earlier steps a step waits for.
        successors: the later steps that wait for a step.
    """

    steps: tuple[Step, ...]
    chunks: tuple[tuple[int, ...], ...]
    number: tuple[int, ...]
    waits: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]


def compile_schedule(steps: Iterable[Step]) -> Schedule:
    """Infer hazards: a reader waits for the last writer, a writer also for the readers since.

    Raises:
        ValueError: a step names no chunk, or one twice; or a Reduce does not follow its Recv.
    """
    ordered = tuple(steps)
    named = tuple([chunks_of(step) for step in ordered])
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    number: list[int] = []
    waits: list[int] = []
    successors: list[list[int]] = [[] for _ in ordered]
    nothing: tuple[int, ...] = ()

    # This runs millions of times in a proof: isinstance, as `match` takes twice as long.
    for position, step in enumerate(ordered):
        chunks = named[position]
        if len(chunks) != 1 and (not chunks or len(set(chunks)) < len(chunks)):
            raise ValueError(f"step {position}: {step} names no chunk, or one twice")
        needs: set[int] = set()
        count = 0
        read, written = nothing, chunks
        if isinstance(step, Send):
            count = sent.get(step.peer, 0)
            sent[step.peer] = count + 1
            read, written = chunks, nothing
        elif isinstance(step, Recv):
            count = received.get(step.peer, 0)
            received[step.peer] = count + 1
            if step.scratch:
                written = nothing
        elif isinstance(step, Reduce):
            arrival = ordered[position - 1] if position else None
            fits = isinstance(arrival, Recv) and arrival.scratch
            if not fits or named[position - 1] != chunks:
                raise ValueError(f"step {position}: {step} does not follow its own Recv")
            needs.add(position - 1)
        else:
            read = (step.source,)
        for chunk in read:
            if chunk in last_writer:
                needs.add(last_writer[chunk])
            if chunk in readers:
                readers[chunk].append(position)
            else:
                readers[chunk] = [position]
        for chunk in written:
            if chunk in last_writer:
                needs.add(last_writer[chunk])
            if chunk in readers:
                needs.update(readers.pop(chunk))
            last_writer[chunk] = position
        needs.discard(position)
        number.append(count)
        waits.append(len(needs))
        for earlier in needs:
            successors[earlier].append(position)
    return Schedule(
        steps=ordered,
        chunks=named,
        number=tuple(number),
        waits=tuple(waits),
        successors=tuple([tuple(later) for later in successors]),
    )


def users_of(schedule: Schedule, num_chunks: int) -> dict[int, list[int]]:
    """Return for each chunk the steps that use its value; chunks in the order of their first use.

    A receive into scratch memory is none: only the reduction after it uses the chunk. If it waited
    for something, receives might be opened in another order than the schedule's, and a window of
    them can be too small for that.
    """
    users: dict[int, list[int]] = {}
    for position, step in enumerate(schedule.steps):
        if isinstance(step, Recv) and step.scratch:
            continue
        chunks = schedule.chunks[position]
        for chunk in (*chunks, step.source) if isinstance(step, Copy) else chunks:
            users.setdefault(chunk, []).append(position)
    for chunk in range(num_chunks):
        users.setdefault(chunk, [])
    return users
