"""A user's own algorithm: registered beside pycoll's, proved and run like them.

    import pycoll
    from pycoll.schedule import Recv, Send

    @pycoll.register_algorithm("broadcast", "detour")
    def detour(rank, size, root):
        "The value goes from the root to every rank by way of the root's right neighbor."
        helper = (root + 1) % size
        if rank == root and size > 1:
            yield Send(helper, 0)
        if rank == helper != root:
            yield Recv(root, 0)
            for peer in range(size):
                if peer not in (root, helper):
                    yield Send(peer, 0)
        elif rank != root:
            yield Recv(helper, 0)

    print(pycoll.prove("broadcast", "detour"))
    comm.broadcast(x, algorithm="detour")

docs/algorithms.md tells the whole story.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pycoll._calls.group import SHARED_MEMORY
from pycoll._support.public_edge import edge
from pycoll.schedule import Copy, Reduce, Step, chunks_of
from pycoll.schedules import ROOTED, Algorithm, Cost, find, names, register
from pycoll.schedules.check import Summary, prove_algorithm

Steps = TypeVar("Steps", bound=Callable[..., Iterable[Step]])

# How many chunks there are where their number is not the author's.
_GIVEN: dict[str, Callable[[int], int]] = {
    "gather": lambda size: size,
    "all_gather": lambda size: size,
    "scatter": lambda size: size,
    "reduce_scatter": lambda size: size,
    "exscan": lambda size: 2,
}


class Proved(Summary):
    """What `prove` has proved; its text says it in a sentence."""

    __slots__ = ()

    def __str__(self) -> str:
        roots = ", from every root" if self.rooted else ""
        return f"{self.collective} {self.name} is proved for 1 to {self.max_size} ranks{roots}"


@edge
def algorithms(collective: str) -> list[str]:
    """List the names of the algorithms of a collective, for the argument `algorithm`.

    Those that `register_algorithm` has added are at the end.

    Args:
        collective: for example ``"all_reduce"``.

    Raises:
        ValueError: there is no such collective; the message names those there are.
    """
    return [SHARED_MEMORY, *names(collective)]


@edge
def register_algorithm(
    collective: str,
    name: str,
    *,
    chunks: int | Callable[[int], int] | None = None,
    rank_order: bool = False,
    cost: Callable[[int], Cost] | None = None,
) -> Callable[[Steps], Steps]:
    """Register the function below as an algorithm of `collective`, on this rank.

    The function gives the steps of one rank: (rank, size) -> iterable of `pycoll.schedule.Send`,
    `Recv`, `Copy` and ``yield from recv_reduce(...)``; with a root (broadcast, reduce, gather,
    scatter) it takes (rank, size, root). The same arguments must give the same steps each time.
    It must be registered on all ranks; one that has not raises ValueError when it is told to use
    it. Nothing is proved here: see `prove`.

        @pycoll.register_algorithm("all_reduce", "two_way_ring", chunks=lambda size: 2 * size)
        def two_way_ring(rank, size): ...

        comm.all_reduce(x, algorithm="two_way_ring")

    Args:
        collective: for example ``"all_reduce"``.
        name: what users say as ``algorithm=...``. One that you have registered before is replaced,
            one of pycoll's own cannot be.
        chunks: into how many pieces the value is cut, a number or size -> number, for broadcast,
            reduce, all_reduce, scan and barrier; default 1. For all_to_all, where chunks are
            blocks: 2 * size, the default, and more if blocks need a place on their way. For the
            others it is given (docs/algorithms.md says what a chunk is).
        rank_order: operands combine in rank order, for every size and root, so that operators which
            are not commutative may use it. `prove` checks that.
        cost: size -> `pycoll.schedules.Cost`. `prove` compares it, and the algorithm may be chosen
            where nobody names one. None: nothing is compared, and it runs only when it is named.

    Returns:
        A decorator that returns its function unchanged.

    Raises:
        ValueError: there is no such collective, the name is pycoll's own or is no identifier, or
            the number of chunks is given. (A number that makes no sense is found by `prove`, and
            when it is to run.)
        TypeError: what is registered is no function of (rank, size[, root]); `chunks` is neither a
            number nor a function, or `cost` no function.
    """
    names(collective)
    what = f"{collective} {name!r}"
    given: object = name
    if not isinstance(given, str) or not given.isidentifier():
        raise ValueError(f"{what}: the name of an algorithm must be an identifier")
    if name == SHARED_MEMORY:
        raise ValueError(f"{what}: that is an algorithm of pycoll's own; choose another name")
    if collective in _GIVEN and chunks is not None:
        raise ValueError(f"{what}: the chunks of {collective} are given; leave `chunks` out")
    if chunks is not None and not callable(chunks) and not _is_whole(chunks):
        raise TypeError(f"{what}: chunks must be a number or a function of size, not {chunks!r}")
    if cost is not None and not callable(cost):
        raise TypeError(f"{what}: cost must be a function of size, not {cost!r}")

    def decorate(function: Steps) -> Steps:
        _check_function(what, function, ("rank", "size", "root")[: 2 + (collective in ROOTED)])
        register(
            Algorithm(
                collective,
                name,
                _well_formed(what, function),
                _GIVEN.get(collective) or _count(collective, what, chunks),
                cost,
                rank_order,
            )
        )
        return function

    return edge(decorate)


@edge
def prove(collective: str, name: str, max_size: int = 16) -> Proved:
    """Prove an algorithm, a user's or one of pycoll's, for every size to `max_size` and every root.

    All ranks run together on symbols instead of numbers: every message has its other half, nothing
    deadlocks, each contribution arrives exactly once, all ranks of an all_reduce get the same bits,
    rank order and cost are what was claimed. No communicator is needed, nothing is sent.

    Args:
        collective: for example ``"all_reduce"``.
        name: of the algorithm.
        max_size: largest number of ranks.

    Returns:
        What was proved; its text is a sentence.

    Raises:
        pycoll.ProofError: the algorithm is wrong. The message says for which size, rank and step,
            and what happens there.
        ValueError: there is no such collective or algorithm, or `max_size` is below 1.
    """
    if not _is_whole(max_size) or max_size < 1:
        raise ValueError(f"max_size must be a whole number above 0, not {max_size!r}")
    return Proved(*prove_algorithm(find(collective, name), max_size))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_function(what: str, function: object, parameters: tuple[str, ...]) -> None:
    wanted = f"{what}: what is registered must be a function of ({', '.join(parameters)})"
    if not callable(function):
        raise TypeError(f"{wanted}, not {function!r}")
    signature = inspect.signature(function)
    try:
        signature.bind(*parameters)
    except TypeError:
        raise TypeError(f"{wanted}, not of {signature}") from None


def _count(
    collective: str, what: str, chunks: int | Callable[[int], int] | None
) -> Callable[[int], int]:
    """Return size -> number of chunks, which says so if the author's makes no sense."""

    def count(size: int) -> int:
        least = 2 * size if collective == "all_to_all" else 1
        number = least if chunks is None else chunks(size) if callable(chunks) else chunks
        if not _is_whole(number) or number < least:
            raise ValueError(
                f"{what}: {number!r} chunks for {size} ranks; {least} or more are needed"
            )
        return number

    return count


def _well_formed(
    what: str, function: Callable[..., Iterable[Step]]
) -> Callable[..., Iterator[Step]]:
    """Return the function that raises ValueError where the author's gives no proper steps."""

    @functools.wraps(function)
    def steps(*arguments: int) -> Iterator[Step]:
        try:
            given = function(*arguments)
            if not isinstance(given, Iterable):
                raise ValueError(f"the function gave {given!r} and no steps; does it yield any?")
            for position, step in enumerate(given):
                fault = _fault(step)
                if fault is not None:
                    raise ValueError(f"step {position}, {step!r}: {fault}")
                yield step
        except Exception as exc:
            exc.add_note(f"in the algorithm {what}, called with {arguments}")
            raise

    return steps


def _fault(step: object) -> str | None:
    if inspect.isgenerator(step):
        return "steps made by a function (recv_reduce) need `yield from`"
    if not isinstance(step, Step):
        return "this is no Send, Recv or Copy, nor of recv_reduce"
    numbers: list[object] = []
    if not isinstance(step, Reduce | Copy):
        numbers.append(step.peer)
    if isinstance(step, Copy):
        numbers.append(step.source)
    try:
        numbers += chunks_of(step)
    except TypeError:
        return "a chunk is a number, and several are a tuple or a range of numbers"
    if not all(_is_whole(number) for number in numbers):
        return "peers and chunks are whole numbers (Python's, not NumPy's)"
    return None
