"""JAX's arrays on a GPU: every method, and what a compiled function is still computing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gpu_world import Library, every_method, jobs

Comm = Any

auto = jobs(())


def library(dtype: str) -> Library:
    device = jax.devices("gpu")[0]

    def get(x: Any) -> Any:
        assert (isinstance(x, jax.Array), x.dtype, x.devices()) == (
            True,
            jnp.dtype(dtype),
            {device},
        )
        return jax.device_get(x)

    return Library(lambda x: jax.device_put(jnp.asarray(x, dtype), device), get)


@auto
@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float32", "complex64"])
def test_every_method(ranks: Any, dtype: str) -> None:
    assert ranks(lambda comm: every_method(comm, library(dtype), 1000)) == [4 * 17] * 2


@auto
def test_what_is_being_computed_is_waited_for(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        @jax.jit
        def slow(x: Any) -> Any:
            return jax.lax.fori_loop(0, 200, lambda _, y: y @ y / 2048, x)

        x = library("float32").put(jnp.ones((2048, 2048)))
        total = comm.all_reduce(slow(x))
        assert bool((jax.jit(lambda y: y / comm.size)(total) == 1.0).all())

    ranks(program)


@auto
def test_an_array_that_never_changes_is_no_out(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = library("float32").put(jnp.ones(10))
        with pytest.raises(ValueError, match="JAX array, and those never change"):
            comm.all_reduce(x, out=x)

    ranks(program)
