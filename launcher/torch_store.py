"""The store of torchrun, by which its processes tell each other something.

It listens at MASTER_ADDR and MASTER_PORT for whoever can reach them, without a password: who can,
can read what is there. torchrun trusts the network in which it runs.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any

from pycoll.errors import BootstrapError

_MAX_S = 86400.0


class TorchStore:
    """The store: `exchange.Board`.

    Args:
        environ: this process's environment.
        rank, size: this rank, and how many there are.

    Raises:
        BootstrapError: there is no torch here, or torchrun's variables make no sense.
    """

    def __init__(self, environ: Mapping[str, str], rank: int, size: int) -> None:
        try:
            from torch import distributed
        except ImportError as exc:
            raise BootstrapError(f"torchrun started this process, but: {exc}") from exc
        try:
            self._address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        except (KeyError, ValueError) as exc:
            raise BootstrapError(
                f"torchrun has not set MASTER_ADDR and MASTER_PORT: {exc}"
            ) from exc
        self._type: Any = vars(distributed)["TCPStore"]  # which it does not export by name
        self._rank, self._size = rank, size
        # The store is one of torchrun's own processes, or it expects rank 0 to have it.
        self._serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._key = f"pycoll/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def share(self, text: str, timeout: float) -> str:
        deadline = time.monotonic() + min(timeout, _MAX_S)
        host, port = self._address
        try:
            store = self._type(host, port, is_master=self._serves, timeout=_left(deadline))
            if text:
                store.set(self._key, text)
            store.set_timeout(_left(deadline))
            found: bytes = store.get(self._key)
            if self._serves:  # the store ends here: not before all have read it
                others = [self._read_key(rank) for rank in range(1, self._size)]
                store.wait(others, _left(deadline))
            else:
                store.set(self._read_key(self._rank), "1")
        except RuntimeError as exc:  # of which torch's own errors are
            raise OSError(f"torchrun's store at {host}:{port}: {exc}") from exc
        return found.decode()

    def _read_key(self, rank: int) -> str:
        return f"{self._key}/read/{rank}"


def _left(deadline: float) -> datetime.timedelta:
    """How long until a time of time.monotonic(); torch takes no less than a millisecond."""
    return datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
