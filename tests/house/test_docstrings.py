"""Every public object has a docstring, which names its parameters and no others."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import pycoll
from pycoll import mpi4py_like
from pycoll._calls.explain import Explanation
from pycoll._requests.core_requests import PersistentRequest
from pycoll._requests.nonblocking import Persistent

CLASSES = [
    *(value for value in map(pycoll.__getattr__, pycoll._HOMES) if isinstance(value, type)),
    *(Explanation, Persistent, PersistentRequest, mpi4py_like.Comm, mpi4py_like.Status),
]
COMMON = {"self", "timeout", "cls"}
"""Parameters that the docstring of the class explains for all methods."""


def members(cls: type) -> dict[str, Any]:
    """What a class has, also of the classes that are parts of it."""
    return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in pycoll.__all__:
        value = getattr(pycoll, name)
        if inspect.isfunction(value):
            yield name, value
    for cls in CLASSES:
        for name, value in members(cls).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                yield f"{cls.__name__}.{name}", value


FUNCTIONS = dict(public_functions())


def documented(text: str) -> list[str]:
    """The names in a section `Args:`."""
    if "Args:\n" not in text:
        return []
    section = re.split(r"\n\n|\Z", text.split("Args:\n", 1)[1])[0]
    names = re.findall(r"^ {4}(\w[\w, ]*): ", section, re.M)
    return [name for group in names for name in group.split(", ")]


def test_what_is_public_is_what_is_listed() -> None:
    assert sorted(pycoll.__all__, key=str.lower) == sorted(set(pycoll.__all__), key=str.lower)
    assert [name for name in dir(pycoll) if not name.startswith("__")] == sorted(pycoll.__all__)
    assert set(pycoll._HOMES) <= set(pycoll.__all__)
    for name in pycoll.__all__:
        assert getattr(pycoll, name) is not None
    star: dict[str, Any] = {}
    exec("from pycoll import *", star)
    assert set(star) - {"__builtins__"} == set(pycoll.__all__)


def test_every_public_object_has_a_docstring() -> None:
    values = {name: getattr(pycoll, name) for name in pycoll.__all__}
    named = {name: value for name, value in values.items() if not isinstance(value, int)}
    attributes = {
        f"{cls.__name__}.{name}": value
        for cls in CLASSES
        for name, value in members(cls).items()
        if not name.startswith("_") and isinstance(value, property)
    }
    for name, value in (named | attributes | FUNCTIONS).items():
        text = inspect.getdoc(value)
        assert text, name
        assert text[0].isupper() or name.startswith("pycoll"), name
        assert re.match(r"[^\n]+[.:]", text), f"{name}: the first line is a sentence"


def test_a_docstring_names_every_parameter_and_no_other() -> None:
    wrong = []
    for name, function in FUNCTIONS.items():
        text = inspect.getdoc(function) or ""
        parameters = [p for p in inspect.signature(function).parameters if p not in COMMON]
        listed = documented(text)
        if listed and [p for p in listed if p not in COMMON] != parameters:
            wrong.append(f"{name}: takes {parameters}, and the docstring names {listed}")
        as_another = re.search(r"[Aa]s `\w+`|The arguments are those of|as by `\w+`", text)
        missing = [p for p in parameters if f"`{p}`" not in text]
        if missing and not listed and not as_another:
            wrong.append(f"{name}: the docstring says nothing of {missing}")
    assert len(FUNCTIONS) > 100
    assert not wrong, "\n".join(wrong)


def test_what_docstrings_refer_to_exists() -> None:
    """A word in single backquotes is a public name, a parameter, or an attribute."""
    known = {*pycoll.__all__, *(name for cls in CLASSES for name in dir(cls))}
    for name, function in FUNCTIONS.items():
        parameters = set(inspect.signature(function).parameters)
        for word in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", inspect.getdoc(function) or ""):
            parts = word.removeprefix("pycoll.").split(".")
            assert parts[-1] in known | parameters or word in EXTRA, f"{name}: `{word}`"


EXTRA = {"pycoll.schedule.Send", "Recv", "Copy", "pycoll.schedules.Cost", "reason"}


def test_what_users_hold_is_named_as_they_import_it() -> None:
    comm = pycoll.init()
    x = np.ones(3)
    requests = [comm.isend(x, 0), comm.irecv(0), comm.iall_reduce(x), comm.isend("object", 0)]
    held = [comm, comm.dup(), comm.grid((1,)), *requests, comm.iprobe(0), comm.counters()]
    message = comm.mprobe(0)
    held += [pycoll.Op(lambda a, b: a + b), message]
    assert {f"{type(each).__module__}.{type(each).__qualname__}" for each in held} == {
        f"pycoll.{name}"
        for name in ("Communicator", "Grid", "Request", "Status", "Counters", "Op", "Message")
    }
    for name in pycoll._HOMES:
        value = getattr(pycoll, name)
        if hasattr(value, "__qualname__"):
            assert (value.__module__, value.__qualname__) == ("pycoll", name)
            assert pickle.loads(pickle.dumps(value)) is value
            source = ""  # none is better than another's
            with contextlib.suppress(OSError):
                source = inspect.getsource(value)
            assert name in source if inspect.isfunction(value) else source == ""
    message.recv()
