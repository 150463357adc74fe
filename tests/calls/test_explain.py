"""comm.explain: what would run, why, and what else could; and its words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll._tools.cli import main
from pycoll.schedules import TABLE

Comm = Any

MiB = 1 << 20
TCP = (4, ("--transport", "tcp"), {})
SHM = (2, ("--transport", "shm"), {})
HOSTS = (4, ("--emulate-hosts", "2"), {})
RULED = (
    3,
    ("--transport", "tcp"),
    {
        "PYCOLL_ALGORITHM": "all_reduce:ring,shared_memory;broadcast:^linear,tree",
        "PYCOLL_SEGMENT": "64K",
    },
)


def on(*worlds: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "ranks", worlds, indirect=True, scope="module", ids=[str(world[0]) for world in worlds]
    )


@on(TCP, SHM, HOSTS, RULED)
def test_what_is_explained_is_what_runs_and_all_ranks_say_the_same(ranks: Any) -> None:
    def program(comm: Comm) -> list[str]:
        said = []
        for collective in TABLE:
            for nbytes in (0, 8, 100_000, 64 * MiB):
                why = comm.explain(collective, nbytes)
                choice = comm._group.choose(collective, why.nbytes, None)
                assert (why.algorithm, why.segments) == choice
                said.append(str(why))
        return said

    said = ranks(program)
    assert all(one == said[0] for one in said)


@on(TCP, SHM, HOSTS, RULED)
def test_the_command_says_the_same_without_ranks(
    ranks: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    size, options, environ = request.node.callspec.params["ranks"]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    asked = [
        (collective, nbytes, blocking, dtype)
        for collective in ("all_reduce", "broadcast", "all_to_all")
        for nbytes, dtype in ((8, None), (4096, "int64"), (3 * MiB, None))
        for blocking in (True, False)
    ]

    def program(comm: Comm) -> list[str]:
        return [
            str(comm.explain(collective, nbytes, blocking=blocking, dtype=dtype))
            for collective, nbytes, blocking, dtype in asked
        ]

    for (collective, nbytes, blocking, dtype), said in zip(asked, ranks(program)[0], strict=True):
        words = ["explain", collective, "-n", str(size), "--bytes", str(nbytes), *options]
        words += [] if blocking else ["--nonblocking"]
        assert main([*words, *(["--dtype", dtype] if dtype else [])]) == 0
        assert capsys.readouterr().out == said + "\n"


@on(HOSTS)
def test_between_hosts_values_of_every_dtype_go_alike(ranks: Any) -> None:
    def program(comm: Comm) -> dict[Any, str]:
        for name in ("float32", "int64", "bool"):
            x = np.ones(4096 // np.dtype(name).itemsize, name)
            algorithm = comm.explain("all_reduce", 4096, dtype=name).algorithm
            assert f"algorithm={algorithm}" in comm._calls.all_reduce(x).text
        dtypes = (None, "float32", "bfloat16", "int64", np.bool_, np.dtype("uint8"))
        return {dtype: str(comm.explain("all_reduce", 4096, dtype=dtype)) for dtype in dtypes} | {
            "band": str(comm.explain("all_reduce", 4096, "band")),
            "list": str(comm.explain("all_reduce", 4096, lambda a, b: a, dtype="int64")),
            "any": str(comm.explain("all_reduce", 4096, lambda a, b: a)),
        }

    said = ranks(program)[0]
    operator = said.pop("list"), said.pop("any")
    assert len(set(said.values())) == 1
    assert len(set(operator)) == 1


@on(SHM)
def test_a_dtype_that_is_none_is_refused_as_the_call_would(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        with pytest.raises(TypeError, match='"band" does not work on float32'):
            comm.explain("all_reduce", 8, "band", dtype="float32")
        with pytest.raises(TypeError, match="only move"):
            comm.explain("all_reduce", 8, dtype="float8_e5m2")
        with pytest.raises(TypeError, match="int7"):
            comm.explain("all_reduce", 8, dtype="int7")
        assert comm.explain("all_gather", 8, dtype="int7").algorithm == "shared_memory"

    ranks(program)


@on(TCP)
def test_the_quickest_is_chosen_and_the_others_follow_by_time(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        why = comm.explain("all_reduce", MiB)
        assert (why.collective, why.nbytes, why.size) == ("all_reduce", MiB, 4)
        assert why.why == "by the table it takes least time"
        times = [why.seconds, *(seconds for _, _, seconds in why.runners_up)]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] < 1
        assert why.refused["shared_memory"] == "needs all ranks on one host, sharing memory"
        every = {why.algorithm, *(name for name, _, _ in why.runners_up), *why.refused}
        assert every == set(pycoll.algorithms("all_reduce"))

    ranks(program)


@on(TCP)
def test_an_operator_rules_out_what_cannot_serve_it(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        why = comm.explain("all_reduce", MiB, lambda a, b: a @ b)
        assert "does not combine in rank order" in why.refused["ring"]
        assert why.segments == 1
        gathered = comm.explain("all_gather", MiB, lambda a, b: a @ b)
        assert gathered.algorithm == comm.explain("all_gather", MiB).algorithm

    ranks(program)


@on(SHM)
def test_where_memory_is_shared_the_core_is_chosen_but_not_for_requests(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        why = comm.explain("broadcast", 8)
        assert why.algorithm == "shared_memory"
        assert "shared_memory is used" in why.why
        assert why.runners_up
        request = comm.explain("broadcast", 8, blocking=False)
        assert request.algorithm != "shared_memory"
        assert "blocking" in request.refused["shared_memory"]
        gathered = comm.explain("reduce", 8, min)
        assert gathered.algorithm == "shared_memory"
        assert gathered.why.startswith("so short values go by gather")
        assert comm.explain("reduce", MiB, min).algorithm != "shared_memory"

    ranks(program)


@on(HOSTS)
def test_between_hosts_levels_are_considered(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        why = comm.explain("all_reduce", MiB)
        assert "hierarchical" in [why.algorithm, *(name for name, _, _ in why.runners_up)]
        assert why.table.endswith("(TCP on one machine)")
        with comm.split_by_host() as here:
            alone = here.explain("all_reduce", MiB, blocking=False)
            assert alone.refused["hierarchical"].startswith("needs several hosts")
            assert alone.table.endswith("(messages in shared memory)")

    ranks(program)


@on(HOSTS)
def test_rdma_is_named_where_it_connects_the_hosts(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        networks = {0: "Ethernet", 1: "Ethernet"}
        with comm.dup() as other:
            other._group.go_by(other._group.engine.agreed._replace(networks=networks))
            why = other.explain("all_reduce", MiB)
        assert why.table.endswith("(RDMA, an estimate)")
        assert why.seconds < comm.explain("all_reduce", MiB).seconds

    ranks(program)


@on(RULED)
def test_what_the_user_said_is_the_reason(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        why = comm.explain("all_reduce", 3 * MiB)
        assert (why.algorithm, why.segments) == ("ring", 16)
        assert why.why == "PYCOLL_ALGORITHM says all_reduce:ring,shared_memory"
        assert why.refused["tree"] == "PYCOLL_ALGORITHM=all_reduce:ring,shared_memory"
        spread = comm.explain("broadcast", 8)
        assert (
            spread.why
            == "PYCOLL_ALGORITHM says broadcast:^linear,tree, and of these it is the quickest"
        )
        ordered = comm.explain("all_reduce", 8, lambda a, b: a @ b)
        assert ordered.algorithm != "ring"
        assert "none of that can serve" in ordered.why
        assert comm.explain("reduce", 8).why == "by the table it takes least time"

    ranks(program)


@on(TCP)
def test_the_text_is_for_people(ranks: Any) -> None:
    def program(comm: Comm) -> str:
        return str(comm.explain("reduce", 3 * MiB // 2))

    head, because, *lines = ranks(program)[0].splitlines()
    assert head.startswith("reduce of 1.5 MiB on 4 ranks: ")
    assert head.endswith((" ms", " us"))
    assert because == "  because by the table it takes least time"
    assert "  others that can serve:" in lines
    assert "  not considered:" in lines
    assert lines[-1].startswith("  times by ")


@on(TCP)
def test_the_other_name_of_all_reduce_is_known(ranks: Any) -> None:
    def program(comm: Comm) -> bool:
        return str(comm.explain("allreduce", 8)) == str(comm.explain("all_reduce", 8))

    assert all(ranks(program))


@on(TCP)
def test_wrong_arguments_are_named(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        with pytest.raises(ValueError, match="no collective 'shuffle'; there are"):
            comm.explain("shuffle", 8)
        with pytest.raises(ValueError, match="nbytes is -1"):
            comm.explain("reduce", -1)
        with pytest.raises(TypeError, match="nbytes"):
            comm.explain("reduce", "1M")
        with pytest.raises(ValueError, match="plus"):
            comm.explain("reduce", 8, "plus")

    ranks(program)


def test_alone_there_is_nothing_to_send() -> None:
    assert math.isfinite(pycoll.run(lambda comm: comm.explain("all_reduce", 8).seconds, 1)[0])


def test_one_rank_alone_is_told_to_ask_on_several() -> None:
    why = pycoll.init().explain("all_reduce", MiB)
    assert why.refused["shared_memory"] == "needs more than one rank"
    first, because = str(why).splitlines()
    assert first.startswith("all_reduce of 1 MiB on 1 rank: ")
    assert because.startswith("  because one rank has nothing to exchange")
