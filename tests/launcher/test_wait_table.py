"""The table of who waits for whom, as text."""

from __future__ import annotations

from pycoll._launcher.wait_table import (
    PREFIX,
    WIDTH,
    Waiter,
    deadlock_text,
    table,
    threads_text,
    waiting_text,
)


def waiter(call: str, awaited: set[int], where: str = "train.py:31", **fields: object) -> Waiter:
    plain = Waiter(call, "", where, "world", tuple(range(4)), 30.2, frozenset(awaited))
    return plain._replace(**fields)  # type: ignore[arg-type]


def test_ranks_that_do_the_same_are_one_row() -> None:
    call = "all_reduce(float32[4], op=sum, algorithm=shared_memory)"
    waiters = {rank: waiter(call, {2}, which=" #12") for rank in (0, 1, 3)}
    waiters[3] = waiters[3]._replace(waited_s=31.0)
    heading = waiting_text({2: "running"}, 30.2)
    assert table(heading, waiters, {2: "running, process 17"}) == [
        "waiting for rank 2, which is running",
        "    rank    waits for  in",
        "    0-1, 3  2          all_reduce(float32[4], op=sum) #12 at train.py:31, 30-31 s",
        "    2       -          running, process 17",
        "    world: ranks 0-3",
    ]


def test_communicators_are_named_with_their_ranks() -> None:
    waiters = {
        0: waiter("barrier()", {1}, which=" #0 on dp", name="dp", members=(0, 1)),
        1: waiter("barrier()", {0}, which=" #0 on tp", name="tp", members=(1, 5, 6, 7)),
        2: waiter("barrier()", {3}, which=" #0 on dp", name="dp", members=(2, 3), doing="stopped"),
    }
    assert table(deadlock_text([0, 1], ends=False), waiters, {}) == [
        "deadlock: rank 0 waits for 1, which waits for 0",
        "    rank  waits for  in",
        "    0     1          barrier() #0 on dp at train.py:31, 30 s",
        "    1     0          barrier() #0 on tp at train.py:31, 30 s",
        "    2     3          barrier() #0 on dp at train.py:31, 30 s, stopped",
        "    dp: 2 communicators; tp: ranks 1, 5-7",
    ]


def test_long_calls_keep_where_they_are_and_long_states_go_on_in_the_next_line() -> None:
    call = "wait_all of 12 requests, first iall_reduce(float64[1000], op=sum, algorithm=ring) #17"
    where = {"where": "a_program_with_a_long_name.py:117", "which": " on dp (2)", "name": "dp (2)"}
    state = "asleep (futex_do_wait: for a lock, or another thread), its main thread has ended"
    waiters = {0: waiter("recv(source=1)", {1}), 1: waiter(call, {2}, **where)}
    lines = table("", waiters, {2: f"{state}, process 123456\nnot finished: recv"})
    assert lines[3:-1] == [
        "    1     2          wait_all of 12 requests... on dp (2) "
        "at a_program_with_a_long_name.py:117, 30 s",
        "    2     -          asleep (futex_do_wait: for a lock, or another thread), its main "
        "thread has",
        "                     ended, process 123456",
        "                     not finished: recv",
    ]
    assert max(map(len, lines)) <= WIDTH
    shorter = waiter("wait_all of 2 requests, first irecv(source=1, tag=3) #4", {1})
    assert table("", {0: shorter}, {})[2] == (
        "    0     1          wait_all of 2 requests, first irecv(source=1, tag=3) #4 "
        "at train.py:31, 30 s"
    )


def test_of_a_very_long_place_the_end_is_shown() -> None:
    where = f"{'test_that_says_in_its_name_what_is_right_' * 2}for_all.py:117"
    line = table("", {0: waiter("recv(source=1, tag=ANY)", {1}, where=where)}, {})[2]
    assert line == (f"    0     1          recv(source=1, tag=ANY) at ...{where[-37:]}, 30 s")


def test_headings() -> None:
    assert deadlock_text([4], False) == "deadlock: rank 4 waits for itself"
    assert deadlock_text([0, 1], True).startswith("deadlock until a deadline passes: rank 0 ")
    perhaps = deadlock_text([0, 1], False, threads_text([1]))
    assert perhaps.startswith("perhaps a deadlock (rank 1 has other threads): rank 0 waits for 1")
    assert deadlock_text(list(range(5)), False) == (
        "deadlock: 5 ranks wait in a circle: 0 -> 1 -> 2 -> 3 -> 4 -> 0"
    )
    assert deadlock_text(list(range(64)), False) == (
        "deadlock: 64 ranks wait in a circle: 0 -> 1 -> 2 -> 3 -> 4 -> ... -> 63 -> 0"
    )
    several = {1: "running", 2: "stopped", 3: "running", 4: "has ended (exit status 0)"}
    assert waiting_text(several, 30.0) == (
        "waiting for ranks 1, 3, which are running, and rank 2, which is stopped, "
        "and rank 4, which has ended (exit status 0)"
    )
    assert waiting_text({}, 3.25) == "waiting for 3.2 s; it is not known for whom"


def test_many_ranks_make_a_short_table_of_narrow_lines() -> None:
    ring = {
        rank: waiter(f"send(float64[1000000], dest={(rank + 1) % 64}, tag=0)", {(rank + 1) % 64})
        for rank in range(64)
    }
    assert table(deadlock_text(list(range(64)), False), ring, {})[1:3] == [
        "    rank  waits for  in",
        "    0-63  0-63       send(...) at train.py:31, 30 s",
    ]
    wild = {
        rank: waiter("all_to_allv(" + "x" * 300 + ")", {rank % 7}, f"{'y' * 30}.py:{rank % 20}")
        for rank in range(0, 128, 2)
    }
    lines = table("z" * 300, wild, dict.fromkeys(range(1, 128, 2), "asleep (futex_wait_queue)"))
    assert len(lines) <= 15
    assert max(map(len, lines[1:])) <= WIDTH
    assert len(PREFIX + lines[0]) <= WIDTH
