"""Calls as other libraries write them: what is said of their arguments.

Who passes mpi4py's or torch.distributed's arguments to a function of pycoll gets an error that
says how the call is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

OF_ARGUMENTS = {
    "buf": ("x", "out"),
    "commute": ("commutative",),
    "data": ("x",),
    "dst": ("dest", "root"),
    "dest": ("root",),
    "direction": ("axis",),
    "dims": ("shape", "ndims"),
    "disp": ("n",),
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
    "nnodes": ("n",),
    "periods": ("periodic",),
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

_GROUP = "call the method of that group's communicator, which comm.split or comm.sub made"
_STATUS = "{name} returns a Status, as in status = comm.{name}(source, tag)"
_MESSAGE = "{name} returns a Message, whose Status is message.status"

OF_KEYWORDS = {
    "group": _GROUP,
    "comm": _GROUP,
    "explain(algorithm": "it says which one is chosen; PYCOLL_ALGORITHM=all_reduce:ring chooses "
    "another",
    "probe(status": _STATUS,
    "iprobe(status": _STATUS,
    "mprobe(status": _MESSAGE,
    "improbe(status": _MESSAGE,
    "bufsize": "leave it out: a receive needs no buffer",
    "reorder": "leave it out: ranks keep their numbers",
    "axis(remain_dims": "pass the numbers or names of the axes that vary: grid.axis(0)",
}
"""Parameters, of some functions: what is said of them."""

_NEVER_ARRAYS = {"source", "tag", "dest", "sendtag", "recvtag", "root", "op"}
"""Parameters behind which mpi4py's programs look for the array that is to be filled."""


def of_arguments(
    exc: Exception,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> str:
    """Return what to say of a call whose arguments do not fit a function's parameters.

    Args:
        exc: what Python, or pycoll, raised.
        function: the public one; the one that was called in the end may be another.
        args, keywords: of the call.

    Returns:
        "" if that is not what has happened.
    """
    import re

    name = function.__name__
    if half_ported := _half_ported(function, args, keywords or {}):
        return half_ported
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

    text = OF_KEYWORDS.get(f"{name}({word}") or OF_KEYWORDS.get(word)
    if text:
        return text.format(name=name)
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


def _half_ported(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> str:
    """Return what to say where mpi4py's arguments stand in its order; "": they do not."""
    import inspect
    from itertools import zip_longest

    name, parameters = function.__name__, list(inspect.signature(function).parameters)
    for parameter, value in zip_longest(parameters[: len(args)], args, fillvalue=""):
        if type(value).__name__ == "InPlaceType" and "out" in parameters:
            y = "y[comm.rank]" if name.endswith("all_gather") else "y"
            return f"in place, x and out are the same array: {_form(function, parameters, y)}"
        if type(value).__name__ == "Status" and parameter != "status":
            if "status" in parameters:
                return f"a Status is passed by its name: comm.{name}(..., status=status)"
            text = OF_KEYWORDS.get(f"{name}(status", "")
            return text.format(name=name)
        if parameter not in _NEVER_ARRAYS or "out" not in parameters:
            continue
        if _is_array(value) or (value is None and parameter == "source"):
            what = "an array" if value is not None else "None"
            form = _form(function, parameters)
            return f"{parameter} is {what}. The array to fill is called out: {form}"
    return ""


def _form(function: Callable[..., Any], parameters: Sequence[str], x: str = "x") -> str:
    """Return how a call is written that fills an array."""
    shown = [
        x if parameter == "x" else parameter
        for parameter in parameters[: parameters.index("out")]
        if parameter not in ("self", "sendtag", "recvtag")
    ]
    method = function.__qualname__.replace("Communicator.", "comm.").replace("Grid.", "grid.")
    return f"{method}({', '.join([*shown, 'out=y'])})"


def _is_array(value: Any) -> bool:
    """Whether a value is an array of any library, or mpi4py's list that begins with one."""
    if isinstance(value, list | tuple):
        return bool(value) and _is_array(value[0])
    if isinstance(value, memoryview | bytearray) or hasattr(value, "typecode"):
        return True
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return not isinstance(value, type) and is_array and getattr(value, "ndim", 1) != 0


def of_buffer_form(x: Sequence[Any]) -> str:
    """Return what to say of mpi4py's [array, count, type], which would be sent as a list.

    Args:
        x: two to four items, an array first.

    Returns:
        "" for a list of another kind, as an array and a text.
    """
    array, last = x[0], x[-1]
    is_type = type(last).__module__.startswith("mpi4py") and "Datatype" in type(last).__name__
    if isinstance(last, str) and len(x) > 2 and all(_is_count(count) for count in x[1:-1]):
        try:
            is_type = bool(array.dtype == last)  # as NumPy compares: also with "d", or "f8"
        except TypeError:
            is_type = False
    if not is_type:
        return ""
    return (
        "this list is mpi4py's [array, count, type]: pass the array itself, or a part of it as "
        "x[:count]. A tuple is sent as it is"
    )


def _is_count(value: Any) -> bool:
    return value is None or isinstance(value, int | list | tuple) or hasattr(value, "dtype")
