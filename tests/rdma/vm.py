"""Throw-away virtual machines with a soft-RoCE device, in which the files of this machine are seen.

A stock Debian kernel runs in software emulation, so neither an RDMA device nor KVM is needed. The
root of a machine is this machine's, read-only over 9p, with a layer in memory on top: a command
finds the same interpreter, packages and checkout under the same paths, and nothing that it writes
remains. Only its output and its status come back, through a second, writable 9p share: a write is
over when the file outside has it, so nothing is lost when the machine is switched off.
"""

import contextlib
import lzma
import os
import re
import shlex
import shutil
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

# What the machine's init needs: its disks, its network, soft-RoCE. The last of these asks for
# crc32_generic by name when it runs, which its list of dependencies does not tell.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay"),
    *("virtio_net", "dummy"),
    *("crc32_generic", "ib_uverbs", "rdma_rxe"),
)
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
# In the machine: a folder with pyverbs and none of Debian's other packages for Python.
PYVERBS_ALONE = "/run/pyverbs"

ENVIRONMENT = re.compile(
    "(PATH|HOME|USER|LOGNAME|LANG|LC_.*|TERM|TZ|TMPDIR|VIRTUAL_ENV|CI"
    "|(PYTHON|PYTEST_|HYPOTHESIS_|PYCOLL_).*)"
)

TIMED_OUT = 124
NO_STATUS = 125
# Tests failed, and passed when they were run once more.
UNSTEADY = 20

# One script, outside the root that it puts together. Where a line fails it ends, and the kernel,
# which cannot live without it, stops the machine: the console tells which line.
INIT = f"""#!/bin/busybox sh
set -eu
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/usr/sbin
for module in /modules/*; do insmod "$module"; done

share() {{ mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$2" "$1" "/$1"; }}
share host ro,cache=loose
share out cache=none
mount -t tmpfs -o mode=755,size=75% layer /layer
mkdir /layer/files /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/files,workdir=/layer/work root /root
for at in "" /root; do
    mount -t proc proc "$at/proc"
    mount -t sysfs sys "$at/sys"
    mount -t devtmpfs dev "$at/dev"
done
mkdir -p /root/dev/shm /root/dev/pts /root{PYVERBS_ALONE}
mount -t tmpfs -o mode=1777 shm /root/dev/shm
mount -t devpts devpts /root/dev/pts
ln -s /proc/self/fd /root/dev/fd
for n in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${{n%:*}}" "/root/dev/${{n#*:}}"; done
ln -s {PYVERBS} /root{PYVERBS_ALONE}/

# number=0 or 1 comes from the kernel's command line. The lone machine's eth0 is a dummy: through
# it rxe0 reaches itself. The MTU is for RDMA's largest, 4096 bytes, and the headers.
hostname "machine$number"
ip link set lo up
[ -e /sys/class/net/eth0 ] || ip link set dummy0 name eth0
ip link set eth0 mtu 4200 up
ip address add "192.0.2.$((number + 1))/24" dev eth0
chroot /root rdma link add rxe0 type rxe netdev eth0
# The GID of an IPv4 address follows the address a moment later.
until grep -qs "^0000:0000:0000:0000:0000:ffff:" /sys/class/infiniband/rxe0/ports/1/gids/[0-9]
do usleep 20000; done

# The command writes into pipes, as they lose nothing when opened again. They end with the last
# process that it has left, so these are ended. In a session of its own it cannot kill the readers.
mkfifo -m 666 /stdout /stderr
for stream in stdout stderr; do cat /$stream >>/out/$stream & done
status=0
setsid chroot /root /bin/sh -c "$(cat /out/command)" >/stdout 2>/stderr || status=$?
for process in /proc/[0-9]*; do
    [ ! "$process/root" -ef /root ] || kill -9 "${{process##*/}}" || true
done
wait
echo "$status" >/out/status
poweroff -f
"""


class Unavailable(Exception):
    """No machine can be started here; says why, and what to do."""


def cache_folder() -> Path:
    """Where kernels are kept, one folder each."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pycoll-rdma"


def newest(folders: Iterable[Path]) -> Path | None:
    """The folder that is named by the highest version of a kernel; None if there is no folder."""

    def version(folder: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", folder.name)]

    return max(folders, key=version, default=None)


def modules_in_order(names: Iterable[str], read: Callable[[str], bytes]) -> dict[str, bytes]:
    """The named kernel modules, each after all those that it depends on: name -> content.

    `read(name)` returns a module's file, in which its dependencies are written.
    """
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in order:
            return
        content = read(name)
        depends = re.search(rb"\0depends=([^\0]+)\0", content)
        for needed in depends[1].decode().split(",") if depends else ():
            add(needed)
        order[name] = content

    for name in names:
        add(name)
    return order


def unpacked(image: bytes) -> bytes:
    """The ELF kernel in a bzImage that was compressed by xz.

    Unpacking it while the machine boots, in emulation, would take longer than all the rest.
    """
    # Linux/x86 boot protocol: the code follows a boot sector and `setup` more; in it, the payload.
    setup = image[0x1F1] or 4
    offset, nbytes = struct.unpack_from("<II", image, 0x248)
    start = (setup + 1) * 512 + offset
    return lzma.LZMADecompressor().decompress(image[start : start + nbytes])


def keep_kernel(package: Path) -> None:
    """Puts what a machine needs of an unpacked linux-image package into the cache."""
    (image,) = package.glob("boot/vmlinuz-*")
    files = {path.stem.replace("-", "_"): path for path in package.glob("lib/modules/**/*.ko")}
    folder = cache_folder() / image.name.removeprefix("vmlinuz-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in modules_in_order(MODULES, lambda name: files[name].read_bytes()).items():
        (folder / f"{name}.ko").write_bytes(content)
    # The last: a folder without it is not taken for a kernel.
    part = folder / "part"
    part.write_bytes(unpacked(image.read_bytes()))
    part.rename(folder / "vmlinux")


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An archive ("newc", as kernels unpack it) of (path, mode, content) entries."""
    archive = bytearray()
    for inode, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        name = path.encode() + b"\0"
        header = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in header)
        for part in (name, content):
            archive += part
            archive += bytes(-len(archive) % 4)
    return bytes(archive)


class Parts:
    """What machines are made of, found on this machine.

    Raises: Unavailable: something is missing.
    """

    def __init__(self) -> None:
        install = "run `tests/rdma/run --install` as root (on Debian 12)"
        if os.uname().machine != "x86_64":
            raise Unavailable(f"the virtual machine is an x86-64, this is {os.uname().machine}")
        for command, package in (
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("busybox", "busybox-static"),
            ("rdma", "iproute2"),
        ):
            if not shutil.which(command, path=os.defpath):
                raise Unavailable(f"no {command} (Debian's {package}): {install}")
        if not PYVERBS.exists():
            raise Unavailable(f"no pyverbs in {PYVERBS.parent}: {install}")
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        if not (PYVERBS / f"device{suffix}").exists():
            python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
            raise Unavailable(f"Debian's pyverbs is not for {python}: take the Python of Debian")
        kernel = newest(path.parent for path in cache_folder().glob("*/vmlinux"))
        if kernel is None:
            raise Unavailable(f"no kernel in {cache_folder()}: {install}")
        self.kernel = kernel / "vmlinux"
        try:
            modules = modules_in_order(MODULES, lambda name: (kernel / f"{name}.ko").read_bytes())
        except FileNotFoundError as error:
            raise Unavailable(f"no {error.filename}: {install}") from error

        folders = ["bin", "modules", "proc", "sys", "dev", "host", "out", "layer", "root"]
        program = stat.S_IFREG | 0o755
        self.initramfs = cpio(
            [
                *((name, stat.S_IFDIR | 0o755, b"") for name in folders),
                ("bin/busybox", program, Path("/bin/busybox").read_bytes()),
                ("init", program, INIT.encode()),
                *(
                    (f"modules/{number:02}-{name}.ko", stat.S_IFREG | 0o644, content)
                    for number, (name, content) in enumerate(modules.items())
                ),
            ]
        )


def script(command: Sequence[str]) -> str:
    """The shell script that runs `command` as if it were started here."""
    variables = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)}
    # There every write is dropped at the end, and compiling each time what is imported takes long.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables["PYTHONPATH"] = ":".join(filter(None, [variables.get("PYTHONPATH"), PYVERBS_ALONE]))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    here = shlex.quote(os.getcwd())
    return "\n".join([*exports, f"cd {here}", f"exec {shlex.join(command)} </dev/null"])


def with_a_second_chance(tests: Sequence[str]) -> list[str]:
    """A command for pytest; the tests that failed then run once more (as for .ci/tiers.py).

    It is all in the machine, which forgets at its end what has failed.
    """
    again = [*tests, "--last-failed", "--last-failed-no-failures", "none"]
    then = f'[ "$status" = 1 ] && {shlex.join(again)} && exit {UNSTEADY}; exit "$status"'
    return ["sh", "-c", f"{shlex.join(tests)} || {{ status=$?; {then}; }}"]


class Machine:
    """One machine that runs one command: `number` 0 is 192.0.2.1, 1 is 192.0.2.2.

    `folder` is its own. `link`, which it takes over, leads to the other machine's network.
    """

    def __init__(
        self,
        parts: Parts,
        number: int,
        command: Sequence[str],
        folder: Path,
        link: socket.socket | None = None,
    ) -> None:
        self.number = number
        self.folder = folder
        initramfs = folder / "initramfs"
        initramfs.write_bytes(parts.initramfs)
        self.out = folder / "out"
        self.out.mkdir()
        (self.out / "command").write_text(script(command))
        self.tails: list[tuple[BinaryIO, BinaryIO]] = []
        for stream in (sys.stdout, sys.stderr):
            path = self.out / stream.name.strip("<>")
            path.touch()
            self.tails.append((path.open("rb"), stream.buffer))

        # The kernel gives up the rest of its command line to init's environment.
        boot = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable"
        arguments = [
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
            *("-smp", "2", "-m", "3G"),
            *("-serial", f"file:{folder}/console"),
            *(
                "-kernel",
                str(parts.kernel),
                "-initrd",
                str(initramfs),
                "-append",
                f"{boot} number={number}",
            ),
        ]
        for tag, path, more in (("host", "/", ",readonly=on"), ("out", self.out, "")):
            share = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap{more}"
            arguments += ["-virtfs", share]
        if link is not None:
            network = f"netdev=link,mac=52:54:00:00:00:0{number},host_mtu=4200,romfile="
            arguments += ["-netdev", f"socket,id=link,fd={link.fileno()}"]
            arguments += ["-device", f"virtio-net-pci,{network}"]
        else:
            arguments += ["-nic", "none"]
        # The machine ends with this process, even if it is killed.
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[link.fileno()] if link is not None else [],
        )
        if link is not None:
            link.close()

    def ended(self, wait_s: float) -> bool:
        """Whether the machine has ended or does so within `wait_s`; passes on what it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        ended = self.process.poll() is not None
        for file, stream in self.tails:
            shutil.copyfileobj(file, stream)
            stream.flush()
        return ended

    def status(self) -> int:
        """How the command ended; if the machine did before it, 125, and the console is shown."""
        try:
            return int((self.out / "status").read_text())
        except (FileNotFoundError, ValueError):
            console = (self.folder / "console").read_text(errors="replace")
            print(f"machine {self.number} failed:\n{console[-4000:]}", file=sys.stderr)
            return NO_STATUS

    def close(self) -> None:
        """Stops the machine at once if it still runs."""
        self.process.kill()
        self.process.wait()
        for file, _ in self.tails:
            file.close()


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is removed when this process ends, even if it is killed."""
    folder = tempfile.mkdtemp(prefix="pycoll-rdma-")
    # A process of its own waits for that: the end of its standard input.
    remove = ["sh", "-c", 'cat; rm -rf "$1"', "sh", folder]
    remover = subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield Path(folder)
    finally:
        remover.communicate()


def run(commands: Sequence[Sequence[str]], limit_s: float) -> list[int]:
    """Runs each of one or two commands in a machine of its own, and returns their statuses.

    Two machines share a network. Statuses of this function: 124, `limit_s` has passed; 125, the
    machine has failed.

    Raises:
        Unavailable: machines cannot be started here.
    """
    parts = Parts()
    deadline = time.monotonic() + limit_s
    links = socket.socketpair() if len(commands) == 2 else [None]
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        machines = []
        for number, (command, link) in enumerate(zip(commands, links, strict=True)):
            own = folder / str(number)
            own.mkdir()
            machine = Machine(parts, number, command, own, link)
            stack.callback(machine.close)
            machines.append(machine)
        # Not all(): every machine is looked at.
        while not min([machine.ended(0.02) for machine in machines]):
            if time.monotonic() > deadline:
                print(f"stopped after {limit_s:g} s", file=sys.stderr)
                return [TIMED_OUT] * len(machines)
        return [machine.status() for machine in machines]
