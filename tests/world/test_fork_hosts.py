"""A fork of a rank whose communicators span hosts."""

from __future__ import annotations

from pool_scripts import Scripts


def test_a_child_enters_no_communicator_whatever_its_parent_has_made(scripts: Scripts) -> None:
    scripts(
        4,
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
x = np.ones(3, "i8")
comm.all_reduce(x)
host = comm.split_by_host()
assert host.all_reduce(x)[0] == 2
if rank == 0:
    pid = os.fork()
    if pid == 0:
        for c in host, comm:
            for call, *args in (c.all_reduce, 1000 * x), (c.barrier,), (c.send, x, 1):
                error_like(pycoll.Error, "was forked from a rank", call, *args, within=0.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert host.all_reduce(x)[0] == 2
assert comm.all_reduce(x)[0] == 4
ok()
""",
        "shm",
        "--emulate-hosts",
        "2",
    )
