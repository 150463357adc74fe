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
from patience import PATIENCE
from tiers import smoke

from pycoll._cuda import cuda
from pycoll._cuda.cuda import DirectAccess
from pycoll._tools import cli
from pycoll._transports import rdma_devices, verbs
from pycoll._transports.verbs_errors import VerbsError

needs_bindings = pytest.mark.skipif(
    not importlib.util.find_spec("cuda"), reason="needs cuda-bindings: pip install '.[cuda]'"
)


def info(environment: dict[str, str], before: str = "pass") -> list[str]:
    """The lines about GPUs, printed by a process of its own: it loads a driver only once."""
    program = f"import sys; {before}; from pycoll._tools.cli import main; sys.exit(main(['info']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line.startswith("GPU")]


@needs_bindings
def test_info_shows_the_gpus(fake_driver: Path) -> None:
    environment = fake_cuda.environment(fake_driver, devices=2) | {"PYCOLL_GPUDIRECT": "0"}
    assert info(environment) == [
        "GPU 0            Fake GPU 0, 16.0 GiB, usable",
        "GPU 1            Fake GPU 1, 16.0 GiB, usable",
        "GPU reductions   usable, among ranks of a host",
        "GPUDirect RDMA   not used: PYCOLL_GPUDIRECT=0",
    ]


FULL, SENDS, NONE = (
    DirectAccess(True, True, False),
    DirectAccess(True, False, True),
    DirectAccess(False, False, True),
)


@pytest.mark.parametrize(
    ("directs", "device", "expected"),
    [
        ([FULL], "no device", "not used: no RDMA device can be used"),
        ([NONE], "knows", "not used: the NVIDIA driver exports no memory as dma-bufs here"),
        ([FULL], "old", "not used: pyverbs, the kernel or mlx5_0 does not know dma-bufs"),
        ([FULL], "broken", "not used: mlx5_0 cannot be opened: no"),
        (
            [FULL, SENDS, NONE],
            "knows",
            "mlx5_0 with GPU 0, GPU 1 (only to send: no flush of writes), "
            "if a trial succeeds when it is first needed",
        ),
    ],
)
def test_info_says_whether_rdma_reaches_the_gpus(
    directs: list[DirectAccess], device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DevicePort:
        def __init__(self, name: str, *_: int) -> None:
            if device == "broken":
                raise VerbsError(f"{name} cannot be opened", OSError("no"))

        def can_register_dmabuf(self) -> bool:
            return device == "knows"

        def close(self) -> None:
            closed.append(self)

    closed: list[DevicePort] = []
    gid = rdma_devices.Gid(0, "::ffff:192.0.2.1", "RoCE v2", "eth0")
    choice = rdma_devices.ChosenDevice("mlx5_0", 1, gid, rdma_devices.ETHERNET, 0)
    monkeypatch.setattr(
        rdma_devices, "find", lambda _: "no device" if device == "no device" else choice
    )
    monkeypatch.setattr(verbs, "DevicePort", DevicePort)
    gpus = [cuda.Gpu(n, "some GPU", 1 << 30, "usable", direct) for n, direct in enumerate(directs)]
    assert cli._gpudirect(gpus, {}) == expected
    assert len(closed) == (device in ("knows", "old") and directs != [NONE])


@needs_bindings
def test_info_says_why_no_gpu_can_be_used(fake_driver: Path) -> None:
    (line,) = info(fake_cuda.environment(fake_driver, fail="cuInit:*:803"))
    assert line.startswith("GPUs             not usable: the NVIDIA driver cannot be used: ")
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in line


@needs_bindings
def test_info_says_what_a_gpu_answers_that_is_ill(fake_driver: Path) -> None:
    (line,) = info(fake_cuda.environment(fake_driver, devices=2, fail="cuDeviceGetName:2:999"))
    assert line.startswith("GPUs             not usable: CUDA: cuDeviceGetName failed: ")


@smoke
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
