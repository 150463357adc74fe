"""JAX's arrays travel, too: the ranks fit a line through points of which each has its own.

pip install jax && pycoll-run -n 4 examples/jax_arrays.py

A JAX array never changes, so each result is a new one, and there is no `out`. What is computed may
be compiled with jit; ranks talk between two such functions, or inside of one by `io_callback`.
"""

import os

# JAX takes most of a GPU's memory when it starts, which is too much for ranks that share one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

import pycoll

STEPS, RATE = 200, 0.5


def loss(line, x, y):
    """Mean squared distance of the points from the line."""
    return jnp.mean((line["slope"] * x + line["height"] - y) ** 2)


@jax.jit
def move(line, gradient):
    """Return a line that fits better."""
    return jax.tree.map(lambda value, change: value - RATE * change, line, gradient)


def fit(comm, x, y):
    """Return the line, equal on all ranks, that fits best the points of all of them."""
    gradient_of = jax.jit(jax.grad(loss))
    line = {"slope": jnp.zeros(()), "height": jnp.zeros(())}
    for _ in range(STEPS):
        # Of a structure of arrays the leaves travel, all of them in few messages.
        leaves, structure = jax.tree.flatten(gradient_of(line, x, y))
        leaves = comm.all_reduce_many(leaves, "avg")
        line = move(line, jax.tree.unflatten(structure, leaves))
    return line


@jax.jit
def share_of_all(x):
    """Divide by the sum over all ranks, which is fetched in the middle of the function."""
    total = io_callback(
        comm.all_reduce,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        x,
        ordered=True,  # all ranks make their calls in the same order
    )
    return x / total


with pycoll.init() as comm:
    # Points of the line 3 x - 1, others on each rank.
    x = jax.random.uniform(jax.random.key(comm.rank), (1000,), minval=-1.0)
    line = fit(comm, x, 3.0 * x - 1.0)
    everyone = comm.all_gather(jnp.stack([line["slope"], line["height"]]))  # a row for each rank
    assert isinstance(everyone, jax.Array)
    same = all(row.tobytes() == everyone[0].tobytes() for row in everyone)

    share = share_of_all(jnp.full(3, comm.rank + 1.0))

    refused = ""
    try:
        comm.all_reduce(x, out=x)
    except ValueError as error:  # before anything is sent
        refused = str(error)

    if comm.rank == 0:
        print(f"slope {line['slope']:.3f}, height {line['height']:.3f}")
        print(f"the same bits on all {comm.size} ranks: {same}")
        print(f"with out=x: {refused}")
        print(f"of the sum, fetched inside jit: {share.tolist()[0]:.3f}")
    if not (same and jnp.allclose(everyone[0], jnp.array([3.0, -1.0]), atol=1e-3)):
        raise SystemExit("the ranks have not found the line")
