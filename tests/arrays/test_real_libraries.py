"""Arrays of real libraries, as their users try them; one job a library, which has them to itself.

Several of these libraries in one process end it, so nothing imports them here.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.libraries

CHECKING = r"""
import contextlib, os, traceback, warnings
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
warnings.simplefilter("ignore")

comm = world = pycoll.init(op_timeout=30.0 * PATIENCE)
rank, size, other = comm.rank, comm.size, 1 - comm.rank
fails = []

@contextlib.contextmanager
def check(name):
    "What follows is one check, on a communicator of its own."
    global comm
    comm = world.dup()
    try:
        yield
    except Exception:
        fails.append(name)
        print(f"rank {rank}, {name}: {traceback.format_exc()}", flush=True)

def advised(advice, call, x, *args, **kwargs):
    "Call it with what the error says that is passed in place of x."
    try:
        call(x, *args, **kwargs)
    except (TypeError, ValueError) as error:
        said = str(error)
        assert not re.search(r"\w\.\.|\. \.", said), said
        assert advice in said, said
        arguments = {"value": 0.0, "unit": "m"}
        return call(eval(advice, globals() | arguments | {"x": x}), *args, **kwargs)
    raise AssertionError(f"{x!r} was taken")

def whole(x, alike):
    "What only moves x keeps all of it; alike(a, b): whether all of a is as in b."
    theirs = comm.sendrecv(x, other, other)
    everyone = comm.all_gather(x)
    assert alike(everyone[rank], x) and alike(everyone[other], theirs)
    assert alike(comm.broadcast(x), everyone[0])
    assert alike(comm.ibroadcast(x, root=1).wait(), everyone[1])
    gathered = comm.gather(x)
    assert rank != 0 or alike(gathered[1], theirs)
    comm.isend(x, other)
    assert alike(comm.irecv(other).wait(), theirs)
    return theirs

def comes_back(make, names, kind, as_numpy):
    "Arrays of the library come back as its arrays, with their dtype and their elements."
    for name in names:
        with check(name):
            x = make([[1, 0, 1], [0, 1, 1]], name)
            twice = np.array([[2, 0, 2], [0, 2, 2]]) > 0 if name == "bool" else 2 * as_numpy(x)
            expected = [
                (comm.all_reduce(x), twice),
                (comm.all_reduce_many([x, x])[1], twice),
                (comm.sendrecv(x, other, other), as_numpy(x)),
                (comm.broadcast(x if rank == 0 else None), as_numpy(x)),
                (comm.all_gather(x), np.stack([as_numpy(x)] * 2)),
                (comm.all_gatherv(x)[other], as_numpy(x)),
                (comm.scatter(x if rank == 0 else None), as_numpy(x)[rank]),
            ]
            for result, elements in expected:
                assert isinstance(result, kind), type(result)
                assert result.dtype == x.dtype, result.dtype
                assert np.array_equal(as_numpy(result), elements), result
"""

END = """
if not fails:
    ok()
"""


def run(job: Any, text: str, *names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = job(2, CHECKING + text + END, init="")
    assert (done.status, done.content) == (0, [0, 1]), done.stdout + done.stderr


def test_units_of_astropy(job: Any) -> None:
    run(
        job,
        """
import numpy
import astropy.units as u
from astropy.table import Column
from astropy.utils.masked import Masked

def alike(a, b):
    return type(a) is type(b) and a.unit == b.unit and bool(np.all(a == b))

unit = u.km if rank else u.m
x = [1.0, 2.0] * unit
with check("quantities are not mixed"):
    total = advised("x.to_value(unit)", comm.all_reduce, x)
    assert total.tolist() == [1001, 2002]
    assert advised("x.to_value(unit)", comm.reduce_scatter, x) == [1001.0, 2002.0][rank]
with check("an operator of the user's gets quantities"):
    assert alike(comm.all_reduce(x, op=lambda a, b: a + b), [1001.0, 2002.0] * u.m)
    assert alike(comm.all_reduce(x, op=np.hypot), np.hypot([1.0, 2.0] * u.m, [1.0, 2.0] * u.km))
with check("quantities move with their units"):
    assert whole(x, alike).unit == (u.m if rank else u.km)
    assert alike(comm.scatter(list(x) if rank == 1 else None, root=1), (rank + 1.0) * u.km)
with check("a quantity is no out"):
    y = x.copy()
    error_like(TypeError, "numpy.asarray", comm.all_reduce, np.ones(2), out=y)
    comm.all_reduce(np.ones(2), out=np.asarray(y))
    assert alike(y, [2.0, 2.0] * unit)
with check("columns"):
    x = Column([1.0, 2.0], name="length", unit=unit)
    assert advised("numpy.asarray(x)", comm.all_reduce, x).tolist() == [2, 4]
    assert whole(x, alike).name == "length"

def alike(a, b):
    return type(a) is type(b) and repr(a) == repr(b)

for name, x in {
    "masked": Masked(np.array([1.0, 2.0]), mask=[False, rank == 0]),
    "masked quantities": Masked([1.0, 2.0] * unit, mask=[False, rank == 0]),
}.items():
    with check(name):
        filled = x.filled(0.0)
        if hasattr(filled, "unit"):
            error_like(TypeError, r"x\\.filled\\(value\\)", comm.all_reduce, x)
            assert advised("x.to_value(unit)", comm.all_reduce, filled).tolist() == [1001, 2000]
        else:
            assert advised("x.filled(value)", comm.all_reduce, x).tolist() == [2, 2]
        whole(x, alike)
        sums = comm.all_reduce(x, op=lambda a, b: a + b)
        assert type(sums) is type(x) and sums.mask.tolist() == [False, True]
""",
        "astropy",
    )


def test_units_of_unyt(job: Any) -> None:
    run(
        job,
        """
from unyt import unyt_array

def alike(a, b):
    return type(a) is type(b) and a.units == b.units and bool(np.all(a == b))

x = unyt_array([1.0, 2.0], "km" if rank else "m")
with check("arrays are not mixed"):
    assert advised("x.to_value(unit)", comm.all_reduce, x).tolist() == [1001, 2002]
with check("an operator of the user's gets them"):
    total = comm.all_reduce(x, op=lambda a, b: a + b)
    assert alike(total, unyt_array([1001.0, 2002.0], "m"))
with check("they move with their units"):
    whole(x, alike)
""",
        "unyt",
    )


def test_units_of_pint(job: Any) -> None:
    run(
        job,
        """
import pint
pint.set_application_registry(pint.UnitRegistry())

def alike(a, b):
    return a.units == b.units and bool(np.all(a == b))

x = pint.Quantity(np.array([1.0, 2.0]), "km" if rank else "m")
with check("quantities are not mixed"):
    assert advised("x.m_as(unit)", comm.all_reduce, x).tolist() == [1001, 2002]
with check("an operator of the user's gets them"):
    total = comm.all_reduce(x, op=lambda a, b: a + b)
    assert alike(total, pint.Quantity(np.array([1001.0, 2002.0]), "m"))
with check("they move with their units"):
    whole(x, alike)
""",
        "pint",
    )


def test_sparse_arrays(job: Any) -> None:
    run(
        job,
        """
import scipy.sparse
import sparse

dense = np.diag([1.0, 2.0])
for advice, x in {
    "x.toarray()": scipy.sparse.csr_array(dense),
    "x.todense()": sparse.COO.from_numpy(dense),
}.items():
    with check(advice):
        assert np.array_equal(advised(advice, comm.all_reduce, x), 2 * dense)
        whole(x, lambda a, b: type(a) is type(b) and (a.nnz, a.sum()) == (b.nnz, b.sum()))
        total = comm.all_reduce(x, op=lambda a, b: a + b)
        assert type(total) is type(x) and total.sum() == 6
""",
        "scipy",
        "sparse",
    )


def test_tables(job: Any) -> None:
    run(
        job,
        """
import numpy
import pandas
import pyarrow
import xarray

for name, x in {
    "a series": pandas.Series([1.0, 2.0], name="s"),
    "nullable integers": pandas.array([1, 2]),
    "an xarray": xarray.DataArray([1.0, 2.0], dims="t", attrs={"unit": "m"}),
    "chunks": pyarrow.chunked_array([[1.0], [2.0]]),
}.items():
    with check(name):
        assert advised("numpy.asarray(x, float)", comm.all_reduce, x).tolist() == [2, 4]
        whole(x, lambda a, b: type(a) is type(b) and bool(np.all(a.equals(b))))
        if name != "chunks":
            total = comm.all_reduce(x, op=lambda a, b: a + b)
            assert type(total) is type(x) and np.asarray(total).tolist() == [2, 4]
with check("an Arrow array without gaps is read, and the result is NumPy's"):
    x = pyarrow.array([1.0, 2.0])
    for result in (comm.all_reduce(x), comm.sendrecv(x, other, other), comm.all_gather(x)[0]):
        assert type(result) is np.ndarray
    assert comm.all_reduce(x).tolist() == [2, 4]
    error_like(ValueError, "pyarrow does not let", comm.all_reduce, x, out=x)
with check("Arrow arrays with gaps, and of strings, are objects"):
    for x in (pyarrow.array([1.0, None]), pyarrow.array(["a", "b"])):
        whole(x, lambda a, b: a.equals(b))
""",
        "pandas",
        "pyarrow",
        "xarray",
    )


def test_tensors_of_torch(job: Any) -> None:
    run(
        job,
        """
import torch

with check("dtypes that pycoll has not"):
    x = torch.tensor([1 + 2j]).to(torch.complex32)
    assert advised("x.to(torch.complex64)", comm.all_reduce, x).tolist() == [2 + 4j]
    x = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    assert advised("x.dequantize()", comm.all_reduce, x).tolist() == [2, 2]
    x = torch.ones(2).to(torch.float8_e5m2)
    assert advised("x.float()", comm.all_reduce, x).tolist() == [2, 2]
    x = torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert advised("x.view(torch.uint8)", comm.broadcast, x).tolist() == [1] * 4
with check("views that are conjugated or negated"):
    for name in ("out", "x"):
        for out in (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag):
            x = torch.ones_like(out)
            said = f"{name}.resolve_conj().resolve_neg()"
            if name == "x" and rank == 0:
                comm.broadcast(x)
                comm.broadcast(None, root=1)
                continue
            if name == "out":
                error_like(ValueError, re.escape(said), comm.all_reduce, x, out=out)
                plain = out.resolve_conj().resolve_neg()
                assert comm.all_reduce(x, out=plain) is plain
            else:
                error_like(ValueError, re.escape(said), comm.broadcast, out)
                comm.broadcast(out.resolve_conj().resolve_neg())
                comm.broadcast(None, root=1)
with check("sparse, nested"):
    x = torch.eye(2).to_sparse()
    assert advised("x.to_dense()", comm.all_reduce, x).tolist() == [[2, 0], [0, 2]]
""",
        "torch",
    )


def test_arrays_of_jax(job: Any) -> None:
    run(
        job,
        """
import jax
import jax.experimental.sparse

def make(values, name):
    return jax.numpy.array(values, dtype=name)

NAMES = ["bool", "int8", "uint32", "int32", "float16", "bfloat16", "float32", "complex64"]
comes_back(make, NAMES, jax.Array, as_numpy=np.asarray)
with check("int4 moves, and is converted to be added up"):
    x = jax.numpy.array([1, -2], "int4")
    whole(x, lambda a, b: a.dtype == b.dtype and np.array_equal(a, b))
    assert advised("x.astype(float)", comm.all_reduce, x).tolist() == [2, -4]
with check("keys"):
    advised("jax.random.key_data(x)", comm.broadcast, jax.random.key(0))
with check("traced"):
    said = "has no value yet"
    error_like(TypeError, said, jax.jit(comm.all_reduce), x)
with check("a sparse array"):
    x = jax.experimental.sparse.BCOO.fromdense(jax.numpy.eye(2))
    assert advised("x.todense()", comm.all_reduce, x).tolist() == [[2, 0], [0, 2]]
""",
        "jax",
    )


NAMES = """
NAMES = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "complex64"]
"""


def test_tensors_of_tensorflow(job: Any) -> None:
    run(
        job,
        NAMES
        + """
import tensorflow as tf

def make(values, name):
    return tf.cast(tf.constant(values), name)

comes_back(make, [*NAMES, "float64"], type(tf.ones(1)), as_numpy=np.asarray)
with check("results are tensors that TensorFlow computes with, wherever their memory begins"):
    for result in comm.all_reduce_many([tf.ones([n]) for n in (1, 3, 5, 1001)]):
        assert float(tf.reduce_sum(tf.exp(result) * result)) > 2
with check("out"):
    x = tf.ones(2)
    error_like(ValueError, "tensorflow does not let.*use the result", comm.all_reduce, x, out=x)
with check("variables"):
    x = tf.Variable([1.0, 2.0])
    import numpy
    assert advised("numpy.asarray(x, float)", comm.all_reduce, x).tolist() == [2, 4]
""",
        "tensorflow",
    )


def test_arrays_of_mlx(job: Any) -> None:
    run(
        job,
        NAMES
        + """
import mlx.core as mx
mx.set_default_device(mx.cpu)

def make(values, name):
    return mx.array(values).astype(getattr(mx, name + ("_" if name == "bool" else "")))

def as_numpy(x):
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)

comes_back(make, NAMES, mx.array, as_numpy=as_numpy)
with check("float64 keeps its bits, in an array of NumPy"):
    result = comm.all_reduce(mx.array([1.0, 2.0**-60]).astype(mx.float64))
    assert (type(result), result.tolist()) == (np.ndarray, [2, 2.0**-59])
with check("out"):
    x = mx.ones(2)
    error_like(ValueError, "mlx does not let.*use the result", comm.all_reduce, x, out=x)
""",
        "mlx",
    )


def test_tensors_of_paddle(job: Any) -> None:
    run(
        job,
        NAMES
        + """
import paddle

def make(values, name):
    return paddle.to_tensor(values, dtype=name)

def as_numpy(x):
    return x.astype("float32").numpy() if x.dtype == paddle.bfloat16 else x.numpy()

comes_back(make, [*NAMES, "float64"], paddle.Tensor, as_numpy=as_numpy)
with check("out"):
    x = paddle.ones([2])
    assert comm.all_reduce(x, out=x) is x
    assert x.tolist() == [2, 2]
""",
        "paddle",
    )


@pytest.mark.parametrize("version", ["2022.12", "newest"])
def test_arrays_of_the_array_api(job: Any, version: str) -> None:
    run(
        job,
        f"""
import array_api_strict as xp
if "{version}" != "newest":
    xp.set_array_api_strict_flags(api_version="{version}")

def make(values, name):
    return xp.asarray(values, dtype=getattr(xp, name))

names = ["bool", "uint8", "int64", "float32", "float64", "complex64"]
comes_back(make, names, type(xp.ones(1)), as_numpy=np.asarray)
""",
        "array_api_strict",
    )
