"""What `pycoll.parallel` has, and what it imports."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import pycoll.parallel


def modules_after(program: str) -> set[str]:
    text = f"import sys; {program}; print(*sys.modules)"
    command = [sys.executable, "-c", text]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_imports_neither_arrays_nor_the_runtime() -> None:
    modules = modules_after("import pycoll.parallel")
    assert not {"numpy", "torch", "pycoll._transports"} & modules
    assert {name for name in modules if name.startswith("pycoll.")} == {
        "pycoll.errors",
        "pycoll.parallel",
    }


@pytest.mark.parallel
def test_what_is_public_is_there_and_has_a_docstring() -> None:
    pytest.importorskip("torch")
    for name in pycoll.parallel.__all__:
        assert inspect.getdoc(getattr(pycoll.parallel, name)), name
    assert [name for name in dir(pycoll.parallel) if not name.startswith("__")] == sorted(
        pycoll.parallel.__all__
    )


def test_a_name_that_is_not_there_is_called_wrong() -> None:
    with pytest.raises(AttributeError, match=r"'pycoll\.parallel' has no attribute 'Server_'"):
        pycoll.parallel.Server_  # noqa: B018
