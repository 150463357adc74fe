"""What a machine is made of, from trees of /sys of four machines that are not alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sysfs_trees import unpack
from tiers import smoke

from pycoll._tools.cli import main
from pycoll._topology.machine import list_text, parse_list, perceive

HERE = Path(__file__).parent

XEON = """\
2 sockets, 2 NUMA nodes, 64 cores, 128 CPUs, 8 GPUs, 2 network devices
├─ socket 0
│  └─ NUMA node 0, 503 GiB
│     ├─ L3 60 MiB: 32 cores, CPUs 0-31,64-95
│     ├─ GPU 0000:1b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
│     ├─ GPU 0000:2b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
│     ├─ GPU 0000:3b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
│     ├─ GPU 0000:4b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
│     └─ ibs0, mlx5_0, up, 400 Gbit/s
└─ socket 1
   └─ NUMA node 1, 503 GiB
      ├─ L3 60 MiB: 32 cores, CPUs 32-63,96-127
      ├─ GPU 0000:5b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
      ├─ GPU 0000:6b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
      ├─ GPU 0000:7b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
      ├─ GPU 0000:8b:00.0, NVIDIA 2330, PCIe 32.0 GT/s x16
      └─ ibs1, mlx5_1, up, 400 Gbit/s
"""

EPYC = """\
1 socket, 5 NUMA nodes, 32 cores, 32 CPUs, 4 network devices
├─ socket 0
│  ├─ NUMA node 0, 63 GiB
│  │  ├─ L3 16 MiB: 4 cores, CPUs 0-3
│  │  └─ L3 16 MiB: 4 cores, CPUs 4-7
│  ├─ NUMA node 1, 63 GiB
│  │  ├─ L3 16 MiB: 4 cores, CPUs 8-11
│  │  ├─ L3 16 MiB: 4 cores, CPUs 12-15
│  │  └─ ibp9, RDMA, 56 Gbit/s
│  ├─ NUMA node 2, 63 GiB
│  │  ├─ L3 16 MiB: 4 cores, CPUs 16-19
│  │  ├─ L3 16 MiB: 4 cores, CPUs 20-23
│  │  ├─ enp0, up, 25 Gbit/s
│  │  └─ enp1, up, 25 Gbit/s
│  └─ NUMA node 3, 63 GiB
│     ├─ L3 16 MiB: 4 cores, CPUs 24-27
│     └─ L3 16 MiB: 4 cores, CPUs 28-31
├─ NUMA node 4, 128 GiB
└─ bond0, up, 50 Gbit/s
"""

ARM = """\
8 cores, 8 CPUs, 1 network device
├─ L2 512 KiB: 4 cores, CPUs 0-3
├─ L2 2 MiB: 4 cores, CPUs 4-7
└─ eth0, up, 10 Gbit/s
"""

VIRTUAL = """\
1 socket, 1 NUMA node, 2 cores, 2 CPUs, 1 network device
├─ socket 0
│  └─ NUMA node 0, 24 GiB
│     └─ L3 32 MiB: 2 cores, CPUs 0-1
└─ eth0, up
"""

SHOWN = {
    "two_socket_xeon": XEON,
    "epyc_caches": EPYC,
    "arm_board": ARM,
    "virtual_machine": VIRTUAL,
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_machine_is_shown_as_it_is_made(name: str, tmp_path: Path, capsys: Any) -> None:
    tree = str(unpack(HERE / f"{name}.sysfs", tmp_path))
    assert main(["topology", "--sysfs", tree]) == 0
    assert capsys.readouterr().out == SHOWN[name]


@smoke
def test_json_has_all_that_is_shown(tmp_path: Path, capsys: Any) -> None:
    tree = str(unpack(HERE / "two_socket_xeon.sysfs", tmp_path))
    assert main(["topology", "--json", "--sysfs", tree]) == 0
    said = json.loads(capsys.readouterr().out)
    [node] = said["parts"][1]["parts"]
    assert node["kind"] == "NUMA node"
    assert (node["number"], node["nbytes"], node["cpus"]) == (1, 527942336 << 10, "32-63,96-127")
    assert node["parts"][0]["cores"][0] == "32,96"
    assert node["devices"][-1] == {
        **{"kind": "network", "name": "ibs1", "text": "mlx5_1, up", "node": 1, "gigabits": 400.0}
    }


def test_a_drawing_has_a_box_for_each_part_and_a_square_for_each_core(tmp_path: Path) -> None:
    tree = unpack(HERE / "epyc_caches.sysfs", tmp_path / "sys")
    drawing = tmp_path / "machine.svg"
    assert main(["topology", "--sysfs", str(tree), "--svg", str(drawing)]) == 0
    root = ElementTree.fromstring(drawing.read_text())
    name = "{http://www.w3.org/2000/svg}"
    boxes = [each.get("class") for each in root.iter(f"{name}rect")]
    assert boxes.count("c1") == 32  # cores
    assert boxes.count("o") == 1 + 1 + 5 + 8  # frames: machine, socket, nodes, caches
    words = [each.text for each in root.iter(f"{name}text")]
    assert words.count("L3 16 MiB") == 8
    assert "enp1, up, 25 Gbit/s" in words


def test_this_machine_has_the_cpus_that_are_online() -> None:
    online = Path("/sys/devices/system/cpu/online").read_text().strip()
    found = perceive()
    assert list_text(found.cpus) == online
    assert found.count("CPU") == len(found.cpus)


def test_numbers_are_read_and_written_as_the_kernel_does() -> None:
    assert parse_list("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    assert list_text([0, 1, 2, 8, 10, 11]) == "0-2,8,10-11"
    assert parse_list("") == set()


def test_a_folder_that_is_no_sys_is_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["topology", "--sysfs", str(tmp_path)])
    assert "has no CPUs (devices/system/cpu): is it a /sys?" in capsys.readouterr().err
