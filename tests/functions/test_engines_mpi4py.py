"""Libraries that take a communicator of mpi4py's, on one of `pycoll.mpi4py_like`."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

PACKAGES = ("emcee", "schwimmbad", "dask-mpi", "mpich")
MISSING = [name for name in PACKAGES if not [*metadata.distributions(name=name)]]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {MISSING}: pip install emcee schwimmbad dask-mpi mpich"
    ),
]

STAND_IN = """
from pycoll import mpi4py_like
mpi4py_like.stand_in()
"""

REAL = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
assert MPI.ANY_SOURCE != pycoll.ANY_SOURCE  # MPICH's, which is pycoll's PROC_NULL
"""

SAMPLE = """
import atexit
import emcee
from pycoll import mpi4py_like
from schwimmbad import MPIPool

comm = pycoll.init()
atexit.register(lambda: print(comm.rank, "ok", flush=True))

def log_probability(x):
    return -0.5 * np.sum(x ** 2)

def chain_of(pool):
    np.random.seed(7)
    start = np.random.randn(8, 2)
    sampler = emcee.EnsembleSampler(8, 2, log_probability, pool=pool)
    sampler.run_mcmc(start, 20)
    return sampler.get_chain()

with MPIPool(mpi4py_like.Comm(comm)) as pool:
    assert chain_of(pool).std() > 0.5
    assert (chain_of(pool) == chain_of(None)).all()
    assert pool.map(len, ["a" * n for n in range(50)]) == [*range(50)]
for rank in 1, 2:
    comm.send(None, rank)  # they have gone, which is no error; and the pool closes once more
"""

RAISES = """
from pycoll import mpi4py_like
from schwimmbad import choose_pool

mpi4py_like.stand_in()
with choose_pool(mpi=True) as pool:
    pool.map(int, ["1", "x"])
"""

PROBES = """
from pycoll import mpi4py_like

like, status = mpi4py_like.Comm(pycoll.init()), MPI.Status()
if like.rank == 0:
    assert like.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    assert (status.Get_source(), status.Get_tag()) == (1, 7)
    status = MPI.Status()
    assert like.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status) == "value"
    assert (status.source, status.tag) == (1, 7)
    assert like.recv(source=MPI.PROC_NULL, status=status) is None
    assert (status.source, status.tag) == (MPI.PROC_NULL, MPI.ANY_TAG)
else:
    like.send("nobody's", MPI.PROC_NULL)
    like.ssend("value", 0, tag=7)
assert not MPI.Is_initialized()
print(like.rank, "ok", flush=True)
"""

CLUSTER = """
from dask_mpi import execute
from pycoll import mpi4py_like

def work():
    from distributed import Client
    with Client() as client:
        client.wait_for_workers(1)
        assert client.submit(pow, 3, 4).result() == 81
    assert "mpi4py.MPI" not in sys.modules
    print("81", flush=True)

like = mpi4py_like.Comm(pycoll.init())
execute(work, comm=like, dashboard=False, interface="lo", local_directory=sys.argv[1])
print(like.rank, "ok", flush=True)
"""


@pytest.mark.parametrize("init", [STAND_IN, REAL], ids=["stand-in", "MPICH"])
def test_emcee_samples_the_same_on_a_pool_of_schwimmbads(init: str, job: Any) -> None:
    done = job(3, SAMPLE, init=init)
    assert (done.status, done.content, done.stderr) == (0, [0, 1, 2], "")


def test_a_task_of_schwimmbads_that_raises_ends_the_job(job: Any) -> None:
    done = job(3, RAISES, init="")
    assert done.status == 1
    assert "ValueError: invalid literal for int() with base 10: 'x'" in done.stderr


def test_constants_and_statuses_of_a_real_mpi_are_understood(job: Any) -> None:
    done = job(2, PROBES, init=REAL)
    assert (done.status, done.content, done.stderr) == (0, [0, 1], "")


def test_dask_mpi_makes_a_cluster_of_ranks(job: Any) -> None:
    done = job(3, CLUSTER, init="")
    assert (done.status, done.content) == (0, [0, 1, 2]), done.stderr
    assert "81\n" in done.stdout
