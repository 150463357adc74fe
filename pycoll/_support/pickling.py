"""Pickling functions and classes with their code, by cloudpickle: the names of files stay.

From 3.1.3 on cloudpickle takes them out of the code, and a traceback would show no line of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def _make_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def reduce_code(code: CodeType, file: str = "") -> tuple[Any, ...]:
    """Return what pickles code, of another file if one is given."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (make, arguments, file or code.co_filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """That of cloudpickle, which keeps the names of files."""

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child(
        {CodeType: reduce_code}
    )


def dumps(value: object) -> bytes:
    """Return a value as bytes, for `pickle.loads` where pycoll can be imported."""
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return file.getvalue()
