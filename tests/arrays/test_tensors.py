"""PyTorch's tensors that are written to: their gradients know, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from script_jobs import Jobs, all_well

pytestmark = pytest.mark.libraries

ON_BOTH = pytest.mark.parametrize(
    "ranks", [2, (2, ("--transport", "tcp"))], indirect=True, scope="module", ids=["shm", "tcp"]
)


def fillings(comm: Any, torch: Any) -> dict[str, Callable[[Any], Any]]:
    """Calls that fill the tensor of shape (2, 2) which they are given, or that a request fills."""
    other = 1 - comm.rank
    x, row = torch.ones(2, 2), torch.ones(2)
    persistent: dict[int, Any] = {}

    def again(w: Any) -> Any:
        request = persistent.setdefault(id(w), comm.persistent.all_reduce(x, out=w))
        request.start()
        return request

    def from_other(w: Any) -> Any:
        request = comm.isend(x, other)
        comm.recv(other, out=w)
        return request

    def strided(w: Any) -> Any:
        request = comm.isend(x, other)
        comm.recv(other, out=w.t())
        return request

    def matched(w: Any) -> Any:
        request = comm.isend(x, other)
        comm.mprobe(other).recv(out=w)
        return request

    return {
        "all_reduce": lambda w: comm.all_reduce(x, out=w),
        "all_reduce, in place": lambda w: comm.all_reduce(w, out=w),
        "all_reduce, transposed": lambda w: comm.all_reduce(x, out=w.t()),
        "iall_reduce": lambda w: comm.iall_reduce(x, out=w),
        "persistent": again,
        "all_reduce_many": lambda w: comm.all_reduce_many([row, x], out=[None, w]),
        "iall_reduce_many": lambda w: comm.iall_reduce_many([x], out=[w]),
        "scan": lambda w: comm.scan(x, out=w),
        "reduce_scatter": lambda w: comm.reduce_scatter(torch.ones(2, 2, 2), out=w),
        "reduce_scatterv": lambda w: comm.reduce_scatterv(torch.ones(4, 2), [2, 2], out=w),
        "all_gather": lambda w: comm.all_gather(row, out=w),
        "iall_gather": lambda w: comm.iall_gather(row, out=w),
        "all_gatherv": lambda w: comm.all_gatherv(row[None], out=w),
        "all_gatherv, to a list": lambda w: comm.all_gatherv(row, out=[w[0], w[1]]),
        "all_to_all": lambda w: comm.all_to_all(x, out=w),
        "all_to_allv": lambda w: comm.all_to_allv([row[None]] * 2, out=w),
        "scatter": lambda w: comm.scatter(torch.ones(2, 2, 2) if comm.rank == 0 else None, out=w),
        "scatter, transposed": lambda w: comm.iscatter(
            torch.ones(2, 2, 2) if comm.rank == 0 else None, out=w.t()
        ),
        "scatterv": lambda w: comm.scatterv([x, x] if comm.rank == 0 else None, out=w),
        "recv": from_other,
        "recv, transposed": strided,
        "irecv": lambda w: waited([comm.irecv(other, out=w), comm.isend(x, other)]),
        "recv of a message": matched,
        "sendrecv": lambda w: comm.sendrecv(x, other, other, out=w),
        "isendrecv": lambda w: comm.isendrecv(x, other, other, out=w),
    }


def waited(requests: Any) -> None:
    for request in requests:
        request.wait()


def on_one_rank(comm: Any, torch: Any) -> dict[str, tuple[int, Callable[[Any], Any]]]:
    """The same, by the rank on which it fills."""
    x, row, first = torch.ones(2, 2), torch.ones(2), comm.rank == 0
    return {
        "broadcast": (1, lambda w: comm.broadcast(x if first else w)),
        "broadcast, transposed": (1, lambda w: comm.broadcast(x if first else w.t())),
        "ibroadcast": (1, lambda w: comm.ibroadcast(x if first else w)),
        "reduce": (0, lambda w: comm.reduce(x, out=w)),
        "gather": (0, lambda w: comm.gather(row, out=w)),
        "gatherv": (0, lambda w: comm.gatherv(row[None], out=w)),
        "exscan": (1, lambda w: comm.exscan(x, out=w)),
    }


@ON_BOTH
def test_a_gradient_that_needs_what_was_overwritten_raises(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        cases = {name: (comm.rank, fill) for name, fill in fillings(comm, torch).items()}
        for name, (rank, fill) in (cases | on_one_rank(comm, torch)).items():
            for _ in range(2):
                w = torch.full((2, 2), 3.0, requires_grad=True)
                total = (w * w).sum()
                with torch.no_grad():
                    request = fill(w)
                    if hasattr(request, "wait"):
                        request.wait()
                if rank == comm.rank:
                    assert w[0, 0] != 3 or "in place" in name, name
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        total.backward()
                else:
                    total.backward()
                    assert w.grad.tolist() == [[6, 6], [6, 6]], name

    ranks(program)


@ON_BOTH
def test_a_tensor_whose_gradient_is_traced_is_not_written_to(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        leaf = torch.full((2, 2), 3.0, requires_grad=True)
        filled = on_one_rank(comm, torch)
        for name, fill in fillings(comm, torch).items():
            if "recv" not in name:  # those that send first would leave a message
                for w in (leaf, leaf * 1):
                    with pytest.raises(ValueError, match="requires a gradient"):
                        fill(w)
        for receive in (comm.recv, comm.irecv):
            with pytest.raises(ValueError, match="requires a gradient"):
                receive(1 - comm.rank, out=leaf)
        if comm.rank == 1:
            for name in ("broadcast", "ibroadcast", "exscan"):
                with pytest.raises(ValueError, match="requires a gradient"):
                    filled[name][1](leaf)
        assert leaf.tolist() == [[3, 3], [3, 3]]
        assert leaf._version == 0
        for allowed in (torch.no_grad, torch.inference_mode):
            with allowed():
                comm.all_reduce(leaf, out=leaf)
        comm.all_reduce(leaf, out=leaf.detach())
        assert leaf.tolist() == [[24, 24], [24, 24]]
        assert leaf._version == 3

    ranks(program)


@ON_BOTH
def test_a_subclass_says_itself_whether_it_requires_a_gradient(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        class Plain(torch.Tensor):
            __torch_function__ = torch._C._disabled_torch_function_impl

        class ByProperty(Plain):
            requires_grad = property(lambda self: True)

        class ByLookup(Plain):
            def __getattribute__(self, name: str) -> Any:
                return True if name == "requires_grad" else super().__getattribute__(name)

        x = torch.ones(2)
        for _ in range(2):
            for cls in (ByProperty, ByLookup):
                with pytest.raises(ValueError, match="requires a gradient"):
                    comm.all_reduce(x, out=torch.zeros(2).as_subclass(cls))
            out = torch.zeros(2).as_subclass(Plain)
            comm.all_reduce(x, out=out)
            assert out.tolist() == [2, 2]
            assert out._version == 1

    ranks(program)


@ON_BOTH
def test_a_result_has_no_gradient_and_inference_tensors_are_filled(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        leaf = torch.ones(2, requires_grad=True)
        for result in (
            comm.all_reduce(leaf),
            comm.all_gather(leaf * 2),
            comm.broadcast(leaf if comm.rank == 0 else None),
        ):
            if result is not leaf:  # the root's own
                assert not result.requires_grad
        with torch.inference_mode():
            out = torch.zeros(2)
            comm.all_reduce(torch.ones(2), out=out)
        assert out.tolist() == [2, 2]
        comm.all_reduce(torch.ones(2), out=out)

    ranks(program)


@ON_BOTH
def test_tensors_are_read_and_filled_as_they_show_themselves(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        class Plain(torch.Tensor):
            pass

        rank, other = comm.rank, 1 - comm.rank
        whole = torch.arange(6.0).reshape(2, 3) + rank
        signed, pairs = torch.tensor([1 + rank, -2]), torch.tensor([1 + 2j, 3j]) * (rank + 1)
        shown = {
            "whole": whole,
            "negated": torch._neg_view(whole),
            "negated ints": torch._neg_view(signed),
            "conjugated": pairs.conj(),
            "imaginary part of a conjugate": pairs.conj().imag,
            "one of these": pairs.conj().imag[:1],
            "transposed": whole.t(),
            "every second": whole[:, ::2],
            "expanded": whole[:, :1].expand(2, 3),
            "of one row": whole[:1].t().t(),
            "copied when written": torch._lazy_clone(whole),
            "traced": torch.nn.Parameter(whole) * 1,
            "a parameter": torch.nn.Parameter(whole),
            "a subclass": whole.as_subclass(Plain),
            "not aligned": torch.frombuffer(bytearray(9), dtype=torch.uint8)[1:].view(torch.uint8),
            "of no elements": torch.ones(0, 3),
            "of no dimensions": whole[1, 1],
            "bfloat16": whole.to(torch.bfloat16),
            "large bfloat16": torch.ones(100_000, dtype=torch.bfloat16) + rank,
            "complex64": pairs.to(torch.complex64),
        }
        for name, x in shown.items():
            plain = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
            their = comm.sendrecv(plain.tolist(), other, other)
            want = plain + torch.tensor(their, dtype=plain.dtype).reshape(plain.shape)
            for _ in range(2):
                for got in (
                    comm.all_reduce(x),
                    comm.iall_reduce(x).wait(),
                    comm.all_reduce(x, out=torch.zeros_like(plain)),
                    comm.all_reduce(x, out=torch.zeros_like(plain), timeout=60),
                    comm.sendrecv(x, other, other) + plain,
                    comm.broadcast(x if rank == 0 else torch.empty_like(plain)) * 0 + want,
                ):
                    assert torch.equal(got.detach().resolve_neg().resolve_conj(), want), name
                assert type(comm.all_reduce(x)) is torch.Tensor
                assert not comm.all_reduce(x).requires_grad
        for name, x in {
            "sparse": whole.to_sparse(),
            "without elements": torch.ones(2, device="meta"),
            "float8": whole.to(torch.float8_e4m3fn),
        }.items():
            for _ in range(2):
                with pytest.raises(TypeError):
                    comm.all_reduce(x)
                if name != "float8":
                    with pytest.raises(TypeError):
                        comm.send(x, other)
        eighths = whole.to(torch.float8_e4m3fn)
        assert comm.sendrecv(eighths, other, other).dtype == eighths.dtype
        for out in (torch._neg_view(whole), pairs.conj()):
            for _ in range(2):
                with pytest.raises(ValueError, match="negated"):
                    comm.all_reduce(out.resolve_neg().resolve_conj(), out=out)

    ranks(program)


@ON_BOTH
def test_tensors_inside_of_transforms_and_fake_ones_are_refused(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch
        from torch._subclasses import FakeTensorMode

        comm.all_reduce(torch.ones(2))

        def inside(x: Any) -> Any:
            with pytest.raises(TypeError):
                comm.all_reduce(x)
            return x.sum()

        torch.vmap(inside)(torch.ones(2, 2))
        torch.func.grad(inside)(torch.ones(2))
        torch.func.functionalize(inside)(torch.ones(2))
        with FakeTensorMode():
            inside(torch.ones(2))
        assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]

    ranks(program)


@ON_BOTH
def test_storages_can_be_resized_after_calls_that_block(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        x, parts = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
        half = torch.ones(4, dtype=torch.bfloat16)
        table = torch.zeros(4, 2)
        comm.all_reduce(x, out=x)
        comm.all_gather(x, out=parts)
        comm.all_gatherv(half[: comm.rank + 1])
        comm.all_reduce(torch.ones(4), out=table[:, 0])
        assert table[:, 0].tolist() == parts[1].tolist() == [2, 2, 2, 2]
        for tensor in (x, *parts, half, table):  # as FSDP does
            tensor.untyped_storage().resize_(0)
            assert tensor.untyped_storage().nbytes() == 0

    ranks(program)


@ON_BOTH
def test_a_request_keeps_the_memory_of_its_tensors(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import sys

        import torch

        other = 1 - comm.rank
        comm.all_reduce(torch.ones(2))
        x, out, late = torch.ones(3000), torch.zeros(3000), torch.zeros(30_000)
        counts = sys.getrefcount(x), sys.getrefcount(out)
        seen = late.view(-1)
        request = comm.irecv(other, out=late)
        with pytest.raises(RuntimeError, match="resiz"):
            late.resize_(100_000)
        late.data = torch.zeros(1)
        comm.send(torch.ones(30_000), other)
        request.wait()
        assert seen.sum() == 30_000
        for _ in range(20):
            comm.iall_reduce(x, out=out).wait()
            comm.all_reduce(x, out=out)
            comm.sendrecv(x, other, other, out=out)
        comm.barrier()
        comm.ibarrier().wait()
        assert (sys.getrefcount(x), sys.getrefcount(out)) == counts

    ranks(program)


@ON_BOTH
def test_results_that_nobody_has_are_given_back(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import resource

        import torch

        x, other = torch.ones(1 << 18), 1 - comm.rank  # 1 MiB
        before = 0
        for turn in range(300):
            assert comm.all_reduce(x)[-1] == 2
            assert comm.sendrecv(x, other, other)[-1] == 1
            if turn == 20:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000

    ranks(program)


@ON_BOTH
def test_tensors_that_are_not_contiguous_go_through_no_python(ranks: Any, torch: Any) -> None:
    def program(comm: Any) -> None:
        import torch

        import pycoll

        def never(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it went through Python")

        other, base = 1 - comm.rank, torch.arange(24.0)
        cases = {
            "transposed": base.reshape(4, 6).t(),
            "columns": base.reshape(4, 6)[:, 1::2],
            "permuted": base.reshape(2, 3, 4).permute(2, 0, 1),
            "expanded": torch.ones(1, 3).expand(4, 3),
            "bfloat16": base.reshape(4, 6).to(torch.bfloat16).t(),
            "complex": (base * 1j).reshape(4, 6).t(),
            "a parameter": torch.nn.Parameter(base.reshape(4, 6)).t(),
        }
        kept = {}
        for turn in range(2):  # first calls are prepared in Python
            for name, x in cases.items():
                wide = torch.empty((*x.shape, 2), dtype=x.dtype)
                for out in (None, torch.empty(x.shape, dtype=x.dtype), wide[..., 1]):
                    got = comm.all_reduce(x, out=out)
                    assert torch.equal(got, 2 * x), name
                    assert got is out if out is not None else got.is_contiguous(), name
                    assert not got.requires_grad
                assert torch.equal(comm.iall_reduce(x).wait(), 2 * x)
                assert torch.equal(comm.all_gather(x), torch.stack([x, x]))
                got = comm.broadcast(x if comm.rank == 0 else wide[..., 0])
                assert torch.equal(got, x)
                assert (got is x) == (comm.rank == 0)
                assert torch.equal(comm.sendrecv(x, other, other), x)
                comm.send(x, other)
                assert torch.equal(comm.recv(other), x)
            names = ("all_reduce", "iall_reduce", "all_gather", "broadcast", "send", "sendrecv")
            for name in names if turn == 0 else ():
                kept[name] = getattr(pycoll.Communicator, name)
                setattr(pycoll.Communicator, name, never)
        for name, method in kept.items():
            setattr(pycoll.Communicator, name, method)
        x = base.reshape(4, 6).t()
        with pytest.raises(ValueError, match="overlap"):
            comm.all_reduce(x, out=base.reshape(6, 4))

    ranks(program)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_of_a_pytorch_without_a_table_the_core_asks_python(job: Jobs, transport: str) -> None:
    text = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__

def never(*args, **kwargs):
    raise AssertionError("it went through Python")

x, out = torch.arange(4.0) + rank, torch.empty(4)
total = [1.0, 3.0, 5.0, 7.0]
half = x.bfloat16()
for turn in range(3):
    for call in ("all_reduce", "scan", "all_gather", "reduce_scatter"):
        if turn == 1:
            setattr(pycoll.Communicator, call, never)
    assert comm.all_reduce(x).tolist() == total
    before = out._version
    assert comm.all_reduce(x, out=out) is out and out.tolist() == total
    assert out._version > before
    assert comm.all_reduce(half).tolist() == total and comm.all_reduce(half).dtype == half.dtype
    own = x.clone()
    assert comm.all_reduce(own, out=own) is own and own.tolist() == total
    assert comm.scan(x).tolist() == (total if rank else x.tolist())
    assert torch.equal(comm.all_gather(x), torch.stack([x - rank, x - rank + 1]))
    assert comm.reduce_scatter(x.reshape(2, 2)).tolist() == total[2 * rank : 2 * rank + 2]
    z = torch.tensor([1 + 2j, 3 + 4j])
    assert comm.all_reduce(z.conj()).tolist() == [2 - 4j, 6 - 8j]
    assert comm.all_reduce(z.conj().imag).tolist() == [-4, -8]
    assert comm.all_reduce(torch.nn.Parameter(x)).tolist() == total
ok()
"""
    all_well(job(2, text, "--transport", transport), 2)
