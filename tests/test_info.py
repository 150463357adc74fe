"""What `pycoll info` says of GPUs; tests of what it says of RDMA are with those of the devices."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import fake_cuda
import pytest

from pycoll import cli, cuda

needs_bindings = pytest.mark.skipif(
    not importlib.util.find_spec("cuda"), reason="needs cuda-bindings: pip install '.[cuda]'"
)


def info(environment: dict[str, str], before: str = "pass") -> list[str]:
    """The lines about GPUs, printed by a process of its own: it loads a driver only once."""
    program = f"import sys; {before}; from pycoll.cli import main; sys.exit(main(['info']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line.startswith("GPU")]


@needs_bindings
def test_info_shows_the_gpus(fake_driver: Path) -> None:
    assert info(fake_cuda.environment(fake_driver, devices=2)) == [
        "GPU 0            Fake GPU 0, 16.0 GiB, usable",
        "GPU 1            Fake GPU 1, 16.0 GiB, usable",
    ]


@needs_bindings
def test_info_says_why_no_gpu_can_be_used(fake_driver: Path) -> None:
    (line,) = info(fake_cuda.environment(fake_driver, fail="cuInit:*:803"))
    assert line.startswith("GPUs             not usable: the NVIDIA driver cannot be used: ")
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in line


@needs_bindings
def test_info_says_what_a_gpu_answers_that_is_ill(fake_driver: Path) -> None:
    (line,) = info(fake_cuda.environment(fake_driver, devices=2, fail="cuDeviceGetName:2:999"))
    assert line.startswith("GPUs             not usable: CUDA: cuDeviceGetName failed: ")


def test_info_says_what_to_install() -> None:
    assert info({}, "sys.modules['cuda'] = None") == [
        f"GPUs             not usable: the package cuda-bindings is missing. {cuda.INSTALL}"
    ]


def test_info_does_not_wait_for_a_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(cli, "GPU_DEADLINE_S", 0.05)
    monkeypatch.setattr(cuda, "describe", answer.wait)
    try:
        rows = cli._gpus()
    finally:
        answer.set()
    assert rows == [("GPUs", "not usable: the driver has not answered for 0.05 s")]
