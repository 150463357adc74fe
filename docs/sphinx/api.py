"""The pages of the API reference: which name stands on which; what they say is in docstrings."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

from conf import autodoc_mock_imports

import pycoll

TITLES = {
    "starting": ("Starting and ending", "init join finalize run Pool usable_cores"),
    "requests": ("Requests", "Request wait_all wait_any wait_some test_all"),
    "messages": ("Messages", "Status Message ANY_SOURCE ANY_TAG PROC_NULL"),
    "grids": ("Grids of ranks", "Grid compute_dims"),
    "operators": ("Operators", "Op"),
    "shared_arrays": ("Arrays in shared memory", "empty zeros empty_like share_arrays"),
    "algorithms": (
        "Functions about algorithms",
        "algorithms show register_algorithm prove Counters",
    ),
    "errors": (
        "Exceptions",
        "Error BootstrapError PeerFailed Revoked OperationTimeout MismatchError TruncationError"
        " TransportError ProofError",
    ),
}
"""Pages with names of `pycoll`; `communicator` has a page that is made otherwise."""

RETURNED = {
    "requests": (
        "pycoll._requests.nonblocking.Persistent",
        "pycoll._requests.core_requests.PersistentRequest",
    ),
    "algorithms": ("pycoll._calls.explain.Explanation", "pycoll._drawing.show.Drawing"),
}
"""Classes that users meet as results, on the page of what returns them."""

DATA = {
    "ANY_SOURCE": "In place of a source: a message from any rank.",
    "ANY_TAG": "In place of a tag: a message with any tag.",
    "PROC_NULL": "In place of a rank: nobody. Sending to it and receiving from it does nothing.",
    "PIPELINE_SCHEDULES": "By name, each `PipelineSchedule` that pycoll brings.",
    "ONE_HOST": "Ranks that share a machine, roughly: a `Network` to compare with.",
}
"""What values mean that have no docstring of their own."""

MODULES = {
    "parallel": "",
    "mpi4py_like": "",
    "ray": "run",
    "dask": "run",
    "torch": "",
    "schedule": "Send Recv Reduce Copy recv_reduce Schedule compile_schedule chunks_of",
    "schedules": "Algorithm names find schedule steps_of cost_of",
    "simulate": "simulate Network Link ONE_HOST Timing",
}
"""Modules, each with the names that programs use; "": those of its `__all__`."""

SECOND = ("pycoll.mpi4py_like.Status",)
"""No target of links: in signatures these names mean those of `pycoll`."""

PARTS = {
    "Collectives": "Collectives",
    "PointToPoint": "Sending and receiving",
    "NonBlocking": "Calls that go on while you compute",
    "Communicator": "Groups of ranks, and this communicator",
    "Recovery": "Ending, and going on without ranks that have failed",
}
"""The classes that a communicator is made of, as parts of its page."""

CURRENT = ".. py:currentmodule:: pycoll\n"

TYPES = """
Types in signatures
-------------------

=============  ==================================================================================
``T``          any value; what comes back is of the same kind
``A``          an array, of NumPy or another library
``Reducer``    an operator's name, such as ``"sum"``, an `Op`, or a function of two values
``MaybeNone``  None on some ranks: on which, the docstring says
=============  ==================================================================================
"""


def heading(title: str, line: str = "=") -> str:
    """A heading of reStructuredText."""
    return f"{title}\n{line * len(title)}\n"


def members(cls: type) -> list[str]:
    """What a class has for its users, in the order of the source.

    Built-in methods, constants, and fields of a named tuple, which its docstring explains, are
    left out.
    """
    own = (base for base in cls.__mro__ if base.__module__ != "builtins")
    fields = getattr(cls, "_fields", ())
    return [
        name
        for base in own
        for name, value in vars(base).items()
        if name[0] != "_" and name in dir(cls) and name not in fields
        if not isinstance(value, type)
    ]


def entry(name: str, with_members: bool = True) -> str:
    """The directive for a name, by its full path."""
    module, _, last = name.rpartition(".")
    value = getattr(import_module(module), last)
    if isinstance(value, type):
        kind = "exception" if issubclass(value, Exception) else "class"
        names = ", ".join(members(value))
        shown = f"   :members: {names}\n" if with_members and names else ""
        shown += "   :no-index:\n" if name in SECOND else ""
        return f".. auto{kind}:: {name}\n{shown}"
    if inspect.isroutine(value):
        return f".. autofunction:: {name}\n"
    return f".. py:data:: {name}\n\n   {DATA[last]}\n"


def communicator() -> str:
    """The page of the class with the most methods, part by part."""
    page = [heading("Communicator"), CURRENT, entry("pycoll.Communicator", with_members=False)]
    classes = {cls.__name__: cls for cls in pycoll.Communicator.__mro__}
    for part, title in PARTS.items():
        page.append(heading(title, "-"))
        for name, value in vars(classes[part]).items():
            if not name.startswith("_") and name in dir(pycoll.Communicator):
                kind = "method" if inspect.isroutine(value) else "attribute"
                page.append(f".. auto{kind}:: pycoll.Communicator.{name}\n")
    return "\n".join([*page, TYPES])


def named() -> set[str]:
    """The names of `pycoll` that are on a page."""
    return {"Communicator"}.union(*(names.split() for _, names in TITLES.values()))


def pages() -> dict[str, str]:
    """All pages of the reference by name, in order."""
    made = {"starting": "", "communicator": communicator()}
    for page, (title, names) in TITLES.items():
        full = [*(f"pycoll.{name}" for name in names.split()), *RETURNED.get(page, ())]
        made[page] = "\n".join([heading(title), CURRENT, *map(entry, full)])
    for name, names in MODULES.items():
        title = f"pycoll.{name}"
        listed = names.split() or import_module(title).__all__
        directives = [entry(f"{title}.{one}") for one in listed]
        made[name] = "\n".join([heading(title), f".. automodule:: {title}\n", *directives])
    return made


def write(to: Path) -> list[str]:
    """Write the pages to a folder, and return their names."""
    from sphinx.ext.autodoc.mock import mock

    with mock(autodoc_mock_imports):
        made = pages()
    to.mkdir(parents=True)
    for name, text in made.items():
        (to / f"{name}.rst").write_text(text, encoding="utf-8")
    return list(made)
