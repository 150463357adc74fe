"""Hosts that are pretended on this machine, for root: namespaces with an sshd each.

Each has network, processes, name, /dev/shm and /run of its own, and is reached by ssh from every
other; files are shared. Addresses are 10.77.0.1, .2, ..., and fd77::1, ...; there is no way out.
Each has a boot_id of its own, by which pycoll takes it for a machine. What they cannot show: bits
that get lost, cores, a clock or a kernel of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NEEDED = ("unshare", "nsenter", "ip", "ssh", "ssh-keygen")
SSHD = "/usr/sbin/sshd"
_DAEMONS = ("ps ", "sshd", SSHD, "slurmctld", "slurmd", "slurmstepd", ": slurmscriptd", "munged")

# Runs as the first process of a host: the cable comes when `go` can be read.
_INIT = """\
set -eu
cd "$1"; name=$2
mount --make-rprivate /
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs /run; mkdir -p /run/sshd
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind hosts /etc/hosts
mount --bind "$name.boot_id" /proc/sys/kernel/random/boot_id
mkdir -p ~/.ssh; mount --bind dotssh ~/.ssh
for file in .bashrc .profile .bash_profile; do [ -e ~/$file ] && mount --bind bashrc ~/$file; done
ip link set lo up
read -r _ < "$name.go"
exec /usr/sbin/sshd -D -e -f sshd_config 2> "$name.log"
"""

_SSHD_CONFIG = """\
Port 22
HostKey {folder}/hostkey
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""

_SSH_CONFIG = "Host *\n  LogLevel ERROR\n"


def why_not() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if os.getuid() != 0:
        return "pretended hosts need root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if not os.path.exists(SSHD):
        missing.append("sshd")
    if missing:
        return f"pretended hosts need {', '.join(missing)} (openssh-server, iproute2)"
    if subprocess.run(["unshare", "-n", "-u", "-i", "-m", "-p", "--fork", "true"]).returncode:
        return "this system allows no namespaces"
    return ""


def _wait_until(what: object, limit_s: float = 10.0) -> None:
    assert callable(what)
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "a pretended host does not come up"
        time.sleep(0.01)


class Bed:
    """So many hosts: hosta, hostb, ...

    Args:
        folder: for keys, logs and the like.
        count: number of hosts.
        decoy: each has 172.17.0.1 too, as docker0 is on every host.
    """

    def __init__(self, folder: Path, count: int, *, decoy: bool = False) -> None:
        self.folder = folder
        self.names = [f"host{chr(ord('a') + index)}" for index in range(count)]
        self._pids: dict[str, int] = {}
        self._outer: list[subprocess.Popen[bytes]] = []
        self._decoy = decoy

    def start(self) -> None:
        """Make them."""
        self._write_files()
        switch = subprocess.Popen(["unshare", "-n", "sleep", "infinity"], start_new_session=True)
        self._outer.append(switch)
        own = os.readlink("/proc/self/ns/net")
        _wait_until(lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != own)
        self._switch = switch.pid
        self._ip(self._switch, "link add br0 type bridge")
        self._ip(self._switch, "link set br0 up")
        for index, name in enumerate(self.names, 1):
            self._start(index, name)
        for name in self.names:
            _wait_until(
                lambda name=name: b"listening" in (self.folder / f"{name}.log").read_bytes()
            )

    def run(self, host: str, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, not by ssh, in this folder."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            self._inside(host, command), capture_output=True, text=True, **options
        )
        return done

    def popen(self, host: str, *command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(self._inside(host, command), text=True, **options)

    def cut(self, host: str) -> None:
        """Pull its cable out."""
        self._ip(self._switch, f"link set {host} down")

    def heal(self, host: str) -> None:
        """Put its cable in again."""
        self._ip(self._switch, f"link set {host} up")

    def end_all(self, host: str) -> None:
        """End all that runs there but the daemon by which it is reached."""
        self.run(host, "sh", "-c", "kill -9 -1")

    def until_reached(self, by: str, host: str) -> None:
        """Wait until one host reaches another, or all if it was cut off itself."""
        targets = self.names if by == host else [host]
        for number in [self.names.index(name) + 1 for name in targets]:
            connect = f"exec 3<>/dev/tcp/10.77.0.{number}/22"
            _wait_until(lambda connect=connect: self.run(by, "bash", "-c", connect).returncode == 0)

    def narrow(self, host: str, rate: str) -> None:
        """Let a host send so much a second, a rate as tc takes it, and lose the rest; "": all."""
        words = f"replace dev eth0 root tbf rate {rate} burst 4kb limit 12kb" if rate else ""
        self.run(host, "tc", "qdisc", *(words or "del dev eth0 root").split())

    def limit_both_ways(self, rate: str) -> None:
        """Let each host send and receive so much a second, a rate as tc takes it.

        Packets are small, as on a wire: a sender puts two at a time into the queue in front of the
        limit, and of 64 KiB each they would hold up the answers that go the same way.

        TCP goes by losses (reno), whatever this machine's goes by: times shall not depend on that.
        """
        for host, pid in self._pids.items():
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            self._inside_network(pid, "sh", "-c", f"echo reno > {setting}")
            for namespace, device in (pid, "eth0"), (self._switch, host):
                self._ip(namespace, f"link set dev {device} gso_max_segs 1")
                words = f"dev {device} root tbf rate {rate} burst 8kb limit 1mb"
                self._inside_network(namespace, "tc", "qdisc", "replace", *words.split())

    def lose(self, host: str) -> None:
        """End all of it at once, without a good-bye to anybody."""
        self.cut(host)
        os.kill(self._pids[host], signal.SIGKILL)

    def limit(self, mbit: int, narrow: Mapping[tuple[str, str], int]) -> None:
        """Let each host send so much to each other, but by (sender, receiver) less to some."""
        for sender in self.names:
            lines = ["qdisc add dev eth0 root handle 1: htb"]
            for number, receiver in enumerate(self.names, 1):
                rate = narrow.get((sender, receiver), mbit)
                lines += [
                    f"class add dev eth0 parent 1: classid 1:{number} htb rate {rate}mbit "
                    "burst 32kb",
                    f"filter add dev eth0 parent 1: protocol ip prio 1 u32 "
                    f"match ip dst 10.77.0.{number} flowid 1:{number}",
                ]
            for line in lines:
                done = self.run(sender, "tc", *line.split())
                assert done.returncode == 0, f"tc {line}: {done.stderr}"

    def processes(self, host: str) -> list[str]:
        """The command lines of what runs on a host, but for its daemons and what does this."""
        found = []
        for line in self.run(host, "ps", "axww", "-o", "stat=,args=").stdout.splitlines():
            stat, _, words = line.strip().partition(" ")
            if not stat.startswith("Z") and not words.strip().startswith(_DAEMONS):
                found.append(words.strip())
        return found

    def signal(self, host: str, signum: int, pattern: str) -> None:
        """Send a signal to the processes of a host whose command lines have this in them."""
        done = self.run(host, "pkill", f"-{signum}", "-f", pattern)
        assert done.returncode == 0, f"nothing on {host} is {pattern}"

    def close(self) -> None:
        """End all hosts."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._outer:
            process.kill()
            process.wait()

    def _inside(self, host: str, command: Sequence[str]) -> list[str]:
        target = ["nsenter", "-t", str(self._pids[host]), "-m", "-u", "-i", "-n", "-p"]
        return [*target, f"-w{os.getcwd()}", "--", *command]

    def _write_files(self) -> None:
        folder, keygen = self.folder, ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        dotssh = folder / "dotssh"
        dotssh.mkdir(mode=0o700)
        subprocess.run([*keygen, str(folder / "hostkey")], check=True)
        subprocess.run([*keygen, str(dotssh / "id_ed25519")], check=True)
        shutil.copy(dotssh / "id_ed25519.pub", dotssh / "authorized_keys")
        key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
        addresses = [f"10.77.0.{index}" for index in range(1, len(self.names) + 1)]
        known = [f"{name},{at} {key}\n" for name, at in zip(self.names, addresses, strict=True)]
        known += [f"fd77::{index} {key}\n" for index in range(1, len(self.names) + 1)]
        (dotssh / "known_hosts").write_text("".join(known))
        (dotssh / "config").write_text(_SSH_CONFIG)
        pairs = zip(addresses, self.names, strict=True)
        table = ["127.0.0.1 localhost\n", *(f"{at} {name}\n" for at, name in pairs)]
        (folder / "hosts").write_text("".join(table))
        (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
        (folder / "bashrc").write_text("")
        (folder / "init").write_text(_INIT)

    def _start(self, index: int, name: str) -> None:
        go = self.folder / f"{name}.go"
        os.mkfifo(go)
        (self.folder / f"{name}.log").touch()
        (self.folder / f"{name}.boot_id").write_text(f"{uuid.uuid4()}\n")
        apart = [
            "unshare",
            "-n",
            "-u",
            "-i",
            "-m",
            "-p",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
        ]
        with (self.folder / f"{name}.init.log").open("wb") as log:
            outer = subprocess.Popen(
                [*apart, str(self.folder / "init"), str(self.folder), name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._outer.append(outer)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        _wait_until(lambda: children.read_text())
        pid = self._pids[name] = int(children.read_text())
        self._ip(self._switch, f"link add {name} type veth peer name eth0 netns {pid}")
        self._ip(self._switch, f"link set {name} master br0 up")
        self._ip(pid, f"addr add 10.77.0.{index}/24 dev eth0")
        self._ip(pid, f"-6 addr add fd77::{index}/64 dev eth0 nodad")
        self._ip(pid, "link set eth0 up")
        if self._decoy:
            self._ip(pid, "link add docker0 type bridge")
            self._ip(pid, "addr add 172.17.0.1/16 dev docker0")
            self._ip(pid, "link set docker0 up")
        go.write_text("go\n")

    def _ip(self, pid: int, words: str) -> None:
        self._inside_network(pid, "ip", *words.split())

    def _inside_network(self, pid: int, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(pid), "-n", *command], check=True)


@contextlib.contextmanager
def bed(folder: Path, count: int, *, decoy: bool = False) -> Iterator[Bed]:
    """Have so many hosts."""
    hosts = Bed(folder, count, decoy=decoy)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.close()


PYCOLL_RUN = [sys.executable, "-P", "-m", "pycoll._launcher"]
