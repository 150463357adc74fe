"""Which RDMA devices there are and which is used, in made-up trees of what the kernel shows."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tiers import smoke

from pycoll._launcher import cli as launcher
from pycoll._tools import cli
from pycoll._transports.rdma_devices import ChosenDevice, Gid, best_gid, find, ports, usable_gid

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
IPV4 = "0000:0000:0000:0000:0000:ffff:c000:0201"
OTHER_IPV4 = "0000:0000:0000:0000:0000:ffff:c000:0202"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
UNSET = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"

# What soft-RoCE shows: each address once.
SOFT = {0: (LINK_LOCAL, V2), 1: (IPV4, V2), 2: (UNSET, None)}
# What a card shows: each address once for each version.
CARD = {0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2), 2: (IPV4, V1), 3: (IPV4, V2)}


class Machine:
    """A root folder with the files of RDMA devices."""

    def __init__(self, root: Path) -> None:
        self.path = root
        self.root = str(root)

    def port(
        self,
        device: str,
        number: int = 1,
        gids: Mapping[int, tuple[str, str | None]] = SOFT,
        *,
        netdev: str | None = "eth0",
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        lid: str = "0x0",
    ) -> Path:
        """Add a port, and its device if it is new."""
        folder = self.path / "sys/class/infiniband" / device
        if not folder.exists():
            self.device_file(device)
        place = folder / "ports" / str(number)
        values = {"state": state, "link_layer": link_layer, "lid": lid, "rate": "100 Gb/sec (4X)"}
        for name, value in values.items():
            write(place / name, value)
        for index, (address, kind) in gids.items():
            write(place / "gids" / str(index), address)
            if kind is not None:
                write(place / "gid_attrs/types" / str(index), kind)
            if netdev is not None:
                write(place / "gid_attrs/ndevs" / str(index), netdev)
        write(folder / "node_type", "1: CA")
        return place

    def device_file(self, device: str) -> None:
        verbs = self.path / "sys/class/infiniband_verbs"
        write(verbs / "abi_version", "6")
        name = f"uverbs{len(list(verbs.iterdir())) - 1}"
        write(verbs / name / "ibdev", device)
        write(self.path / "dev/infiniband" / name, "")

    def infiniband(self, device: str, number: int = 1, *, state: str = "4: ACTIVE") -> None:
        """Add a port as mlx5 shows it: an address, then places that have only the prefix."""
        gids = {
            0: ("fe80:0000:0000:0000:ec0d:9a03:0012:3456", V1),
            1: ("fe80:0000:0000:0000:0000:0000:0000:0000", V1),
        }
        layer = "InfiniBand"
        self.port(device, number, gids, netdev=None, state=state, link_layer=layer, lid="0x1a")

    def find(self, **environ: str) -> ChosenDevice | str:
        return find(environ, self.root)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


@pytest.fixture
def only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder from which modules can be imported."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


@pytest.fixture
def pyverbs(only_folder: Path) -> Path:
    """A pyverbs that would be found, and fails if somebody imports it."""
    for name in ("__init__.py", "device.py"):
        write(only_folder / "pyverbs" / name, "raise AssertionError('imported')")
    return only_folder / "pyverbs"


# ---------------------------------------------------------------- what there is


def test_a_machine_without_devices_has_no_ports(machine: Machine) -> None:
    assert ports(machine.root) == []


@smoke
def test_a_port_is_what_the_kernel_says(machine: Machine) -> None:
    machine.port("rxe0")
    (port,) = ports(machine.root)
    assert port == (
        "rxe0",
        1,
        "ACTIVE",
        "Ethernet",
        "100 Gb/sec (4X)",
        0,
        (
            Gid(0, "fe80::5054:ff:fe12:3456", V2, "eth0"),
            Gid(1, "::ffff:192.0.2.1", V2, "eth0"),
        ),
    )


def test_an_infiniband_port_has_a_lid_and_a_gid_without_an_interface(machine: Machine) -> None:
    machine.infiniband("mlx5_0")
    (port,) = ports(machine.root)
    assert (port.link_layer, port.lid) == ("InfiniBand", 0x1A)
    assert port.gids == (Gid(0, "fe80::ec0d:9a03:12:3456", V1, ""),)


def test_ports_are_in_the_order_of_their_numbers(machine: Machine) -> None:
    for device, number in (("mlx5_10", 1), ("mlx5_2", 10), ("mlx5_2", 9), ("bnxt_re0", 1)):
        machine.port(device, number)
    assert [port[:2] for port in ports(machine.root)] == [
        ("bnxt_re0", 1),
        ("mlx5_2", 9),
        ("mlx5_2", 10),
        ("mlx5_10", 1),
    ]


def test_files_that_are_missing_or_make_no_sense_are_left_out(machine: Machine) -> None:
    gids = {0: ("not an address", V2), 1: ("fe80:01", V2), 2: (IPV4, None), 3: (IPV4, V2)}
    place = machine.port("rxe0", gids=gids, lid="?")
    (place / "gids/6").mkdir()
    (place / "rate").unlink()
    (place / "state").write_bytes(b"\xff\xfe")
    (port,) = ports(machine.root)
    assert [gid.table_index for gid in port.gids] == [3]
    assert (port.lid, port.rate) == (0, "")
    assert "not ACTIVE" in str(usable_gid(port, {}, machine.root))


# ---------------------------------------------------------------- which is used


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (SOFT, 1),
        (CARD, 3),
        ({0: (IPV6, V2), 1: (IPV4, V1), 2: (IPV4, V2), 3: (OTHER_IPV4, V2)}, 2),
        ({0: (LINK_LOCAL, V2), 1: (IPV4, V1), 2: (IPV6, V2)}, 2),
        ({0: (LINK_LOCAL, V2), 1: (IPV6, V1), 2: (IPV4, V1)}, 2),
        ({0: (LINK_LOCAL, V2), 1: (LINK_LOCAL.replace("fe80", "febf"), V2)}, None),
        ({0: (IPV6, V1)}, None),
        ({}, None),
    ],
)
def test_the_best_address_over_ethernet(
    gids: dict[int, tuple[str, str | None]], index: int | None, machine: Machine, pyverbs: Path
) -> None:
    machine.port("rxe0", gids=gids)
    (port,) = ports(machine.root)
    best = best_gid(port)
    assert (best and best.table_index) == index
    chosen = machine.find()
    assert (None if isinstance(chosen, str) else chosen.gid) == best


def test_the_first_usable_port_is_used(machine: Machine, pyverbs: Path) -> None:
    machine.port("mlx5_0", 1, state="1: DOWN")
    machine.port("mlx5_0", 2, gids={0: (LINK_LOCAL, V2)})
    machine.port("mlx5_1", 1, gids=CARD)
    machine.port("mlx5_2", 1)
    gid = Gid(3, "::ffff:192.0.2.1", V2, "eth0")
    assert machine.find() == ChosenDevice("mlx5_1", 1, gid, "Ethernet", 0)


def test_over_infiniband_the_first_address_is_used(machine: Machine, pyverbs: Path) -> None:
    machine.infiniband("mlx5_0")
    gid = Gid(0, "fe80::ec0d:9a03:12:3456", V1, "")
    assert machine.find() == ChosenDevice("mlx5_0", 1, gid, "InfiniBand", 0x1A)


@pytest.mark.parametrize(
    ("wanted", "used"),
    [
        ("", ("mlx5_0", 1)),
        ("mlx5_0", ("mlx5_0", 1)),
        ("mlx5_0:2", ("mlx5_0", 2)),
        ("mlx5_1", ("mlx5_1", 1)),
    ],
)
def test_the_user_may_name_the_device(
    wanted: str, used: tuple[str, int], machine: Machine, pyverbs: Path
) -> None:
    for place in (("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1)):
        machine.port(*place)
    assert machine.find(PYCOLL_RDMA_DEVICE=wanted)[:2] == used


def test_the_user_may_choose_any_address(machine: Machine, pyverbs: Path) -> None:
    machine.port("rxe0")
    chosen = machine.find(PYCOLL_RDMA_GID="0")
    assert isinstance(chosen, ChosenDevice)
    assert chosen.gid == Gid(0, "fe80::5054:ff:fe12:3456", V2, "eth0")
    assert machine.find(PYCOLL_RDMA_GID="") == machine.find()


# ---------------------------------------------------------------- why there is none


def test_no_device(machine: Machine, pyverbs: Path) -> None:
    expected = (
        "this machine has no RDMA device (soft-RoCE makes one: "
        "rdma link add rxe0 type rxe netdev eth0)"
    )
    assert machine.find() == expected
    (machine.path / "sys/class/infiniband").mkdir(parents=True)
    assert machine.find() == expected


@pytest.mark.parametrize("wanted", ["mlx5_9", "mlx5_0:2", "mlx5_0:", ":1", "mlx5_0:x"])
def test_a_device_that_does_not_exist_is_told_with_those_that_do(
    wanted: str, machine: Machine, pyverbs: Path
) -> None:
    machine.port("mlx5_0")
    machine.port("mlx5_1")
    assert machine.find(PYCOLL_RDMA_DEVICE=wanted) == (
        f"PYCOLL_RDMA_DEVICE={wanted} is no device or port here; there are mlx5_0:1, mlx5_1:1"
    )


@pytest.mark.parametrize("wanted", ["2", "abc", "-1"])
def test_an_address_that_does_not_exist_is_told_with_those_that_do(
    wanted: str, machine: Machine, pyverbs: Path
) -> None:
    machine.port("rxe0")
    expected = f"rxe0 port 1: PYCOLL_RDMA_GID={wanted} is no GID of it; there are 0, 1"
    assert machine.find(PYCOLL_RDMA_GID=wanted) == expected


def test_no_pyverbs(machine: Machine, only_folder: Path) -> None:
    machine.port("rxe0", state="1: DOWN")  # which is told later
    reason = machine.find()
    assert isinstance(reason, str)
    assert reason.startswith("pyverbs is missing: apt install python3-pyverbs ibverbs-providers")
    assert "dnf install python3-pyverbs" in reason


def test_a_pyverbs_for_another_python(machine: Machine, pyverbs: Path) -> None:
    machine.port("rxe0")
    (pyverbs / "device.py").rename(pyverbs / "device.cpython-30-pdp11-linux-gnu.so")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert machine.find() == (
        f"pyverbs in {pyverbs} is not for Python {version}: run the distribution's own Python"
    )


def test_no_device_file(machine: Machine, pyverbs: Path) -> None:
    machine.port("rxe0", state="1: DOWN")
    path = machine.path / "dev/infiniband/uverbs0"
    path.unlink()
    assert machine.find() == (
        f"rxe0 port 1: {path} is missing (in a container: --device=/dev/infiniband)"
    )
    (machine.path / "sys/class/infiniband_verbs/uverbs0/ibdev").write_text("mlx5_0\n")
    assert machine.find() == "rxe0 port 1: it has no device file: modprobe ib_uverbs"


def test_a_device_file_that_cannot_be_opened(machine: Machine, pyverbs: Path) -> None:
    machine.port("rxe0")
    path = machine.path / "dev/infiniband/uverbs0"
    path.unlink()
    path.mkdir()
    assert machine.find() == f"rxe0 port 1: {path} cannot be opened: Is a directory"


@pytest.fixture
def unprivileged() -> Iterator[Machine]:
    """A machine with a device, of which a user without rights can see everything."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        machine = Machine(Path(folder))
        machine.port("rxe0")
        if os.geteuid() != 0:
            yield machine
            return
        os.chown(machine.path / "dev/infiniband/uverbs0", 65534, 54321)
        os.seteuid(65534)
        try:
            yield machine
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("mode", [0o000, 0o060])
def test_no_permission_to_open_the_device_file(mode: int, unprivileged: Machine) -> None:
    path = unprivileged.path / "dev/infiniband/uverbs0"
    path.chmod(mode)  # the owner has none
    group = "54321" if os.getuid() == 0 else path.group()
    todo = f"join the group {group}, or " if mode else ""
    (port,) = ports(unprivileged.root)
    assert usable_gid(port, {}, unprivileged.root) == (
        f'no permission to open {path}: {todo}udev rule KERNEL=="uverbs*", MODE="0666"'
    )


@pytest.mark.parametrize(
    ("state", "layer", "todo"),
    [
        ("1: DOWN", "Ethernet", "state DOWN, not ACTIVE: ip link set eth0 up"),
        ("1: DOWN", "InfiniBand", "state DOWN, not ACTIVE: look at its cable and switch"),
        (
            "2: INIT",
            "InfiniBand",
            "state INIT, not ACTIVE: it waits for a subnet manager (opensm)",
        ),
    ],
)
def test_a_port_that_is_not_active(
    state: str, layer: str, todo: str, machine: Machine, pyverbs: Path
) -> None:
    machine.port("mlx5_0", state=state, link_layer=layer)
    assert machine.find() == f"mlx5_0 port 1: {todo}"


def test_a_port_that_is_not_active_and_has_no_addresses(machine: Machine, pyverbs: Path) -> None:
    machine.port("mlx5_0", gids={}, state="1: DOWN")
    assert machine.find() == "mlx5_0 port 1: state DOWN, not ACTIVE: ip link set INTERFACE up"


def test_no_address_on_the_interface(machine: Machine, pyverbs: Path) -> None:
    machine.port("rxe0", gids={0: (LINK_LOCAL, V2), 1: (UNSET, None)}, netdev="ens1")
    assert machine.find() == (
        "rxe0 port 1: no IPv4 or global IPv6 address on ens1: ip address add A.B.C.D/24 dev ens1"
    )


def test_an_infiniband_port_without_its_address(machine: Machine, pyverbs: Path) -> None:
    machine.port("mlx5_0", gids={1: (IPV6, V1)}, link_layer="InfiniBand")
    assert machine.find() == "mlx5_0 port 1: its GID 0 is not set"


@pytest.mark.parametrize(
    ("node_type", "layer", "named"),
    [("4: RNIC", "Ethernet", "iWARP"), ("7: unspecified", "Unspecified", "Unspecified")],
)
def test_a_device_of_another_kind(
    node_type: str, layer: str, named: str, machine: Machine, pyverbs: Path
) -> None:
    machine.port("siw0", link_layer=layer)
    write(machine.path / "sys/class/infiniband/siw0/node_type", node_type)
    expected = f"siw0 port 1: its link layer is {named}, not InfiniBand or RoCE"
    assert machine.find() == expected


def test_of_several_ports_the_reason_of_one_that_is_active_is_told(
    machine: Machine, pyverbs: Path
) -> None:
    machine.port("mlx5_0", state="1: DOWN")
    machine.port("mlx5_1", gids={})
    machine.port("mlx5_2", state="1: DOWN")
    assert machine.find() == (
        "mlx5_1 port 1: no IPv4 or global IPv6 address on INTERFACE: "
        "ip address add A.B.C.D/24 dev INTERFACE (and 2 more: pycoll info)"
    )


# ---------------------------------------------------------------- what commands say


@smoke
def test_pycoll_run_refuses_rdma_where_it_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The device that ranks will look for is the one that counts.
    monkeypatch.delenv("PYCOLL_RDMA_DEVICE", raising=False)
    exports = ["-x", "PYCOLL_RDMA_DEVICE=no_such"]
    assert launcher.main(["-n", "2", "--transport", "rdma", *exports, __file__]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    reason = find({"PYCOLL_RDMA_DEVICE": "no_such"})
    assert err == f"pycoll-run: --transport rdma: {reason}; use --transport auto\n"


def test_pycoll_bench_refuses_rdma_where_it_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_RDMA_DEVICE", "no_such")
    assert cli.main(["bench", "barrier", "--transport", "tcp,rdma"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"pycoll bench: rdma: {find(os.environ)}; use --transport auto\n"


def test_pycoll_info_has_a_line_for_rdma(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_RDMA_DEVICE", "no_such")
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"transport rdma   not usable: {find(os.environ)}" in lines
    ports_told = [line for line in lines if line.startswith("RDMA ")]
    assert len(ports_told) == len(ports())


def test_pycoll_info_shows_ports_addresses_and_faults(machine: Machine, pyverbs: Path) -> None:
    machine.infiniband("mlx5_0", state="2: INIT")
    machine.port("rxe0")
    rows = cli._rdma_ports({}, machine.root)
    assert rows == [
        ("RDMA mlx5_0:1", "INIT    InfiniBand  100 Gb/sec (4X), LID 26"),
        ("  GID 0", "IB/RoCE v1 fe80::ec0d:9a03:12:3456                 "),
        ("", "not usable: state INIT, not ACTIVE: it waits for a subnet manager (opensm)"),
        ("RDMA rxe0:1", "ACTIVE  Ethernet    100 Gb/sec (4X)"),
        ("  GID 0", "RoCE v2    fe80::5054:ff:fe12:3456                 eth0"),
        ("  GID 1", "RoCE v2    ::ffff:192.0.2.1                        eth0  <- used"),
    ]
    assert cli._rdma_ports({}, str(machine.path / "elsewhere")) == []
    assert str(machine.find()) == "rxe0 port 1, GID 1 ::ffff:192.0.2.1 (RoCE v2)"
