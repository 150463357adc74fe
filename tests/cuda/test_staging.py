"""Staging buffers of GPU arrays: which bytes go where, when, in whose memory."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import fake_cuda
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from tiers import smoke

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu
from staged_arrays import NBYTES, stage_of_array

from pycoll._cuda import copies, cuda, staging
from pycoll._cuda.copies import GpuCopy, Push
from pycoll._runtime.task import Task
from pycoll.errors import TransportError


class Engine:
    """Counts how often its lock was held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entered = threading.Event()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with self.lock:
            yield

    def finish(self, copy: Any, error: BaseException | None) -> None:
        with self.lock:
            copy.finish(error)
        self.entered.set()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[int, ...], str]:
    """Shape of an array, index of a view into it, order of its axes, dtype."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    index = tuple(
        slice(
            draw(st.sampled_from([None, 0, 1])) if step > 0 else None,
            None,
            step,
        )
        for step in [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    )
    axes = tuple(draw(st.permutations(range(len(shape)))))
    return shape, index, axes, draw(st.sampled_from(["u1", "<u2", "<f4", "<c16"]))


def cut(draw: Any, nbytes: int) -> list[int]:
    """Ascending places that divide so many bytes."""
    inner = draw(st.lists(st.integers(0, nbytes), max_size=4))
    return [0, *sorted(inner), nbytes]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=layouts(), data=st.data())
def test_any_range_of_any_view_is_copied_in_both_directions(
    device: cuda.Device, layout: Any, data: st.DataObject
) -> None:
    shape, index, axes, dtype = layout
    values = np.random.default_rng(1).integers(0, 255, (*shape, np.dtype(dtype).itemsize), np.uint8)
    host = values.view(dtype)[..., 0] if shape else values.view(dtype).reshape(())
    whole = fakegpu.array(host)
    view, wanted = whole[index].transpose(*axes), host[*index, ...].transpose(*axes)
    stage = stage_of_array(device, view)
    assert stage.buffer.shape == wanted.shape
    ends = cut(data.draw, wanted.nbytes)
    pulls = [(a, b, stage.pull(None, a, b)) for a, b in itertools.pairwise(ends)]
    for begin, end, copy in data.draw(st.permutations(pulls)):
        copy.wait()
        flat = np.ascontiguousarray(stage.buffer).reshape(-1).view(np.uint8)
        assert flat[begin:end].tobytes() == wanted.tobytes()[begin:end]
    # The other way: a range of new bytes, and nothing beside it.
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, wanted.nbytes)] * 2)))
    new = np.frombuffer(wanted.tobytes(), np.uint8).copy()
    new[begin:end] ^= 0xFF
    buffer = stage.buffer.reshape(-1).view(np.uint8)
    buffer[:] = 0x11
    buffer[begin:end] = new[begin:end]
    stage.push(Engine(), begin, end).wait()
    expected = host.copy()
    expected[*index, ...].transpose(*axes)[...] = new.view(dtype).reshape(wanted.shape)
    assert whole.get().tobytes() == expected.tobytes()


def test_what_was_not_pushed_is_flushed(device: cuda.Device) -> None:
    for ranges in ([], [(0, 10)], [(10, 20), (90, 100)], [(50, 60), (20, 30)], [(0, 100)]):
        x = fakegpu.array(np.zeros(100, np.uint8))
        x.get()
        stage = stage_of_array(device, x)
        stage.buffer[:] = np.arange(100)
        for begin, end in ranges:
            stage.push(None, begin, end)
        before = fake_cuda.stats()["h2d_bytes"]
        stage.flush()
        written = fake_cuda.peek(x.pointer, 100)
        assert written == bytes(range(100))
        assert fake_cuda.stats()["h2d_bytes"] - before <= 100  # nothing twice


def test_nothing_is_copied_of_an_array_without_elements(device: cuda.Device) -> None:
    x = fakegpu.array(np.zeros((3, 0), np.float32))
    before = fake_cuda.stats()["enqueued"]
    stage = stage_of_array(device, x)
    assert stage.pull(None).done
    assert stage.push(None).done
    stage.flush()
    assert (stage.buffer.shape, stage.buffer.dtype) == ((3, 0), np.float32)
    assert fake_cuda.stats()["enqueued"] == before


@smoke
def test_bytes_are_pulled_once(device: cuda.Device) -> None:
    x = fakegpu.array(np.arange(NBYTES, dtype=np.uint8))
    stage = stage_of_array(device, x)
    first = stage.pull(None, 0, 100)
    assert stage.pull(None, 0, 100) is first
    assert stage.pull(None, 20, 50) is first
    stage.pull(None, 100)


def test_a_stage_is_found_by_bytes_of_its_staging_buffer(device: cuda.Device) -> None:
    x = fakegpu.array(np.arange(100, dtype=np.int32))
    stage = stage_of_array(device, x)
    view = stage.buffer[10:20].view(np.uint8).data
    assert staging.stage_of(view) is stage.stage
    assert stage.offset(view) == 40
    assert staging.stage_of(memoryview(bytearray(4))) is None
    assert staging.stage_of(np.arange(4).view(np.uint8).data) is None
    assert staging.stage_of(stage.buffer.copy().view(np.uint8).data) is None


def test_the_place_of_an_array_tells_what_overlaps_what(device: cuda.Device) -> None:
    x = fakegpu.array(np.zeros((4, 4), np.float32))
    whole, left, right = [stage_of_array(device, y) for y in (x, x[:, :2], x[:, 2:])]
    assert np.shares_memory(whole.place, left.place)
    assert not np.shares_memory(left.place, right.place)
    x.readonly = True
    assert not stage_of_array(device, x).place.flags.writeable


def test_a_copy_waits_for_what_its_library_has_under_way(device: cuda.Device) -> None:
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.full(NBYTES, 5, np.uint8))
        stage = stage_of_array(device, x)
        pull = stage.pull(None)
        for _ in range(20):
            pull.look()
        assert not pull.done
        release()
        pull.wait()
        assert (stage.buffer == 5).all()


@smoke
def test_a_push_waits_for_what_reads_the_array(device: cuda.Device) -> None:
    x = fakegpu.array(np.full(NBYTES, 5, np.uint8))
    with fakegpu.held_stream() as (_, release):
        copy = fakegpu.empty((NBYTES,), np.uint8)
        copy.copy_from(x)  # held
        x.memory.stream = copy.stream
        stage = stage_of_array(device, x)
        stage.buffer[:] = 6
        push = stage.push(Engine())
        fake_cuda.run_all()
        assert not push.done
        release()
        push.wait()
    assert (copy.get() == 5).all()
    assert (x.get() == 6).all()


def test_a_push_follows_the_pull_of_another_stage_of_the_memory(device: cuda.Device) -> None:
    for seed in range(10):
        fake_cuda.seed(seed)
        x = fakegpu.array(np.full(NBYTES, 5, np.uint8))
        source, target = stage_of_array(device, x), stage_of_array(device, x)
        target.follow(source.stage)
        target.buffer[:] = 6
        push = target.push(Engine())
        push.wait()
        assert (source.buffer == 5).all()
        assert fake_cuda.peek(x.pointer, NBYTES) == bytes([6]) * NBYTES


def test_whoever_asks_is_called_once_under_the_lock(device: cuda.Device) -> None:
    engine, called = Engine(), []
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.zeros(NBYTES, np.uint8))
        stage = stage_of_array(device, x)
        pull = stage.pull(engine)
        for name in "ab":
            pull.then(lambda copy, name=name: called.append((name, copy.done)))  # type: ignore[misc]
        assert called == []
        release()
        assert engine.entered.wait(5 * PATIENCE)
    assert called == [("a", True), ("b", True)]
    pull.then(lambda copy: called.append(("late", copy.done)))
    assert called[2:] == [("late", True)]


def test_a_copy_that_was_given_up_calls_nobody(device: cuda.Device) -> None:
    engine, called = Engine(), []
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.zeros(NBYTES, np.uint8))
        stage = stage_of_array(device, x)
        pull = stage.pull(engine)
        pull.then(lambda copy: called.append(copy))
        pull.cancel()
        release()
        assert engine.entered.wait(5 * PATIENCE)
    assert called == []


def test_a_call_that_is_given_up_does_not_go_on_though_its_copy_has_just_ended(
    device: cuda.Device,
) -> None:
    engine, seen = Engine(), []

    def call() -> Any:
        try:
            yield pull
            seen.append("went on")
        except TimeoutError:
            seen.append("given up")
            raise

    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.zeros(NBYTES, np.uint8))
        stage = stage_of_array(device, x)
        pull = stage.pull(engine)
        task = Task(call())
        with engine.lock:  # so that nobody else finds that it has ended
            task.start()
            release()
            fake_cuda.run_all()
            task.abort(TimeoutError())
    assert seen == ["given up"]
    assert isinstance(task.error, TimeoutError)


def test_an_error_of_the_gpu_is_that_of_the_copy(device: cuda.Device) -> None:
    engine, seen = Engine(), []
    x = fakegpu.array(np.zeros(NBYTES, np.uint8))
    stage = stage_of_array(device, x)
    pull = stage.pull(engine)
    fake_cuda.fail("cuEventQuery:*:719")
    pull.then(lambda copy: seen.append(copy.error))
    assert isinstance(seen[0], TransportError)
    assert "LAUNCH_FAILED" in str(seen[0])
    with pytest.raises(TransportError):
        pull.wait()
    fake_cuda.fail("")
    fake_cuda.run_all()


def test_what_was_raised_of_a_copy_keeps_no_array(device: cuda.Device) -> None:
    def call() -> None:
        x = fakegpu.array(np.ones(NBYTES, np.uint8))
        arrays.append(weakref.ref(x))
        staged = stage_of_array(device, x)
        buffer = staged.buffer  # keeps the stage, and that the copy; a frame keeps all of them
        copy = staged.pull(Engine())
        fake_cuda.run_all()
        fake_cuda.fail("cuEventQuery:*:719")
        copy.look()
        fake_cuda.fail("")
        assert copy.error is not None
        assert buffer is not None
        raise copy.error

    arrays: list[Any] = []
    with pytest.raises(TransportError, match="LAUNCH_FAILED"):
        call()
    gc.collect()
    assert arrays[0]() is None


@pytest.mark.parametrize("way", ["wait", "watch", "is_over"])
def test_a_copy_keeps_its_array_until_its_end_and_no_longer(device: cuda.Device, way: str) -> None:
    engine = Engine()
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.zeros(NBYTES, np.uint8))
        kept = weakref.ref(x)
        stage = stage_of_array(device, x)
        pull = stage.pull(engine)
        del x, stage
        gc.collect()
        assert kept() is not None
        if way == "wait":
            threading.Timer(0.05, release).start()
            pull.wait()
        elif way == "watch":
            pull.watch()
            release()
            assert engine.entered.wait(5 * PATIENCE)
        else:
            release()
            while not pull.is_over():
                pass
        gc.collect()
        assert kept() is None


def test_a_copy_that_is_just_being_begun_holds_up_no_others(
    device: cuda.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread begins one when the driver has just been told what this one waits for."""
    follow = cuda.Device.follow
    other = stage_of_array(device, fakegpu.array(np.ones(NBYTES, np.uint8)))
    fake_cuda.run_all()
    quick: list[Any] = []

    def meanwhile(device: cuda.Device, stream: int, mark: cuda.Mark) -> None:
        follow(device, stream, mark)
        quick.append(other.pull(None))

    monkeypatch.setattr(cuda.Device, "follow", meanwhile)
    with fakegpu.held_stream():
        x = fakegpu.array(np.zeros(NBYTES, np.uint8))
        stage = stage_of_array(device, x)
        slow = stage.pull(None)
        fake_cuda.run_all()
        assert [copy.is_over() for copy in quick] == [True]
        assert not slow.is_over()
    fake_cuda.run_all()


def test_the_stream_that_a_stage_uses_again_is_nobody_elses(
    device: cuda.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first copy waited for ends while another thread begins the second one."""
    copy = cuda.Device.copy
    other = stage_of_array(device, fakegpu.array(np.ones(NBYTES, np.uint8)))
    fake_cuda.run_all()
    streams: list[int] = []
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.zeros(NBYTES, np.uint8))
        stage = stage_of_array(device, x)
        stage.pull(None, 0, 100)

        def meanwhile(device: cuda.Device, stream: int, *args: Any, **named: Any) -> None:
            streams.append(stream)
            if len(streams) == 1:
                release()
                fake_cuda.run_all()
                other.pull(None)
            copy(device, stream, *args, **named)

        monkeypatch.setattr(cuda.Device, "copy", meanwhile)
        stage.pull(None, 100)
    fake_cuda.run_all()
    assert len(set(streams)) == 2


def test_many_who_wait_for_an_array_take_one_stream(device: cuda.Device) -> None:
    with fakegpu.held_stream():
        stage = stage_of_array(device, fakegpu.array(np.zeros(NBYTES, np.uint8)))
        pushes = [stage.push(None, at, at + 100) for at in range(0, 2000, 100)]
        before = len(copies.streams_of(device).pulls._streams)
        stage.push(None, 2000, 2100)
        assert len(copies.streams_of(device).pulls._streams) == before
        assert len({copy._side_stream for push in pushes for copy in push._others}) == 1  # type: ignore[union-attr]
        for push in pushes:
            push.cancel()
    fake_cuda.run_all()


def test_a_copy_that_ends_just_when_somebody_asks_tells(device: cuda.Device) -> None:
    """The stream's thread ends it after the question and before the answer is written down."""
    with fakegpu.held_stream():
        stage = stage_of_array(device, fakegpu.array(np.zeros(NBYTES, np.uint8)))
        copy = stage.pull(None)
        told: list[Any] = []

        class Meanwhile(deque[Any]):
            def append(self, callback: Any) -> None:
                copy.finish()
                super().append(callback)

        copy._callbacks = Meanwhile()
        copy.then(told.append)
        assert told == [copy]
    fake_cuda.run_all()


@pytest.mark.parametrize("is_given_up", [True, False], ids=["who gives it up", "who goes on"])
def test_a_push_that_another_thread_is_just_beginning_is_waited_for(
    device: cuda.Device, is_given_up: bool
) -> None:
    begins, goes_on, is_told = threading.Event(), threading.Event(), threading.Event()
    stage = stage_of_array(device, fakegpu.array(np.zeros(NBYTES, np.uint8)))

    def begin() -> GpuCopy:
        begins.set()
        assert goes_on.wait(60)
        return stage.pull(None)

    push = Push([], begin, goes_on=False)
    push.then(lambda _: is_told.set())
    first = threading.Thread(target=push.wait)
    second = threading.Thread(target=push.settle if is_given_up else lambda: push._go_on(None))
    first.start()
    assert begins.wait(60)
    second.start()
    second.join(0.1)
    returned = not second.is_alive()
    goes_on.set()
    first.join()
    second.join()
    assert not returned
    if is_given_up:
        assert not is_told.is_set()
    else:
        assert is_told.wait(
            60
        )  # maybe by a thread of the stream, which sees the end in its own time


def test_slow_arrays_hold_up_no_others(device: cuda.Device) -> None:
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(4):
            _, release = stack.enter_context(fakegpu.held_stream())
            x = fakegpu.array(np.zeros(NBYTES, np.uint8))
            stage = stage_of_array(device, x)
            slow.append((stage, stage.pull(None, 0, 100), stage.pull(None, 100), release))
        fakegpu.use_stream(fakegpu.new_stream())
        other = stage_of_array(device, fakegpu.array(np.ones(NBYTES, np.uint8)))
        quick = other.pull(None)
        fake_cuda.run_all()
        assert quick.is_over()
        assert not any(copy.is_over() for _, *copies, _ in slow for copy in copies)
        for *_, release in slow:
            release()
        fake_cuda.run_all()
