"""The words of other libraries, and what they are called here.

Who writes mpi4py's, torch.distributed's or NumPy's word gets an error that names pycoll's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

OF_COMMUNICATORS = {
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

OF_GRIDS = {
    "Get_coords": "coords",
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
}

OF_MESSAGES: dict[str, str] = {}
"""Of a message that a matched probe has found: what mpi4py merely spells in another way."""

OF_STATUSES = {
    "Get_source": "source",
    "Get_tag": "tag",
    "Get_count": "count",
    "Get_elements": "count",
}

_TORCH = (
    "PyTorch's with gloo, which runs unchanged under pycoll-run (pycoll is no backend of "
    "torch.distributed yet); or by hand comm.all_reduce_many(gradients, op='avg')"
)

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
    "ReduceOp": 'the name of the operator, for example op="sum"',
    "P2POp": "comm.isend and comm.irecv",
    "batch_isend_irecv": "comm.isend and comm.irecv",
    "DistributedDataParallel": _TORCH,
    "DDP": _TORCH,
    "FullyShardedDataParallel": _TORCH,
    "FSDP": _TORCH,
    "torch": _TORCH,
    "Wtime": "time.perf_counter()",
    "Get_processor_name": "socket.gethostname()",
}
"""Attributes of the module: what to write."""

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
    "exscan",
    "gather",
    "gatherv",
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
    "size",
    "split",
    "ssend",
)
"""Of a communicator, which elsewhere are functions of a module."""

OF_ARGUMENTS = {
    "buf": ("x", "out"),
    "comm": (),
    "data": ("x",),
    "dst": ("dest", "root"),
    "dest": ("root",),
    "group": (),
    "group_dst": ("dest", "root"),
    "group_src": ("source", "root"),
    "input": ("x",),
    "input_list": ("xs", "x"),
    "input_tensor": ("x",),
    "input_tensor_list": ("xs", "x"),
    "np": ("n",),
    "nproc": ("n",),
    "nprocs": ("n",),
    "num_ranks": ("n",),
    "obj": ("x",),
    "object": ("x",),
    "object_list": ("x",),
    "output": ("out",),
    "output_tensor": ("out",),
    "recvbuf": ("out",),
    "recvobj": ("out",),
    "scatter_list": ("x",),
    "sendbuf": ("x", "xs"),
    "sendobj": ("x", "xs"),
    "sendobjs": ("xs", "x"),
    "source": ("root",),
    "src": ("source", "root"),
    "tensor": ("x", "out"),
    "tensors": ("xs",),
    "value": ("x",),
}
"""Parameters: those of ours that may be meant, the first that the function has."""

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

    def __init__(self, owner: type, name: str, ours: str) -> None:
        self._name = name
        self._text = f"{owner.__name__!r} object has no attribute {name!r}: use {ours}"

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
    """

    __slots__ = ()

    def __init_subclass__(cls, foreign: Mapping[str, str] | None = None, prefix: str = "") -> None:
        super().__init_subclass__()
        if foreign is None:
            return
        methods = [name for name in dir(cls) if not name.startswith("_")]
        for name, ours in (_of_mpi4py(methods) | dict(foreign)).items():
            if not hasattr(cls, name):
                text = ours if ours.startswith("pycoll.") else f"{prefix}{ours}"
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
    """Return what to write for ``pycoll.name``, which there is not; "": not known."""
    if name in OF_PYCOLL:
        return OF_PYCOLL[name]
    ours = name if name in METHODS else OF_COMMUNICATORS.get(name)
    return f"comm.{ours}, where comm = pycoll.init()" if ours else ""


def as_shown(*calls: str) -> tuple[str, ...]:
    """Return calls that differ without their checksums of what is passed, if these tell nothing."""
    import re

    plain = tuple(re.sub(r" checksum [0-9a-f]{8},", "", call) for call in calls)
    return plain if len({call.partition(" at ")[0] for call in plain}) > 1 else calls


def advice(mine: str, theirs: str) -> str:
    """Return what to do about two ranks' calls, as text, that differ."""
    import re

    form = r"(i?)(\w+)\((?:([^\[(),=]*)(\[[^\]]*\])?(?=[,)]))?,? ?(.*?)\)(?: at [^)]*)?"
    one, other = (re.fullmatch(form, call) for call in (mine, theirs))
    if one is None or other is None or one[2] != other[2]:
        return "Make the same calls in the same order on all ranks."
    (kind, name, dtype, shape, more), (other_kind, _, other_dtype, other_shape, rest) = (
        one.groups(),
        other.groups(),
    )
    if name == "all_reduce_many" and (kind, more.rpartition("op=")[2]) == (
        other_kind,
        rest.rpartition("op=")[2],
    ):
        return (
            "Pass as many arrays, of the same dtypes and shapes in the same order, on all ranks; "
            "zeros where a gradient is missing."
        )
    if kind != other_kind:
        return (
            f"A nonblocking call belongs to nonblocking ones: call {name} on all ranks, or i{name} "
            "on all."
        )
    same_value = (dtype, shape) == (other_dtype, other_shape)
    if more != rest:
        differs = _the_one_that_differs(more, rest) if same_value else ""
        same = f"Pass the same {differs} on all ranks, in" if differs else "Make"
        return f"{same} the same calls in the same order{'' if differs else ' on all ranks'}."
    if same_value:
        return "What they pass differs in dtype or shape: pass the same of both on all ranks."
    if "object" in (dtype, other_dtype):
        return "Pass an array or a number on all ranks, or another Python object on all."
    if dtype != other_dtype:
        example = ""
        if all(re.fullmatch(r"(bool|u?int|float)\d*", each) for each in (dtype, other_dtype)):
            convert = "float(x)" if shape == other_shape == "[]" else 'x.astype("float64")'
            example = f", for example {convert}"
        return f"The dtypes differ: pass one dtype on all ranks{example}."
    if name in OF_UNEVEN_BLOCKS:
        return f"Arrays whose shapes differ from rank to rank: {OF_UNEVEN_BLOCKS[name]}."
    return "The shapes differ: pass arrays of one shape on all ranks."


def _the_one_that_differs(mine: str, theirs: str) -> str:
    """Return which argument alone differs between two lists like "op=sum, root=0"; "": none."""
    one, other = ([part.partition("=") for part in text.split(", ")] for text in (mine, theirs))
    if [part[:2] for part in one] != [part[:2] for part in other]:
        return ""
    names = [part[0] for part, its in zip(one, other, strict=True) if part != its]
    return names[0] if len(names) == 1 else ""


def of_operator(op: object, ours: Sequence[str]) -> str:
    """Return which of our operators is probably meant; "": not known."""
    import difflib

    name = op if isinstance(op, str) else getattr(op, "__name__", getattr(op, "name", str(op)))
    word = str(name).rpartition(".")[2].lower().removeprefix("mpi_")
    close = difflib.get_close_matches(OF_OPERATORS.get(word, word), ours, 1)
    return close[0] if close else ""


def of_arguments(exc: Exception, function: Callable[..., Any]) -> str:
    """Return what to say of a call whose arguments do not fit a function's parameters.

    Args:
        exc: what Python raised.
        function: the public one; the one that was called in the end may be another.

    Returns:
        "" if that is not what has happened.
    """
    import re

    name = function.__name__
    said = re.fullmatch(r"(?:\w+\.)*(\w+)\(\) ((?:got|missing|takes) .*)", str(exc))
    if said is None or said[1] not in (name, name.removeprefix("i")):
        return ""
    text = f"{function.__qualname__}() {said[2]}"
    keyword = re.match(r"got an unexpected keyword argument '(\w+)'", said[2])
    if keyword is None:
        return text
    return f"{text.partition('. Did you mean')[0]}: {_of_keyword(keyword[1], name, function)}"


def _of_keyword(word: str, name: str, function: Callable[..., Any]) -> str:
    import difflib
    import inspect

    if word in ("group", "comm"):
        return "call the method of that group's communicator, which comm.split or comm.sub made"
    if name == "explain" and word == "algorithm":
        return "it says which one is chosen; PYCOLL_ALGORITHM=all_reduce:ring chooses another"
    if word == "async_op":
        return f"use comm.i{name}, which returns a Request" if name[0] != "i" else "leave it out"
    parameters = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.kind is not each.VAR_POSITIONAL
    ]
    meant = [ours for ours in OF_ARGUMENTS.get(word, ()) if ours in parameters]
    meant = meant or difflib.get_close_matches(word, parameters, 1)
    if name == "run" and not meant:
        return "what fn takes stands behind n: pycoll.run(fn, n, x, y)"
    known = ", ".join(parameter for parameter in parameters if parameter != "self")
    return f"use {meant[0]}" if meant else f"there are {known}"
