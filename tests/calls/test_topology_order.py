"""PYCOLL_TOPOLOGY: hosts stand in the order of a file, and every collective gives what it gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collective_cases import Comm, check, draw_all, reduced

from pycoll.schedules import names

ORDER = [2, 3, 0, 1, 4]
"""The ranks of three hosts, of 2, 2 and 1, in the order of the file."""


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("topology") / "ring.toml"
    file.write_text('ring = ["1", "0", "2"]\n')
    return file


@pytest.fixture
def jobs(pools: Any, ring: Path) -> Any:
    return pools(5, ["--emulate-hosts", "3"], {"PYCOLL_TOPOLOGY": str(ring)})


def test_blocks_belong_to_their_ranks_in_any_order_of_hosts(jobs: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, length in enumerate((1, 3001)):
            all_x = draw_all(case, size, "int32", (size, length))
            x, root = all_x[me], (case + 3) % size
            stacked = np.stack(all_x)
            for name in (None, *names("broadcast")):
                check(comm.broadcast(x if me == root else None, root, algorithm=name), all_x[root])
            for name in (None, *names("gather")):
                got = comm.gather(x, root, algorithm=name)
                assert got is None if me != root else (got == stacked).all()
            for name in (None, *names("all_gather")):
                check(comm.all_gather(x, algorithm=name), stacked)
            for name in (None, *names("scatter")):
                got = comm.scatter(x if me == root else None, root, algorithm=name)
                check(got, all_x[root][me])
            for name in (None, *names("all_to_all")):
                check(comm.all_to_all(x, algorithm=name), stacked[:, me])
            for name in (None, *names("reduce_scatter")):
                check(comm.reduce_scatter(x, algorithm=name), reduced("sum", all_x)[me])
            for name in (None, *names("all_reduce")):
                check(comm.all_reduce(x, algorithm=name), reduced("sum", all_x))
            for name in (None, *names("reduce")):
                got = comm.reduce(x, "sum", root, algorithm=name)
                assert got is None if me != root else (got == reduced("sum", all_x)).all()
        gathered = comm.all_gatherv(np.full(me, me))
        assert [list(one) for one in gathered] == [[rank] * rank for rank in range(size)]
        assert comm.all_gather({"rank": me}) == [{"rank": rank} for rank in range(size)]
        comm.barrier()
        turned = comm.split(0, key=-me)
        assert turned is not None
        for name in names("all_gather"):
            check(turned.all_gather(np.array(me), algorithm=name), np.arange(size)[::-1])

    jobs(program)


def test_what_combines_in_rank_order_still_does(jobs: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        import pycoll

        def times(a: Any, b: Any) -> Any:
            return (a.reshape(-1, 2, 2) @ b.reshape(-1, 2, 2)).reshape(a.shape)

        product = pycoll.Op(times, commutative=False, elementwise=False)
        matrices = draw_all(7, size, "int64", (40, 2, 2))
        expected = [matrices[0]]
        for matrix in matrices[1:]:
            expected.append(times(expected[-1], matrix))
        check(comm.all_reduce(matrices[me], product), expected[-1])
        check(comm.scan(matrices[me], product), expected[me])
        assert comm.all_reduce(str(me), lambda a, b: a + b) == "01234"
        assert comm.scan(me + 1) == sum(range(me + 2))

    jobs(program)


def test_neighbors_are_those_of_the_file_and_explain_says_so(jobs: Any, ring: Path) -> None:
    def program(comm: Comm) -> tuple[int, str, str, list[bytes]]:
        from pycoll.schedule import Send

        steps = comm._group.schedule("all_reduce", "ring").steps
        [right] = {step.peer for step in steps if isinstance(step, Send)}
        said = str(comm.explain("all_gather", 1 << 20))
        rank_order = str(comm.explain("scan", 1 << 20))
        x = np.random.default_rng(comm.rank).random(30_001)
        sums = [comm.all_reduce(x), comm.iall_reduce(x).wait(), comm.all_reduce(x)]
        return right, said, rank_order, [each.tobytes() for each in sums]

    found = jobs(program)
    for place, rank in enumerate(ORDER):
        assert found[rank][0] == ORDER[(place + 1) % 5]
    line = f"\n  hosts stand in the order that PYCOLL_TOPOLOGY={ring} says"
    assert all(line in said and line not in scan for _, said, scan, _ in found)
    assert len({sums for *_, several in found + jobs(program) for sums in several}) == 1
