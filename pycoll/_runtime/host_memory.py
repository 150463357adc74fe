"""The memory that this rank shares with the others on its host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pycoll._transports._core import Host


class SharedMemory(NamedTuple):
    """The memory of this host.

    Attributes:
        host: as this rank has mapped it.
        ranks: world ranks of this host, in the order of their local ranks.
        single_copy: whether ranks may try to read each other's memory.
    """

    host: Host
    ranks: tuple[int, ...]
    single_copy: bool
