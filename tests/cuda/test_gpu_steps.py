"""What steps come out of a schedule on arrays on a GPU (staged_run, cuda_ipc_run)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from tiers import smoke

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

from pycoll._cuda import cuda
from pycoll._cuda.staging import Stage
from pycoll._gpu.cuda_ipc_run import offered
from pycoll._gpu.staged_run import staged
from pycoll._runtime.binding import Binding
from pycoll._runtime.external import External, ExternalSchedule
from pycoll.schedule import Copy, Recv, Send, Step, compile_schedule, recv_reduce

NBYTES = 64
"""Of a chunk."""


@pytest.fixture
def device(fake_driver: Path) -> Iterator[cuda.Device]:
    """GPU 0."""
    fake_cuda.load(fake_driver)
    fake_cuda.reset()
    yield cuda.device(0)
    fake_cuda.run_all()


def chunks(
    device: cuda.Device, count: int, step: int = 1, is_target: bool = False
) -> list[memoryview]:
    """The staging buffer of an array on a GPU, cut into chunks."""
    x = fakegpu.array(np.zeros(count * NBYTES * step, np.uint8))[::step]
    ready = device.mark(x.stream)
    stage = Stage(device, x.pointer, x.dtype, x.shape, x.strides, ready, x, is_target=is_target)
    buffer = stage.make_buffer().data
    return [buffer[i * NBYTES : (i + 1) * NBYTES] for i in range(count)]


def on_host(count: int) -> list[memoryview]:
    """As many chunks in host memory."""
    return [memoryview(bytearray(NBYTES)) for _ in range(count)]


def bound(source: list[Any], target: list[Any]) -> Binding:
    """Chunks that are somewhere at the start, and must be somewhere at the end."""
    parts = [(view,) if view is not None else None for view in source]
    return Binding(nbytes=[NBYTES] * len(source), source=parts, target=target)


def name(step: Step | External) -> str:
    """What a step does, and to which chunk."""
    if not isinstance(step, External):
        return f"{type(step).__name__} {step.chunk}"
    assert isinstance(step.start, partial)
    shown = [x for x in step.start.args if not isinstance(x, Stage)]
    return " ".join([step.start.func.__name__.strip("_"), *map(str, shown)])


def hazards(table: ExternalSchedule) -> dict[str, list[str]]:
    """For each step those that wait for it."""
    names = [name(step) for step in table.steps]
    return {
        names[i]: sorted(names[later] for later in table.successors[i]) for i in range(len(names))
    }


def ends_last(table: ExternalSchedule) -> list[str]:
    return [name(step) for step in table.steps if isinstance(step, External) and step.at_end]


# --- staged --------------------------------------------------------------------------------------


@smoke
def test_a_chunk_is_pulled_before_its_first_use_and_pushed_after_its_last(
    device: cuda.Device,
) -> None:
    schedule = compile_schedule([Send(1, 1), *recv_reduce(1, 0), Send(1, 0), Recv(1, 1)])
    table = staged(schedule, bound(chunks(device, 2), chunks(device, 2, is_target=True)))
    assert [name(step) for step in table.steps[:4]] == [
        "pull 1 0",  # in the order of first use
        "pull 0 0",
        "push 1",
        "push 0",
    ]
    assert hazards(table) == {
        "pull 1 0": ["Recv 1", "Send 1"],
        "pull 0 0": ["Reduce 0", "Send 0"],  # the receive goes to scratch memory
        "Send 1": ["Recv 1", "push 1"],
        "Recv 0": ["Reduce 0"],
        "Reduce 0": ["Send 0", "push 0"],
        "Send 0": ["push 0"],
        "Recv 1": ["push 1"],
        "push 0": [],
        "push 1": [],
    }
    assert ends_last(table) == ["push 1", "push 0"]


def test_what_no_step_uses_is_pulled_and_then_pushed(device: cuda.Device) -> None:
    schedule = compile_schedule([Recv(1, 1)])
    binding = bound([chunks(device, 1)[0], None], chunks(device, 2, is_target=True))
    assert hazards(staged(schedule, binding)) == {
        "pull 0 0": ["push 0"],
        "Recv 1": ["push 1"],
        "push 0": [],
        "push 1": [],
    }


def test_only_what_is_on_a_gpu_is_copied(device: cuda.Device) -> None:
    schedule = compile_schedule([Copy(0, 1), Send(1, 1)])
    to_gpu = staged(schedule, bound([*on_host(1), None], [None, *chunks(device, 1)]))
    assert hazards(to_gpu) == {"Copy 1": ["Send 1", "push 1"], "Send 1": ["push 1"], "push 1": []}
    from_gpu = staged(schedule, bound([*chunks(device, 1), None], [None, *on_host(1)]))
    assert hazards(from_gpu) == {"pull 0 0": ["Copy 1"], "Copy 1": ["Send 1"], "Send 1": []}
    assert staged(schedule, bound([*on_host(1), None], [None, None])) == ExternalSchedule(*schedule)


def test_what_has_gaps_is_left_for_the_end(device: cuda.Device) -> None:
    schedule = compile_schedule([Recv(1, 0)])
    binding = bound([None], chunks(device, 1, step=2, is_target=True))
    assert staged(schedule, binding) == ExternalSchedule(*schedule)


# --- offered --------------------------------------------------------------------------------------


def test_sends_are_offered_and_nothing_is_pulled(device: cuda.Device) -> None:
    schedule = compile_schedule([Send(1, 0), Send(2, 0), Recv(1, 1)])
    x = chunks(device, 1)
    binding = bound([*x, None], chunks(device, 2, is_target=True))
    table, on_gpu = offered(schedule, binding)
    assert on_gpu == binding._replace(on_gpu=True)
    found = hazards(table)
    everything = sorted(["offer 1 (0,) 0", "offer 2 (0,) 0", "Recv 1", "put 0"])
    assert found.pop("ready") == everything
    assert found == {
        "offer 1 (0,) 0": ["put 0"],
        "offer 2 (0,) 0": ["put 0"],
        "put 0": [],
        "Recv 1": ["push (1,)"],
        "push (1,)": [],
    }
    assert [name(step) for step in table.steps].count("ready") == 2
    assert ends_last(table) == ["put 0"]


def test_chunks_that_travel_together_are_put_in_their_places_first(device: cuda.Device) -> None:
    schedule = compile_schedule([Recv(2, 1), Send(1, (0, 1))])
    binding = bound([*chunks(device, 1), None], chunks(device, 2, is_target=True))
    table, _ = offered(schedule, binding)
    found = hazards(table)
    assert found["put 0"] == ["offer 1 (0, 1) 0"]
    assert found["Recv 1"] == ["offer 1 (0, 1) 0", "push (1,)"]
    assert found["push (1,)"] == ["offer 1 (0, 1) 0"]
    assert ends_last(table) == []


def test_a_copy_stays_on_the_gpu(device: cuda.Device) -> None:
    schedule = compile_schedule([Copy(0, 1)])
    binding = bound([*chunks(device, 1), None], [None, *chunks(device, 1, is_target=True)])
    table, _ = offered(schedule, binding)
    assert {name(step) for step in table.steps} == {"ready", "copy 0 1"}
