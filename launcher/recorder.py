"""Has all hosts of a job tell what their ranks have called last, when one has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pycoll._launcher import calls_report, kept_calls
from pycoll._launcher.host import Host
from pycoll._launcher.kept_calls import HostCalls
from pycoll._support.wording import ranks_text


class CallRecorder:
    """What ranks had called last at one moment.

    Args:
        folder: gets calls.txt when all hosts have answered; None: it is not written.
        why: what has happened; also an attribute.
        say: hears why it cannot be written.
    """

    def __init__(self, folder: str | None, why: str, say: Callable[[str], None]) -> None:
        self._folder, self.why, self._say = folder, why, say
        self._awaited: dict[Host, list[int]] = {}
        self._found: list[HostCalls] = []
        self._is_finished = False
        self._difference = ""

    def ask(self, hosts: Mapping[int, Host]) -> None:
        """Ask all hosts; `hosts`: by rank where it is."""
        for rank, host in hosts.items():
            self._awaited.setdefault(host, []).append(rank)
        for host in list(self._awaited):
            host.read_calls(partial(self._hear, host))

    def finish(self) -> str:
        """Nothing more will come; returns the first call in which ranks differ, "" for none."""
        if not self._is_finished:
            self._is_finished = True
            calls = kept_calls.merged(self._found)
            missing = sorted(rank for ranks in self._awaited.values() for rank in ranks)
            lost = f"nothing is known of {ranks_text(missing)}: the host has not answered"
            if self._folder is not None:
                lost = lost if missing else ""
                if error := calls_report.write(self._folder, calls, self.why, lost):
                    self._say(error)
            self._difference = calls_report.difference(calls)
        return self._difference

    def _hear(self, host: Host, found: list[HostCalls]) -> None:
        if not self._is_finished and self._awaited.pop(host, None) is not None:
            self._found.extend(found)
            if not self._awaited:
                self.finish()
