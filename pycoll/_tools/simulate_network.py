"""The network of `pycoll simulate`, from the costs that `pycoll tune` has measured."""

from __future__ import annotations

import math

from pycoll._selection.costs import WHOLE, CostTable, LinkCosts
from pycoll.simulate import Link, Network


def from_costs(table: CostTable, inside: str, between: str) -> Network:
    """Return a network whose links are of these kinds.

    A step is a message's latency. Between hosts a rank is free for the next message when it has
    done what it does for one inside a host; the rest of the step passes on the wire.
    """
    near, far = table.links[inside], table.links[between]
    link = _link(near)
    return Network(
        latency_s=link.latency_s,
        bandwidth=link.bandwidth,
        core_s=link.core_s,
        core_s_per_byte=link.core_s_per_byte,
        between=_link(far)._replace(overhead_s=min(near.step, far.step)),
        reduce_s_per_byte=near.combine,
        call_s=near.call,
    )


def trend(table: CostTable, inside: str, collective: str, ranks: int, nbytes: int) -> float:
    """Return the times that were measured on one host by those that the table's constants give.

    It is the median over the algorithms of a collective, for values of `nbytes`, where every rank
    had a core. A link has one bandwidth in the table; caches and memory have several.
    """
    return table.factor((inside, collective, "", WHOLE), ranks, nbytes, crowded=False)


def _link(costs: LinkCosts) -> Link:
    bandwidth = 1 / costs.path if costs.path else math.inf
    return Link(costs.step, bandwidth, None, costs.message, costs.byte)
