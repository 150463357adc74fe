"""Builds pycoll: setuptools does, with a C compiler from PyPI where the machine has none.

The hooks of PEP 517 and PEP 660; pyproject.toml names this module and its command `BuildCore`.
They print nothing but warnings, and the last line of a failure says what to do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pycoll_compiler
from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError
from setuptools.extension import Extension

__all__ = [
    "BuildCore",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None


@contextlib.contextmanager
def _quiet(settings: Settings) -> Iterator[dict[str, Any]]:
    """Give the settings to setuptools, without its account of the build unless it is asked for."""
    given = dict(settings or {})
    if {"verbose", "--verbose"} & given.keys():
        yield given
        return
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield {**given, "quiet": "1"}
    finally:
        logging.disable(logging.NOTSET)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return what the build of a wheel needs, zig included where there is no compiler.

    Args:
        config_settings: as in PEP 517.
    """
    pycoll_compiler.refuse_free_threading()
    with _quiet(config_settings) as settings:
        theirs = build_meta.get_requires_for_build_wheel(settings)
    return [*theirs, *pycoll_compiler.requirements()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return what the build of an editable wheel needs, as for a wheel.

    Args:
        config_settings: as in PEP 660.
    """
    pycoll_compiler.refuse_free_threading()
    with _quiet(config_settings) as settings:
        theirs = build_meta.get_requires_for_build_editable(settings)
    return [*theirs, *pycoll_compiler.requirements()]


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the metadata and return the name of their folder.

    Args:
        metadata_directory: where it is put.
        config_settings: as in PEP 517.
    """
    with _quiet(config_settings) as settings:
        name: str = build_meta.prepare_metadata_for_build_wheel(metadata_directory, settings)
    return name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel and return its name.

    Args:
        wheel_directory: where it is put.
        config_settings: as in PEP 517.
        metadata_directory: what `prepare_metadata_for_build_wheel` has made.
    """
    pycoll_compiler.refuse_free_threading()
    with _quiet(config_settings) as settings:
        name: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel, and the core inside the checkout; return the wheel's name.

    Args:
        wheel_directory: where the wheel is put.
        config_settings: as in PEP 660.
        metadata_directory: what `prepare_metadata_for_build_editable` has made.
    """
    pycoll_compiler.refuse_free_threading()
    with _quiet(config_settings) as settings:
        name: str = build_meta.build_editable(wheel_directory, settings, metadata_directory)
    return name


class BuildCore(build_ext):  # type: ignore[misc,unused-ignore]
    """setuptools' build of an extension, with another compiler where its own is not there."""

    def run(self) -> None:
        """Build the core, or say why it cannot be built."""
        missing = pycoll_compiler.what_is_missing()
        if missing is not None:
            pycoll_compiler.refuse_to_build(missing)
        super().run()

    def build_extensions(self) -> None:
        """Choose the compiler; then as in setuptools."""
        if pycoll_compiler.own_compiler() is None:
            command = pycoll_compiler.command()
            assert command is not None
            # The flags of the compiler that Python was built with may mean nothing to this one.
            extra = {name: shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")}
            self.compiler.set_executables(
                compiler_so=[*command, "-DNDEBUG", "-fPIC", *extra["CFLAGS"]],
                linker_so=[*command, "-shared", *extra["CFLAGS"], *extra["LDFLAGS"]],
            )
            for cache in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
                os.environ.setdefault(cache, os.path.abspath(os.path.join(self.build_temp, "zig")))
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension.

        Args:
            ext: what pyproject.toml says of it.

        Raises:
            SystemExit: the compiler failed.
        """
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, OSError):
            raise SystemExit(
                f"pycoll: the compiled core was not built: {self.compiler.compiler_so[0]} failed,"
                " and says why above; correct CC and CFLAGS, or name another compiler (CC=gcc pip"
                " install ...)"
            ) from None
