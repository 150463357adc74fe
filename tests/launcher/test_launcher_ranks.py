"""What `pycoll-run` gives the ranks: their environment, hosts, cores and input."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from launcher_jobs import RUN, Environments, run

from pycoll._launcher.cli import main
from pycoll._launcher.help_text import variables_text
from pycoll._support.environment import VARIABLES, blocks, places, rank_environment, usable_cores


def test_help_in_a_pipe_has_every_option_and_every_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    options = "-n -np --transport -x -l --tag-output --log-dir --timeout --op-timeout --bind"
    for option in f"{options} --emulate-hosts --verbose --version --help --help-all".split():
        assert option in text
    assert variables_text() in text
    assert all(variable.name in text for group in VARIABLES.values() for variable in group)


def test_help_on_a_terminal_is_one_screen_that_says_how_to_see_all() -> None:
    master, slave = pty.openpty()
    subprocess.run([*RUN, "--help"], stdout=slave, check=True)
    os.close(slave)
    text = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(master, 4096):
            text += part
    os.close(master)
    screen = text.decode().replace("\r\n", "\n")
    lines = screen.splitlines()
    assert len(lines) < 24  # the next prompt has the last line
    assert max(map(len, lines)) <= 80
    assert len(re.findall(r"^  pycoll-run ", screen, re.MULTILINE)) == 2  # examples
    for option in ("-n", "--hosts", "--timeout", "--help-all"):
        assert re.search(rf"^  .*{option}\b.*  ", screen, re.MULTILINE)
    everything = run("--help-all").stdout.decode()
    assert everything.startswith(screen)
    assert everything.endswith(f"{variables_text()}\n")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pycoll-run ")


def test_what_follows_the_script_belongs_to_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = run("-n", "1", str(script), "-n", "7", "--help", "--", "-m", "x")
    assert done.stdout == b"['-n', '7', '--help', '--', '-m', 'x']\n"


def test_a_module_is_run_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "a_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = run("-n1", "-m", "a_module", "-n", "3", PYTHONPATH=pythonpath(tmp_path))
    assert done.stdout == b"__main__ ['-n', '3']\n"


def pythonpath(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_without_n_there_is_a_rank_for_each_usable_core() -> None:
    done = run("--", "sh", "-c", "echo $PYCOLL_SIZE")
    assert done.stdout.split() == [str(usable_cores()).encode()] * usable_cores()


def test_ranks_learn_who_they_are_and_where_to_meet(environments: Environments) -> None:
    ranks = environments(3)
    for number, rank in enumerate(ranks):
        assert rank["PYCOLL_RANK"] == rank["PYCOLL_LOCAL_RANK"] == str(number)
        assert rank["RANK"] == rank["LOCAL_RANK"] == str(number)
        assert rank["PYCOLL_SIZE"] == rank["PYCOLL_LOCAL_SIZE"] == "3"
        assert rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "3"
        assert (rank["PYCOLL_NODE"], rank["PYCOLL_NODES"]) == ("0", "1")
        assert (rank["PYCOLL_TRANSPORT"], rank["MASTER_ADDR"]) == ("auto", "127.0.0.1")
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", rank["PYCOLL_RENDEZVOUS"])
        assert re.fullmatch("[0-9a-f]{64}", rank["PYCOLL_KEY"])
        assert re.fullmatch(r"\d+:\d+", rank["PYCOLL_LINK"])
        assert re.fullmatch(r"\d+:\d+:\d+,\d+,\d+:\d+", rank["PYCOLL_SHM"])
        assert "PYCOLL_OP_TIMEOUT" not in rank
        assert 0 < int(rank["MASTER_PORT"]) < 65536
    for name in ("PYCOLL_KEY", "PYCOLL_JOB", "PYCOLL_RENDEZVOUS", "MASTER_PORT", "PYCOLL_SHM"):
        assert len({rank[name] for rank in ranks}) == 1


def test_options_reach_the_ranks(environments: Environments) -> None:
    options = "--transport", "tcp", "--op-timeout", "2.5", "-x", "A=b=c", "-x", "B", "-x", "C="
    (rank,) = environments(1, *options, B="given")
    assert (rank["PYCOLL_TRANSPORT"], rank["PYCOLL_OP_TIMEOUT"]) == ("tcp", "2.5")
    assert (rank["A"], rank["B"], rank["C"]) == ("b=c", "given", "")
    assert rank["PYCOLL_ENCRYPT"] == "0"


def test_encryption_is_an_option_or_a_setting(environments: Environments) -> None:
    chosen = [
        environments(1, "--encrypt"),
        environments(1, PYCOLL_ENCRYPT="1"),
        environments(1, "--transport", "zmq", "--encrypt", PYCOLL_ENCRYPT="0"),
    ]
    assert [rank["PYCOLL_ENCRYPT"] for (rank,) in chosen] == ["1", "1", "1"]
    (rank,) = environments(1, PYCOLL_ENCRYPT="1", PYCOLL_JOB="outer")
    assert rank["PYCOLL_ENCRYPT"] == "0"


def test_settings_of_the_user_stay(environments: Environments) -> None:
    variables = {"PYTHONUNBUFFERED": "0", "OMP_NUM_THREADS": "7", "PYCOLL_TRANSPORT": "tcp"}
    variables["PYCOLL_OP_TIMEOUT"] = "9"
    (rank,) = environments(1, **variables)
    assert variables.items() <= rank.items()


def test_variables_of_an_outer_job_are_replaced(environments: Environments) -> None:
    outer = {"PYCOLL_RANK": "5", "PYCOLL_JOB": "outer", "PYCOLL_KEY": "outer", "RANK": "5"}
    outer |= {"PYCOLL_LINK": "outer", "PYCOLL_SHM": "outer"}
    outer |= {"PYCOLL_TRANSPORT": "outer", "PYCOLL_OP_TIMEOUT": "9", "MASTER_PORT": "outer"}
    (rank,) = environments(1, **outer)
    assert rank["PYCOLL_RANK"] == rank["RANK"] == "0"
    assert "outer" not in rank.values()
    assert rank["PYCOLL_TRANSPORT"] == "auto"
    assert "PYCOLL_OP_TIMEOUT" not in rank


def test_ranks_share_the_cores_between_the_threads_of_their_libraries(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environments(1)[0]
    assert environments(usable_cores() + 1)[0]["OMP_NUM_THREADS"] == "1"
    assert environments(2)[0]["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))


def test_emulated_hosts_hold_blocks_of_ranks(environments: Environments) -> None:
    names = "NODE", "NODES", "LOCAL_RANK", "LOCAL_SIZE"
    ranks = environments(5, "--emulate-hosts", "2")
    assert [[int(rank[f"PYCOLL_{name}"]) for name in names] for rank in ranks] == [
        [0, 2, 0, 3],
        [0, 2, 1, 3],
        [0, 2, 2, 3],
        [1, 2, 0, 2],
        [1, 2, 1, 2],
    ]


@pytest.mark.parametrize("size", range(1, 20))
def test_every_host_has_ranks_however_many_are_asked_for(size: int) -> None:
    for hosts in range(1, size + 1):
        found = places(blocks(size, hosts))
        assert {where.nodes for where in found} == {found[-1].node + 1}
        assert found[-1].node < hosts
        for where in found:
            assert (
                where.local_rank
                < where.local_size
                == sum(other.node == where.node for other in found)
            )


def test_ranks_of_a_host_need_not_follow_each_other() -> None:
    found = places([0, 1, 0, 2, 0])
    assert [where.local_rank for where in found] == [0, 0, 1, 0, 2]
    assert [where.local_size for where in found] == [3, 1, 3, 1, 3]
    everyone = dict(enumerate(found))
    assert rank_environment(4, everyone)["PYCOLL_LOCAL_RANKS"] == "0,2,4"


def test_bound_ranks_keep_to_cores_of_their_own(tmp_path: Path) -> None:
    count = min(usable_cores(), 4)
    script = tmp_path / "script.py"
    script.write_text("import os; print(*sorted(os.sched_getaffinity(0)))")
    done = run("-n", str(count), "--bind", "core", str(script))
    assert len(set(done.stdout.splitlines())) == count
    assert len(set(done.stdout.split())) == len(done.stdout.split())
