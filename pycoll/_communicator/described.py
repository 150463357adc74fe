"""What a record says of a call: its arguments, its number, its algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll._calls import explain
from pycoll._trace.records import ABSENT, Recorder
from pycoll._transports._core import KINDS
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._calls.group import Group

_EXPLAINED = 1024  # different calls of a communicator whose algorithm is looked up
_BYTES_OF = {bool: 1, int: 8, float: 8, complex: 16}
_DTYPE_OF = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_OF_BLOCKS = frozenset({"scatter", "reduce_scatter", "all_to_all"})
_UNKNOWN = None, ABSENT, ABSENT, ABSENT, ABSENT, None, None, None
_REAL = inspect.Parameter.empty

Picked = tuple[Any, Any, Any, Any, Any, Any, Any, Any]
"""The arguments that records tell of: value, peer or root, source, tag, receive tag, operator,
algorithm, status. What a method does not have is ABSENT, or None."""


def picker(method: Callable[..., Any]) -> Callable[..., Picked]:
    """Return a function that takes the arguments of a method and returns those to tell of.

    It is made as source with the method's own parameters, so that Python binds them as quickly as
    those of the method itself.
    """
    parameters = list(inspect.signature(method).parameters.values())[1:]  # without self
    names = {each.name for each in parameters}
    defaults = {f"_{each.name}": each.default for each in parameters}
    listed, star = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not star:
            star = True
            listed.append("*")
        listed.append(f"{each.name}=_{each.name}" if each.default is not _REAL else each.name)
    receives = "source" in names

    def first(default: str, *wanted: str) -> str:
        return next((name for name in wanted if name in names), default)

    tag = () if receives else ("tag",)
    passed = [
        first("None", "x", "xs"),
        first("_ABSENT", "dest", "root"),
        first("_ABSENT", "source"),
        first("_ABSENT", "sendtag", *tag),
        first("_ABSENT", "recvtag", *(("tag",) if receives else ())),
        first("None", "op"),
        first("None", "algorithm"),
        first("None", "status"),
    ]
    source = f"lambda {', '.join(listed)}: ({', '.join(passed)})"
    made: Callable[..., Picked] = eval(source, {**defaults, "_ABSENT": ABSENT})
    return made


def picked(pick: Callable[..., Picked], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked:
    """Return the arguments of a call to tell of."""
    try:
        return pick(*args, **kwargs)
    except TypeError:  # the call itself says what is wrong
        return _UNKNOWN


def nbytes_of(x: Any) -> int:
    """Return the bytes of a value, or of all in a list; -1: it is pickled, or there is none."""
    kind = type(x)
    if x is None:
        return -1
    if kind in _BYTES_OF:
        return _BYTES_OF[kind]
    if kind is list or kind is tuple:
        each = [nbytes_of(one) for one in x]
        return sum(each) if each and min(each) >= 0 else -1
    try:
        nbytes = x.nbytes
    except Exception:  # whatever a user's object raises that has a property of this name
        return -1
    return nbytes if type(nbytes) is int else -1


def number_of(value: Any) -> int:
    """Return a rank or a tag; ABSENT: it is none."""
    return value if type(value) is int and -(2**31) <= value < 2**31 else ABSENT


CallKind = tuple[str, bool, int, Any, Any]
"""What an algorithm depends on: collective, whether it blocks, bytes, dtype, operator."""


class Place:
    """A communicator as its records name it, and the algorithms of its calls.

    Attributes:
        communicator: the number of the string that describes it.
        algorithms: those that were looked up, as numbers of strings.
    """

    def __init__(self, group: Group, recorder: Recorder) -> None:
        self._context, self._shm = group.context, group.shm
        self._recorder = recorder
        members = ",".join(map(str, group.members))
        text = f"{group.context.ident}\0{group.name}\0{members}"
        self.communicator = recorder.number_of(text)
        self.size = group.size
        self.algorithms: dict[CallKind, int] = {}

    @property
    def next_call(self) -> int:
        """Number of the next collective call."""
        core: Any = self._context.core
        number: int = core.next_call
        return number + self._shm.number if self._shm is not None else number

    def explain(self, group: Group, call: CallKind) -> int:
        """Find out what a call of arrays runs; returns the number of a string, 0: not known."""
        if len(self.algorithms) >= _EXPLAINED:
            return 0
        name, blocking, nbytes, dtype, op = call
        each = max(nbytes, 0) // (self.size if name in _OF_BLOCKS else 1)
        reduces = {} if op is None else {"op": op, "dtype": dtype}
        try:
            found = explain.explain(group.selector, name, each, blocking=blocking, **reduces)
        except (Error, TypeError, ValueError):  # the call itself says what is wrong
            known = 0
        else:
            known = self._recorder.number_of(found.algorithm)
        self.algorithms[call] = known
        return known

    def kind_of(self, name: str, blocking: bool, x: Any, nbytes: int, op: Any) -> CallKind | None:
        """Return what the algorithm of a call depends on; None: it is not looked up."""
        if name not in KINDS or (nbytes < 0 and name != "barrier"):
            return None
        return name, blocking, nbytes, _DTYPE_OF.get(type(x)) or getattr(x, "dtype", None), op
