"""Broadcast and scatter, prepared: only the root knows what comes, so it announces that."""

from __future__ import annotations

from typing import Any

from pycoll._arrays import conversion, objects
from pycoll._arrays.value import Value
from pycoll._calls import arguments, lists, rooted, shared_memory_rooted
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.group import SHARED_MEMORY, Group
from pycoll._calls.message_steps import Outgoing
from pycoll._calls.scheduled import BY_CUDA_IPC
from pycoll._cuda.late_copies import LateCopies
from pycoll._transports.base import Parts


def _by_messages(algorithm: str | None, offers: bool) -> str | None:
    """Return which algorithm runs by messages, where the caller has named `algorithm`."""
    if offers:
        return BY_CUDA_IPC.name
    return None if algorithm == SHARED_MEMORY else algorithm


def broadcast(
    group: Group, text: str, route: Route, root: int, algorithm: str | None, x: Any
) -> CallPlan[Any]:
    """Prepare a broadcast.

    Args:
        group, text, route: as of `CallPlan`.
        root: who announces.
        algorithm: what the caller has named, or None.
        x: the root's value; elsewhere an array to fill, or None.
    """
    gpu = conversion.here()
    if group.rank != root:
        outgoing, mine, value, offers = None, arguments.fillable(x), None, False
    else:
        outgoing, mine = Outgoing(x), None
        value = outgoing.value
        offers = algorithm is None and rooted.offers(group, "broadcast", value, outgoing.nbytes)
    name = _by_messages(algorithm, offers)
    return CallPlan(
        group,
        text,
        lambda call: rooted.broadcast(group, call, outgoing, mine, name, root, gpu),
        route,
        lambda shm: shared_memory_rooted.broadcast(shm, group, outgoing, mine, root, gpu, offers),
        rooted.broadcasted if outgoing is None else lambda got, late: x,
        () if offers or value is None else (value,),
    )


def scatter(
    group: Group, text: str, route: Route, root: int, algorithm: str | None, x: Any, out: Any
) -> CallPlan[Any]:
    """Prepare a scatter.

    Args:
        group, text, route: as of `CallPlan`.
        root: who announces.
        algorithm: what the caller has named, or None.
        x: on the root an array (size, ...), or a list of equal arrays, or of any objects.
        out: array for this rank's block, or None.
    """
    blocks = _blocks(x, group.size) if group.rank == root else None
    wanted = arguments.fillable_out(out)
    offers = False
    if isinstance(blocks, Value):
        if out is not None:
            arguments.Target(out, blocks, blocks.array.shape[1:]).check_overlap(blocks)
        nbytes = blocks.array.nbytes // group.size
        offers = algorithm is None and rooted.offers(group, "scatter", blocks, nbytes)
    elif arrays := [block for block in blocks or () if isinstance(block, Value)]:
        if out is not None:
            target = arguments.Target(out, arrays[0], arrays[0].array.shape)
            for block in arrays:
                target.check_overlap(block)
    elif blocks is not None:
        arguments.no_out(out)
    name, gpu = _by_messages(algorithm, offers), conversion.here()
    return CallPlan(
        group,
        text,
        lambda call: rooted.scatter(group, call, blocks, name, root, gpu, wanted),
        route,
        lambda shm: shared_memory_rooted.scatter(shm, blocks, root, gpu, wanted, offers),
        lambda got, late: scattered(out, wanted, got, late),
        (blocks,) if isinstance(blocks, Value) and not offers else (),
    )


def _blocks(x: Any, size: int) -> Value | list[Value] | list[Parts]:
    arrays = lists.equal(x, size)
    if arrays is not None:
        return arrays
    if x is None or conversion.wrap(x) is None:
        arguments.check_objects("scatter", x, size)
        dumped: list[Parts] = [objects.dump(item) for item in x]
        return dumped
    return arguments.split_value("scatter", x, size)


def scattered(
    out: Any, wanted: Value | None, got: tuple[Value | None, memoryview], late: LateCopies
) -> Any:
    """Return what a scatter returns.

    Args:
        out: the caller's, `wanted` what it is as a Value; or None.
        got: the block that has come, which is `wanted` if that could have it, and its bytes; or
            None, and those of an object.
        late: gets the copies that the result waits for.
    """
    value, data = got
    if value is None:
        arguments.no_out(out)
        return objects.load(data)
    if wanted is None or value is wanted:
        return conversion.unwrap(value, late)
    conversion.check_fits(wanted, value.dtype, value.array.shape)
    wanted.array[...] = value.array
    return conversion.unwrap(wanted, late)
