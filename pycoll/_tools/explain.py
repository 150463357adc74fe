"""`pycoll explain`: which algorithm a call would run, and why, without starting ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pycoll._tools.show import add_hosts, add_ranks, hosts_of

if TYPE_CHECKING:
    from pycoll._selection.select import Selector

_EXAMPLES = """\
examples:
  pycoll explain all_reduce -n 8 --bytes 1M
  pycoll explain all_reduce -n 64 --hosts 8 --network rdma
  PYCOLL_ALGORITHM=all_reduce:ring,tree pycoll explain all_reduce -n 4 --bytes 64K --transport tcp

It says what comm.explain says on those ranks. PYCOLL_ALGORITHM, PYCOLL_SEGMENT, PYCOLL_COSTS and
PYCOLL_TOPOLOGY count as in a job; its file names more hosts: the job is then on the first of them.
Without --bytes it has a line for each of several lengths.
"""

TRANSPORTS: Final = ("auto", "shm", "tcp", "zmq", "rdma")

LENGTHS: Final = tuple(8 << 3 * i for i in range(9))
"""Lengths that have a line each: 8 B to 128 MiB."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("collective", metavar="COLLECTIVE", help="for example all_reduce")
    add_ranks(parser)
    add(
        "--bytes",
        dest="length",
        metavar="B",
        help="of one rank's value, or of one block, as 1M (default: several lengths)",
    )
    add_hosts(parser)
    add(
        "--emulate-hosts",
        type=int,
        metavar="K",
        help="as --hosts K, but the hosts are one machine, as with pycoll-run",
    )
    add("--transport", choices=TRANSPORTS, default="auto", help="as of pycoll-run (default: auto)")
    add(
        "--network",
        choices=("tcp", "rdma"),
        default="tcp",
        help="between hosts, with --transport auto (default: tcp)",
    )
    add("--cores", type=int, metavar="C", help="of each host (default: as this machine has)")
    add("--op", default="sum", help="the operator, where something is reduced (default: sum)")
    add("--dtype", help="of what is reduced, as int64 (default: floats)")
    add("--nonblocking", action="store_true", help="of the twin, as iall_reduce")


def main(arguments: argparse.Namespace) -> int:
    """Print what would run.

    Raises:
        ValueError: an option makes no sense.
    """
    from pycoll._calls.explain import explain, time_text
    from pycoll._selection.agreed import parse_bytes
    from pycoll._support.wording import size_text
    from pycoll.errors import BootstrapError

    emulated = arguments.emulate_hosts
    layout = arguments.hosts if emulated is None else str(emulated)
    hosts = hosts_of(layout, arguments.size)
    try:
        selector = made_up(
            hosts,
            arguments.transport,
            arguments.network,
            arguments.cores,
            one_machine=emulated is not None,
        )
        if arguments.length is not None:
            lengths: Sequence[int] = [
                parse_bytes(arguments.length, "--bytes", "without it there are several lengths")
            ]
        else:
            lengths = [0] if arguments.collective == "barrier" else LENGTHS
        found = [
            explain(
                selector,
                arguments.collective,
                nbytes,
                arguments.op,
                not arguments.nonblocking,
                arguments.dtype,
            )
            for nbytes in lengths
        ]
    except (BootstrapError, TypeError) as exc:
        raise ValueError(str(exc)) from None
    if len(found) == 1 or arguments.size == 1:
        print(found[0])
        return 0
    print(f"{found[0].collective} on {arguments.size} ranks")
    for each in found:
        cut = f", in {each.segments} segments" if each.segments > 1 else ""
        print(f"  {size_text(each.nbytes):>8}  {time_text(each.seconds):>8}  {each.algorithm}{cut}")
    print(f"  times by {found[0].table}; --bytes says why")
    return 0


def made_up(
    hosts: Sequence[int],
    transport: str,
    network: str,
    cores: int | None,
    one_machine: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Selector:
    """Return what chooses for ranks on these hosts, as if they had met.

    Args:
        hosts: by rank the number of its host.
        transport: as of pycoll-run.
        network: between hosts: tcp or rdma.
        cores: of each host; None: as many as this process may use.
        one_machine: the hosts are one machine.
        environ: with the settings of the job; None: that of this process.

    Raises:
        ValueError: shared memory is asked for between hosts, or there are no cores.
        BootstrapError: a setting makes no sense.
    """
    from pycoll._selection import agreed
    from pycoll._selection.select import Selector

    several = len(set(hosts)) > 1
    if transport == "shm" and several:
        raise ValueError("--transport shm: the ranks are on several hosts, which share no memory")
    if cores is not None and cores < 1:
        raise ValueError(f"--cores is {cores}; a host has at least 1")
    shares = transport in ("auto", "shm")
    rdma = transport == "rdma" or (transport == "auto" and network == "rdma" and several)
    environ = os.environ if environ is None else environ
    infos = []
    for rank, host in enumerate(hosts):
        said: dict[str, Any] = agreed.said(environ, rank)
        if cores is not None:
            said.pop("quota", None)
            said["cpus"] = ((1 << cores) - 1).to_bytes(cores // 8 + 1, "little")
        if not one_machine:
            said["machine"] = b"%d" % host
        said["node"] = host
        if "topology" in said:
            said["topology"]["host"] = _name_of(host, environ)
        if shares:
            said["shm"] = {}
        if rdma:
            said["rdma"] = {"network": "made up"}
        infos.append(said)
    return Selector(agreed.agree(infos), hosts, shares and not several and len(hosts) > 1)


def _name_of(host: int, environ: Mapping[str, str]) -> str:
    """Return what the file of PYCOLL_TOPOLOGY calls a host that is made up; its number if nothing.

    Raises:
        ValueError: the file makes no sense.
    """
    from pycoll._selection import topology

    path = environ[topology.VARIABLE]
    with open(path, encoding="utf-8") as file:  # `agreed.said` has read it before
        table = topology.parse(file.read(), path)
    names = topology.names_in(table, "hosts", path) or topology.names_in(table, "ring", path)
    return names[host] if host < len(names) else str(host)
