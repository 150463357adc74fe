"""The virtual machines of tests/rdma, as far as it shows without starting one."""

from __future__ import annotations

import importlib.util
import lzma
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

FOLDER = Path(__file__).parents[1] / "rdma"
_spec = importlib.util.spec_from_file_location("rdma_vm", FOLDER / "vm.py")
assert _spec is not None
assert _spec.loader is not None
vm = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(vm)


def test_the_newest_kernel_is_the_one_with_the_highest_numbers() -> None:
    names = ["6.1.0-9-amd64", "6.1.0-56-amd64", "5.10.0-99-amd64"]
    assert vm.newest(map(Path, names)) == Path("6.1.0-56-amd64")
    assert vm.newest([]) is None


def module(*needed: str) -> bytes:
    return b"\x7fELF...\0license=GPL\0depends=%s\0name=x\0" % ",".join(needed).encode()


def test_modules_come_once_and_after_what_they_need() -> None:
    files = {"rxe": module("udp", "core"), "udp": module(), "core": module("udp"), "x": module()}
    assert list(vm.modules_in_order(["rxe", "core"], files.__getitem__)) == ["udp", "core", "rxe"]
    assert vm.modules_in_order(["udp"], files.__getitem__) == {"udp": files["udp"]}


def test_the_kernel_is_found_in_its_compressed_image() -> None:
    elf = b"\x7fELF" + bytes(range(256)) * 50
    payload = lzma.compress(elf)
    setup, offset = 3, 200
    image = bytearray((setup + 1) * 512 + offset)
    image[0x1F1] = setup
    # What follows the compressed kernel, here its size, is not a part of it.
    struct.pack_into("<II", image, 0x248, offset, len(payload) + 4)
    assert vm.unpacked(bytes(image) + payload + struct.pack("<I", len(elf)) + b"more") == elf


@pytest.mark.skipif(shutil.which("busybox") is None, reason="there is no busybox")
def test_busybox_unpacks_the_archive(tmp_path: Path) -> None:
    content = {"a/b": b"", "a/c": b"12345", "d": bytes(4096)}
    archive = vm.cpio(
        [("a", 0o040755, b""), *((name, 0o100640, data) for name, data in content.items())]
    )
    subprocess.run(["busybox", "cpio", "-i"], input=archive, cwd=tmp_path, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in content} == content
    assert (tmp_path / "d").stat().st_mode == 0o100640


def test_a_command_runs_as_if_it_were_started_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with 'quotes' $and more"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYCOLL_X", "two\nlines; 'and' $more")
    monkeypatch.setenv("OF_NO_INTEREST", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    program = "import os, sys; print([os.getcwd(), sys.argv[1:], dict(os.environ)])"
    text = vm.script([sys.executable, "-c", program, "an argument", "$HOME"])
    done = subprocess.run(["sh", "-c", text], env={}, capture_output=True, text=True, check=True)
    cwd, arguments, environment = eval(done.stdout)
    assert (cwd, arguments) == (str(folder), ["an argument", "$HOME"])
    assert environment["PYCOLL_X"] == "two\nlines; 'and' $more"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PYTHONPATH"] == f"/somewhere:{vm.PYVERBS_ALONE}"
    assert "OF_NO_INTEREST" not in environment


def test_without_a_kernel_it_says_what_to_do(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, FOLDER / "run", "--", "true"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * PATIENCE
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tests/rdma/run: ")
    command.insert(2, "--or-skip")
    skipped = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * PATIENCE
    )
    assert (skipped.returncode, skipped.stderr) == (0, "")
    assert skipped.stdout == done.stderr.replace("tests/rdma/run:", "skipped:")


def test_the_folder_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    program = f"""if True:
        import os, sys
        sys.path.insert(0, {str(FOLDER)!r})
        import vm
        with vm.scratch_folder() as folder:
            (folder / "file").touch()
            print(folder, flush=True)
            os.kill(os.getpid(), 9)
    """
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    # The pipe ends when the remover has, which has inherited it.
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * PATIENCE
    )
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path
    assert not folder.exists()


@pytest.mark.parametrize(("passes", "status"), [(True, vm.UNSTEADY), (False, 1)])
def test_what_failed_in_a_machine_runs_there_once_more(
    passes: bool, status: int, tmp_path: Path
) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pathlib\n"
        "def test_it():\n"
        "    mark = pathlib.Path('mark')\n"
        "    known = mark.exists()\n"
        "    mark.touch()\n"
        f"    assert known and {passes}\n"
        "def test_other(): pass\n"
    )
    command = vm.with_a_second_chance([sys.executable, "-m", "pytest", "-n0", "-v", "test_a.py"])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stdout.count("test_a.py::test_it ") - done.stdout.count("FAILED test_a") == 2
    assert done.stdout.count("test_a.py::test_other ") == 1


def test_tests_that_pass_in_a_machine_run_once() -> None:
    command = vm.with_a_second_chance(["true"])
    assert subprocess.run(command, check=False).returncode == 0
