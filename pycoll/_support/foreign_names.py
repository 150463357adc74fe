"""The words of other libraries, and what they are called here.

Who writes mpi4py's, torch.distributed's or NumPy's word gets an error that names pycoll's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OF_COMMUNICATORS = {
    "reduce_all": "all_reduce",
    "gather_all": "all_gather",
    # mpi4py; those that differ in case and underscores alone need no entry
    "bcast": "broadcast",
    "Bcast": "broadcast",
    "ibcast": "ibroadcast",
    "Ibcast": "ibroadcast",
    "Bcast_init": "persistent.broadcast",
    "Reduce_scatter_block": "reduce_scatter",
    "Ireduce_scatter_block": "ireduce_scatter",
    "Alltoallw": "all_to_allv",
    "Ialltoallw": "iall_to_allv",
    "Rsend": "send",
    "Irsend": "isend",
    "Sendrecv_replace": "sendrecv",
    "Isendrecv_replace": "isendrecv",
    "Get_rank": "rank",
    "Get_size": "size",
    "Get_group": "members",
    "Clone": "dup",
    "Split_type": "split_by_host",
    "Create": "sub",
    "Create_group": "sub",
    "Create_cart": "grid",
    "Get_name": "name",
    "Idup": "dup",
    "Free": "close",
    "Disconnect": "close",
    # torch.distributed
    "get_rank": "rank",
    "get_world_size": "size",
    "get_node_local_rank": "local_rank",
    "all_reduce_coalesced": "all_reduce_many",
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_object": "all_gather",
    "broadcast_object_list": "broadcast",
    "gather_object": "gather",
    "scatter_object_list": "scatter",
    "send_object_list": "send",
    "recv_object_list": "recv",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "monitored_barrier": "barrier",
    "new_group": "sub",
    "new_subgroups": "split_by_host",
    "split_group": "split",
    "destroy_process_group": "close",
}
"""Attributes of a communicator, without ``comm.``."""

_NO_WINDOWS = "pycoll has no windows (one-sided access)"
_NO_FILES = "pycoll has no parallel files"
_NO_ERRHANDLERS = "errors are always raised, as exceptions of Python"
_NO_TYPES = "an array is sent with its dtype, whatever its strides are"


def _each(*groups: tuple[str, str]) -> dict[str, str]:
    """Return sentences by name, from (names, sentence)."""
    return {name: sentence for names, sentence in groups for name in names.split()}


_NEIGHBOR = ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw")

ABSENT_FROM_COMMUNICATORS = _each(
    ("Iagree Ishrink", "comm.agree() and comm.shrink() return when all living ranks have come"),
    (
        "Get_failed Ack_failed Is_revoked",
        "PeerFailed names the rank, comm.shrink() leaves out all that have failed",
    ),
    ("Win_create Win_allocate", _NO_WINDOWS),
    (
        "Spawn Spawn_multiple Connect Accept Join Get_parent",
        "the ranks of a job are there from its start; pycoll.Pool starts ranks for a script",
    ),
    (
        " ".join(f"{n}_{name}" for n in ["Neighbor", "Ineighbor", "neighbor"] for name in _NEIGHBOR)
        + " Create_graph Create_dist_graph Create_dist_graph_adjacent",
        "use comm.isend and comm.irecv, for neighbors in a grid with grid.shift",
    ),
    ("Create_intercomm Is_inter Is_intra Merge", "pycoll has no inter-communicators"),
    ("Get_errhandler Set_errhandler Call_errhandler", _NO_ERRHANDLERS),
    ("Attach_buffer Detach_buffer Flush_buffer Iflush_buffer", "bsend needs no buffer"),
    ("Psend_init Precv_init", "pycoll has no partitioned messages; use comm.persistent.send"),
    ("Get_attr Set_attr Delete_attr Get_info Set_info", "a communicator has no attributes"),
    ("Set_name", "a communicator is named when it is made: comm.dup(name=...)"),
    ("py2f f2py", "there is no MPI underneath"),
)
"""What a communicator of others has, and pycoll's has not: what is said of it."""

OF_GRIDS = {
    "dims": "shape",
    "dim": "shape",
    "ndim": "shape",
    "periods": "periodic",
    "Get_coords": "coords_of",
    "Get_cart_rank": "rank_at",
    "Get_topo": "shape",
    "Get_dim": "shape",
    "Sub": "axis",
}

OF_REQUESTS = {
    "is_completed": "test",
    "waitall": "pycoll.wait_all",
    "Waitall": "pycoll.wait_all",
    "waitany": "pycoll.wait_any",
    "Waitany": "pycoll.wait_any",
    "waitsome": "pycoll.wait_some",
    "Waitsome": "pycoll.wait_some",
    "testall": "pycoll.test_all",
    "Testall": "pycoll.test_all",
    "testany": "pycoll.wait_any",
    "Testany": "pycoll.wait_any",
    "testsome": "pycoll.wait_some",
    "Testsome": "pycoll.wait_some",
    "Get_status": "test",
    "get_status": "test",
}

ABSENT_FROM_REQUESTS = _each(
    ("Free", "a request is given up by itself, when nobody keeps it"),
)

OF_MESSAGES: dict[str, str] = {}
"""Of a message that a matched probe has found: what mpi4py merely spells in another way."""

OF_STATUSES = {
    "Get_source": "source",
    "Get_tag": "tag",
    "Get_count": "count",
    "Get_elements": "count",
}

_TORCH = (
    "PyTorch's, after torch.distributed.init_process_group('pycoll'); or by hand "
    "comm.all_reduce_many(gradients, op='avg')"
)

_MPI_OPERATORS = "SUM PROD MIN MAX LAND LOR LXOR BAND BOR BXOR MINLOC MAXLOC"

OF_PYCOLL = {
    "COMM_WORLD": "pycoll.init()",
    "COMM_SELF": "comm.sub([comm.rank])",
    "MPI": "pycoll.init(), which returns the communicator of all ranks",
    "Init": "pycoll.init()",
    "Init_thread": "pycoll.init()",
    "Is_initialized": "pycoll.init(), which may be called again",
    "is_initialized": "pycoll.init(), which may be called again",
    "init_process_group": "pycoll.init()",
    "Finalize": "pycoll.finalize()",
    "destroy_process_group": "pycoll.finalize()",
    "Compute_dims": "pycoll.compute_dims",
    "IN_PLACE": "out=x",
    "UNDEFINED": "color=None",
    "COMM_NULL": "None",
    "COMM_TYPE_SHARED": "comm.split_by_host()",
    "Comm": "pycoll.Communicator",
    "Intracomm": "pycoll.Communicator",
    "Cartcomm": "pycoll.Grid",
    "Prequest": "pycoll.Request",
    "Group": "comm.sub(ranks) and comm.members",
    "Exception": "pycoll.Error",
    "Get_version": "pycoll.__version__",
    "Get_library_version": "pycoll.__version__",
    "MPIPoolExecutor": "pycoll.Pool",
    **{name: f'op="{name.lower()}"' for name in _MPI_OPERATORS.split()},
    "ReduceOp": 'the name of the operator, for example op="sum"',
    "P2POp": "comm.isend and comm.irecv",
    "batch_isend_irecv": "comm.isend and comm.irecv",
    "DistributedDataParallel": _TORCH,
    "DDP": _TORCH,
    "FullyShardedDataParallel": _TORCH,
    "FSDP": _TORCH,
    "Wtime": "time.perf_counter()",
    "Get_processor_name": "socket.gethostname()",
}
"""Attributes of the module: what to write."""

ABSENT_FROM_PYCOLL = _each(
    ("Win", _NO_WINDOWS),
    ("File", _NO_FILES),
    ("Intercomm", "pycoll has no inter-communicators"),
    ("ERRORS_RETURN ERRORS_ARE_FATAL Errhandler", _NO_ERRHANDLERS),
    (
        "Datatype BYTE CHAR BOOL C_BOOL SHORT INT LONG LONG_LONG UNSIGNED UNSIGNED_LONG FLOAT "
        "DOUBLE COMPLEX C_FLOAT_COMPLEX C_DOUBLE_COMPLEX DOUBLE_COMPLEX INT8_T INT16_T INT32_T "
        "INT64_T UINT8_T UINT16_T UINT32_T UINT64_T DOUBLE_INT FLOAT_INT",
        _NO_TYPES,
    ),
)
"""What the module of others has, and pycoll has not: what is said of it."""

SUBMODULES = (
    "dask",
    "mpi4py_like",
    "parallel",
    "ray",
    "schedule",
    "schedules",
    "simulate",
    "torch",
)
"""Public modules that `import pycoll` does not import."""

METHODS = (
    "abort",
    "all_gather",
    "all_gatherv",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "all_to_allv",
    "allreduce",
    "barrier",
    "broadcast",
    "bsend",
    "dup",
    "explain",
    "exscan",
    "gather",
    "gatherv",
    "grid",
    "ibsend",
    "improbe",
    "iprobe",
    "irecv",
    "isend",
    "issend",
    "members",
    "mprobe",
    "probe",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "share",
    "size",
    "split",
    "split_by_host",
    "ssend",
    "sub",
)
"""Of a communicator, which elsewhere are functions of a module."""

OF_OPERATORS = {
    "add": "sum",
    "total": "sum",
    "product": "prod",
    "mul": "prod",
    "multiply": "prod",
    "minimum": "min",
    "maximum": "max",
    "mean": "avg",
    "average": "avg",
    "bitwise_and": "band",
    "bitwise_or": "bor",
    "bitwise_xor": "bxor",
    "and": "land",
    "or": "lor",
    "xor": "lxor",
    "logical_and": "land",
    "logical_or": "lor",
    "logical_xor": "lxor",
    "all": "land",
    "any": "lor",
    "argmax": "maxloc",
    "argmin": "minloc",
}
"""Operators, in lower case."""

OF_UNEVEN_BLOCKS = {
    "gather": "comm.gatherv(x)",
    "all_gather": "comm.all_gatherv(x)",
    "scatter": "comm.scatterv(numpy.array_split(x, comm.size))",
    "reduce_scatter": "comm.reduce_scatterv(x, counts)",
    "all_to_all": "comm.all_to_allv(list of arrays)",
}
"""Collectives of blocks of one shape, and how to write them for any."""


class Foreign:
    """An attribute that there is not: its AttributeError names ours, and `hasattr` is False.

    Instead of `__getattr__`, which makes every other attribute slower to find.
    """

    def __init__(self, owner: type, name: str, said: str) -> None:
        self._name = name
        self._text = f"{owner.__name__!r} object has no attribute {name!r}: {said}"

    def __get__(self, instance: object, owner: type) -> Any:
        try:
            # With obj Python would look for names that are spelled alike, and propose one, too.
            raise AttributeError(self._text, name=self._name, obj=None)
        except AttributeError as exc:
            exc.__traceback__ = None  # as `edge.hide`: the caller's line is the last one shown
            raise


class _Quiet(type):
    """The type of `Hinting` classes: `dir` and `help` do not show their foreign words."""

    def __dir__(cls) -> list[str]:
        return _without_foreign(cls, super().__dir__())


class Hinting(metaclass=_Quiet):
    """A class that answers words of other libraries with its own.

    Args:
        foreign: words, and ours; those that mpi4py merely spells in another way are found.
        prefix: what stands in front of ours.
        absent: words for what there is not, and what is said of it.
        shown_as: the public name of a class that users know by that alone.
    """

    __slots__ = ()

    def __init_subclass__(
        cls,
        foreign: Mapping[str, str] | None = None,
        prefix: str = "",
        absent: Mapping[str, str] | None = None,
        shown_as: str = "",
    ) -> None:
        super().__init_subclass__()
        if shown_as:
            cls.__name__ = cls.__qualname__ = shown_as
            if cls.__module__.startswith("pycoll._"):
                cls.__module__ = "pycoll"
        if foreign is None:
            return
        methods = [name for name in dir(cls) if not name.startswith("_")]
        said = dict(absent or {})
        for name, ours in (_of_mpi4py(methods) | dict(foreign)).items():
            said[name] = f"use {ours if ours.startswith('pycoll.') else prefix + ours}"
        for name, text in said.items():
            if not hasattr(cls, name):
                setattr(cls, name, Foreign(cls, name, text))

    def __dir__(self) -> list[str]:
        return _without_foreign(type(self), super().__dir__())


def _without_foreign(cls: type, names: Iterable[str]) -> list[str]:
    foreign = {n for base in cls.__mro__ for n, v in vars(base).items() if isinstance(v, Foreign)}
    return [name for name in names if name not in foreign]


def _of_mpi4py(methods: Sequence[str]) -> dict[str, str]:
    """Return mpi4py's words for those of these methods that it merely spells in another way."""
    words: dict[str, str] = {}
    for method in reversed(methods):  # all_reduce comes before allreduce
        joined = method.replace("_", "")
        spellings = (joined.capitalize(), method.capitalize())
        words |= dict.fromkeys((joined, *spellings), method)
        if f"i{method}" in methods:
            words |= {f"{spelling}_init": f"persistent.{method}" for spelling in spellings}
    return words


def of_module(name: str) -> str:
    """Return what is said of ``pycoll.name``, which there is not; "": not known."""
    if name in SUBMODULES:
        return f"write import pycoll.{name}"
    if name in ABSENT_FROM_PYCOLL:
        return ABSENT_FROM_PYCOLL[name]
    if name in OF_PYCOLL:
        return f"use {OF_PYCOLL[name]}"
    if name in OF_REQUESTS and OF_REQUESTS[name].startswith("pycoll."):
        return f"use {OF_REQUESTS[name]}"
    ours = name if name in METHODS else OF_COMMUNICATORS.get(name)
    return f"use comm.{ours}, where comm = pycoll.init()" if ours else ""


def of_collective(name: str, ours: Iterable[str]) -> str:
    """Return which of our collectives is probably meant; "": not known."""
    plain = name.lower().replace("_", "")
    alike = [known for known in ours if known.replace("_", "") == plain]
    other = OF_COMMUNICATORS.get(name, "")
    return alike[0] if alike else other if other in ours else ""


def of_operator(op: object, ours: Sequence[str]) -> str:
    """Return which of our operators is probably meant; "": not known."""
    import difflib

    name = op if isinstance(op, str) else getattr(op, "__name__", getattr(op, "name", str(op)))
    word = str(name).rpartition(".")[2].lower().removeprefix("mpi_")
    close = difflib.get_close_matches(OF_OPERATORS.get(word, word), ours, 1)
    return close[0] if close else ""
