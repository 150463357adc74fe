"""`pycoll.show`: a schedule, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from html import escape

from pycoll._drawing.page import page
from pycoll._drawing.rounds import Replay
from pycoll._drawing.svg import Picture
from pycoll._drawing.text import draw
from pycoll._support.checks import check_int
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind
from pycoll.errors import ProofError
from pycoll.schedules import ROOTED, find

SHARED_MEMORY = "shared_memory"


class Drawing:
    """A schedule, drawn; it displays itself in a notebook, and its text is what `str` gives."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    @property
    def fault(self) -> ProofError | None:
        """Why the algorithm is wrong for this case; None: it is proved for it."""
        return self._replay.fault

    @cached_property
    def text(self) -> str:
        """For a terminal."""
        return draw(self._replay)

    @cached_property
    def svg(self) -> str:
        """All rounds, one below the other: the content of an .svg file."""
        return self._picture.stack()

    @cached_property
    def html(self) -> str:
        """A page that one steps through with arrow keys: the content of an .html file."""
        return page(self._picture)

    @cached_property
    def _picture(self) -> Picture:
        return Picture(self._replay)

    def __str__(self) -> str:
        return self.text.rstrip()

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        # In a frame of its own, where its keys and styles are its own, too.
        html = escape(self.html)
        high = min(900, 190 + round(self._picture.frame_height))
        return f'<iframe srcdoc="{html}" style="width:100%;height:{high}px;border:0"></iframe>'


@edge
def show(
    collective: str,
    name: str,
    size: int = 4,
    *,
    root: int = 0,
    hosts: Sequence[int] | None = None,
) -> Drawing:
    """Draw an algorithm, a user's or one of pycoll's: who sends what to whom, round by round.

    Nothing is sent. In a round each rank sends at most one message and receives at most one. An
    algorithm that is wrong is drawn, too, with what arrives twice, or never.

        pycoll.show("all_reduce", "ring")          # in a notebook this displays
        print(pycoll.show("all_reduce", "ring"))   # in a terminal

    Args:
        collective: for example ``"all_reduce"``.
        name: of the algorithm, for example ``"ring"``.
        size: number of ranks; up to 16 are readable, with more there are messages only.
        root: the root, for collectives that have one.
        hosts: by rank the number of its host; None: all are on one.

    Returns:
        The drawing: its ``text``, ``svg`` and ``html`` are strings; ``fault`` is None, or the
        `ProofError` that says why the algorithm is wrong on so many ranks.

    Raises:
        ValueError: there is no such algorithm, rank or host.
        TypeError: a number is none.
        ProofError: a step cannot be drawn, as it names a rank or a chunk that there is not.
    """
    if name == SHARED_MEMORY:
        raise ValueError("shared_memory sends no messages that one could draw; name another")
    algorithm = find(collective, name)
    if check_int(size, "size") < 1:
        raise ValueError(f"size is {size}; there is at least 1 rank")
    if not 0 <= check_int(root, "root") < size:
        raise ValueError(f"root is {root}, but the ranks are 0 to {size - 1}")
    if root and collective not in ROOTED:
        raise ValueError(f"{collective} has no root")
    given: object = hosts if hosts is not None else (0,) * size
    if not isinstance(given, Iterable):
        raise TypeError(f"hosts is a list of hosts' numbers, not {a_kind(given)}")
    placed = [check_int(host, "a host") for host in given]
    if len(placed) != size:
        raise ValueError(f"hosts must name a host for each of {size} ranks, not for {len(placed)}")
    return Drawing(Replay(algorithm, size, root, placed))
