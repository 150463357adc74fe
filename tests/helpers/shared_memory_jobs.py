"""Parts of scripts that ranks run: calls in shared memory, and a kernel that copies nothing."""

from __future__ import annotations

# `shm` of the world, and forms of calls.
NATIVE = """
shm = comm._group.shm
core = shm.core if shm is not None else None

def read_directly(nbytes):
    "From so many bytes on, in every collective."
    from pycoll._transports._core import KINDS
    from pycoll._transports import _core
    for kind in range(len(KINDS)):
        _core.set_direct_from(kind, nbytes)

def check_all(comm, *more):
    "Collectives of few and many bytes, and of `more` elements, each bit as it should be."
    me, n = comm.rank, comm.size
    for count in (0, 1, 1000, 20_000, 300_000, *more):
        all_x = [np.arange(count, dtype="f4") + r for r in range(n)]
        x = all_x[me]
        out = comm.all_reduce(x, out=np.zeros_like(x))
        want = all_x[0]
        for each in all_x[1:]:
            want = want + each
        assert out.tobytes() == want.tobytes(), count
        rows = comm.all_gather(x, out=np.zeros((n, count), "f4"))
        assert all((row == each).all() for row, each in zip(rows, all_x)), count
        got = comm.broadcast(x if me == n - 1 else None, root=n - 1)
        assert (got == all_x[n - 1]).all(), count
        y = x.copy()
        assert (comm.sendrecv(x, (me + 1) % n, (me - 1) % n, out=y) == all_x[me - 1]).all()

def fails_soon(reason, call, *args):
    "Rank 0 has entered the call: who needs no more of it than it has given may still finish."
    try:
        call(*args)
    except pycoll.PeerFailed as error:
        assert (error.rank, error.reason) == (0, reason), repr(error)
    peer_failed(0, reason, call, *args)
"""

# Install a real seccomp filter: process_vm_readv and process_vm_writev give EPERM.
REFUSE = """
import ctypes, platform, struct

def refuse_single_copy():
    numbers = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]
    rows = [(0x20, 0, 0, 0)]  # load the number of the call
    for left, number in zip((1, 0), numbers):
        rows.append((0x15, left, 0 if left else 1, number))  # equal: to the refusal
    rows += [(0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)]  # EPERM; allow
    code = b"".join(struct.pack("HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    status = libc.prctl(22, 2, ctypes.create_string_buffer(program, len(program)), 0, 0)
    assert status == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    word = ctypes.c_uint64(0)
    vec = ctypes.create_string_buffer(struct.pack("PN", ctypes.addressof(word), 8), 16)
    libc.process_vm_readv.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong] * 1 + [
        ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
    assert libc.process_vm_readv(os.getpid(), vec, 1, vec, 1, 0) == -1
    assert ctypes.get_errno() == 1, os.strerror(ctypes.get_errno())
"""
