"""What Slurm's variables say of an allocation; test_hosts_slurm has jobs in a real one."""

from __future__ import annotations

import pytest

from pycoll._launcher import slurm
from pycoll._launcher.host_choice import named_host
from pycoll._launcher.hostlist import Slots, lay_out, spread
from pycoll.errors import Error

NODES = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("hosta", ["hosta"]),
        ("hosta,hostb", ["hosta", "hostb"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12]", ["n08", "n09", "n10", "n12"]),
        ("r[1-2]n[08-09],login-1", ["r1n08", "r1n09", "r2n08", "r2n09", "login-1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_a_list_of_hosts_is_expanded(text: str, hosts: list[str]) -> None:
    assert slurm.expand(text) == hosts


@pytest.mark.parametrize("text", ["n[a-b]", "n[]", "n[1-2-3]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(Error, match="is no list of hosts"):
        slurm.expand(text)


def test_tasks_of_each_host_are_read() -> None:
    assert slurm.tasks_per_node("4(x2),1") == [4, 4, 1]
    with pytest.raises(Error, match="is no number of tasks"):
        slurm.tasks_per_node("4x2")


def test_ranks_go_where_slurm_would_start_tasks() -> None:
    slots = slurm.allocation(NODES)
    assert slots == [Slots("n1", 2), Slots("n2", 2), Slots("n3", 1)]
    cyclic = slurm.allocation({**NODES, "SLURM_DISTRIBUTION": "cyclic"})
    assert lay_out(cyclic, None)[1] == [0, 1, 2, 0, 1]


def test_variables_that_do_not_go_together_are_named() -> None:
    with pytest.raises(Error, match=r"SLURM_TASKS_PER_NODE is '2', but .* names 3 hosts"):
        slurm.allocation({**NODES, "SLURM_TASKS_PER_NODE": "2"})


def test_more_ranks_than_tasks_are_spread_evenly() -> None:
    slots = slurm.allocation(NODES)
    assert spread(slots, 5) == slots
    assert spread(slots, 7) == [Slots("n1", 3), Slots("n2", 3), Slots("n3", 3)]


@pytest.mark.parametrize(
    ("variables", "is_one"),
    [
        ({}, True),
        ({"SLURM_STEP_NUM_TASKS": "1"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2"}, False),
        ({"PYCOLL_JOB": "0"}, False),
    ],
)
def test_when_a_job_is_to_have_the_allocation(variables: dict[str, str], is_one: bool) -> None:
    assert slurm.is_allocation({**NODES, **variables}) == is_one
    assert not slurm.is_allocation(variables)


def test_only_a_task_of_the_allocation_is_on_its_host() -> None:
    inside = {"SLURMD_NODENAME": "n1"}
    assert named_host("n1", inside, ["n1", "n2"]).command == ()
    assert named_host("n2", inside, ["n1", "n2"]).command[0] == "srun"
    assert named_host("n1", {}, ["n1", "n2"]).command[0] == "srun"
    assert named_host("elsewhere", inside, ["n1", "n2"]).command[0] == "ssh"
