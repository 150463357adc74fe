"""What a wait needs of other ranks: of that the launcher concludes who waits for whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pycoll._rendezvous.wire import AGREES
from pycoll._runtime.agreement import Agreement
from pycoll._runtime.task import Call, Several
from pycoll._runtime.waits import options_of
from pycoll._transports.base import Operation

CONTEXT: Any = SimpleNamespace(ident=7, members=(3, 5, 9), me=5)
RECV = Call("irecv(source=ANY)", -1, CONTEXT)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("barrier()", [3, 9]),
        ("iall_reduce(int, op=sum)", [3, 9]),
        ("exscan(int, op=sum)", [3]),
        ("broadcast(root=2)", [9]),
        ("scatter(root=1)", []),
        ("gather(object, root=1, algorithm=linear)", [3, 9]),
        ("reduce(int, root=0)", []),
        ("reduce_scatterv(float64[3], counts=(1, 1, 1))", []),
    ],
)
def test_a_collective_needs_those_who_must_begin_it(text: str, ranks: list[int]) -> None:
    options = options_of(Operation(), Call(text, 4, CONTEXT))
    assert options == ([[(7, 4, ranks)]] if ranks else [])


def waiting(*ranks: int) -> Any:
    """A receive from one of these."""
    return SimpleNamespace(call=RECV, awaited=lambda: ranks, done=False, watchers={})


def test_several_requests_need_what_all_need_or_what_one_of_them_does() -> None:
    first, second = (7, -1, [3]), (7, -1, [5, 9])
    both = [waiting(3), waiting(9, 5)]
    assert options_of(Several(both, needed=2), RECV) == [[first, second]]
    assert options_of(Several(both, needed=1), RECV) == [[first], [second]]
    # Who knows what the other one needs?
    assert options_of(Several([waiting(3), waiting()], needed=1), RECV) == []


def test_an_agreement_needs_those_who_have_not_agreed() -> None:
    assert options_of(Agreement(0, {9, 3}), RECV) == [[(7, AGREES, [3, 9])]]
