"""Names of communicators: what messages call them."""

from __future__ import annotations

from typing import Any

import pytest

import pycoll

pytestmark = pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")


def test_a_communicator_is_named_as_asked_or_after_how_it_was_made(ranks: Any) -> None:
    def names(comm: Any) -> list[str]:
        grid = comm.grid((1, 2), names=("dp", "tp"))
        plain = comm.grid((1, 2), name="g")
        made = [
            comm,
            comm.dup(name="copy"),
            comm.split(comm.rank, name="mine"),
            comm.split(comm.rank),
            comm.split_by_host(),
            comm.sub([0, 1]),
            comm.sub([1, 0]),
            comm.sub([comm.rank], name="alone"),
            grid,
            grid.axis("tp"),
            grid.axis("dp", "tp"),
            grid.dup(),
            plain,
            plain.axis(1),
            plain.axis(0, 1),
        ]
        return [each.name for each in made]

    pool = "world"  # so is the communicator of a run called
    for rank, found in enumerate(ranks(names)):
        assert found == [
            pool,
            "copy",
            "mine",
            f"split of {pool}, color {rank}",
            f"host 0 of {pool}",
            f"ranks 0-1 of {pool}",
            f"ranks 1, 0 of {pool}",
            "alone",
            f"grid of {pool}",
            "tp",
            "dp, tp",
            f"dup of grid of {pool}",
            "g",
            "axis 1 of g",
            "axes 0, 1 of g",
        ]


def test_a_name_is_a_text(ranks: Any) -> None:
    def refused(comm: Any) -> None:
        for make in (comm.dup, lambda name: comm.split(0, name=name), comm.grid((2,)).dup):
            with pytest.raises(TypeError, match="the name of a communicator is a str, not an int"):
                make(name=3)
        with pytest.raises(TypeError, match="is a str"):
            comm.sub([0, 1], name=3)
        with pytest.raises(TypeError, match="is a str"):
            comm.grid((2,), name=3)

    ranks(refused)


def test_errors_name_the_communicator(ranks: Any) -> None:
    def errors(comm: Any) -> list[str]:
        named = comm.dup(name="dp")
        request = named.irecv(1 - comm.rank)
        with pytest.raises(pycoll.OperationTimeout) as late:
            named.recv(1 - comm.rank, timeout=0.0)
        with pytest.raises(pycoll.MismatchError) as wrong:
            named.barrier() if comm.rank else named.all_reduce(1)
        return [str(late.value), repr(request), str(wrong.value)]

    for late, request, wrong in ranks(errors):
        assert "tag=ANY) on dp at test_names.py" in late
        assert "tag=ANY) on dp: " in request
        assert "collective number 0 of dp" in wrong or "on dp" in wrong


def test_no_method_shows_where_it_is_implemented(ranks: Any) -> None:
    def shown(comm: Any) -> dict[str, str]:
        names = [name for name in dir(comm) if not name.startswith("_")]
        own = {name: repr(getattr(comm, name)) for name in names}
        return own | {"persistent.recv": repr(comm.persistent.recv)}

    for found in ranks(shown):
        assert "pycoll.Communicator object at 0x" in found["all_reduce"]  # a failed assert shows it
        assert "pycoll.Communicator object at 0x" in found["iall_reduce"]
        assert "pycoll.Communicator object at 0x" in found["recv"]
        assert found["persistent"] == "<pycoll.Communicator.persistent of world>"
        assert not [text for text in found.values() if "pycoll._" in text]
