"""Files of `pycoll-run --trace`, as its tests read them."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_PHASES = frozenset("MXbesf")


class TraceFile:
    """A trace, checked against the trace event format.

    Attributes:
        about: what it says of itself.
        events: all of them.
    """

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        whole = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.about: dict[str, Any] = whole["otherData"]
        self.events: list[Event] = whole["traceEvents"]
        self._check()

    def slices(self, name: str, rank: int | None = None) -> list[Event]:
        """The slices of a name, in order, of all ranks or one."""
        return [
            event
            for event in self.events
            if event["ph"] == "X" and event["name"] == name and rank in (None, event["pid"] - 1)
        ]

    def at(self, flow: Event) -> Event:
        """The innermost slice that an end of an arrow is in, as readers of the format find it."""
        found = [
            event
            for event in self.events
            if event["ph"] == "X"
            and event["tid"] == flow["tid"]
            and event["ts"] <= flow["ts"] <= event["ts"] + event["dur"]
            and event["cat"] != "waiting"
        ]
        return max(found, key=lambda event: event["ts"])

    def arrows(self) -> list[tuple[Event, Event]]:
        """The slices that arrows lead from and to."""
        ends: dict[int, dict[str, Event]] = defaultdict(dict)
        for event in self.events:
            if event["ph"] in "sf":
                ends[event["id"]][event["ph"]] = event
        for one in ends.values():
            assert one["s"]["ts"] <= one["f"]["ts"] + self.bound_us
        return [(self.at(one["s"]), self.at(one["f"])) for one in ends.values()]

    def named(self, what: str) -> dict[int, str]:
        """What the metadata events of a name say, by rank."""
        return {
            event["pid"] - 1: next(iter(event["args"].values()))
            for event in self.events
            if event["name"] == what
        }

    def ranks(self) -> dict[int, str]:
        """What the ranks are called, without what is said of them."""
        names = self.named("process_name")
        return {rank: name.partition(": ")[0] for rank, name in names.items()}

    @property
    def bound_us(self) -> float:
        """By how much times may be wrong."""
        return 2 * max(self.about["times of a host may be wrong by this, ns"].values()) / 1000

    def _check(self) -> None:
        """Every event has what the format asks for, and slices of a thread nest."""
        pairs: Counter[tuple[str, str]] = Counter()
        threads: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            assert event["ph"] in _PHASES, event
            assert isinstance(event["pid"], int), event
            assert isinstance(event["tid"], int), event
            assert isinstance(event["name"], str), event
            if event["ph"] == "M":
                assert event["args"], event
                continue
            assert event["ts"] >= 0, event
            assert event["cat"], event
            if event["ph"] == "X":
                assert event["dur"] >= 0, event
                threads[event["tid"]].append(event)
            else:
                pairs[event["ph"], str(event["id"])] += 1
        for phase, other in (("b", "e"), ("s", "f")):
            ids = {id for p, id in pairs if p == phase}
            assert all(pairs[phase, id] == pairs[other, id] == 1 for id in ids)
        for events in threads.values():
            around: list[Event] = []
            for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
                while around and round(around[-1]["ts"] + around[-1]["dur"], 3) <= event["ts"]:
                    around.pop()
                if around:
                    outer = around[-1]
                    end = round(outer["ts"] + outer["dur"], 3)
                    assert round(event["ts"] + event["dur"], 3) <= end, (outer, event)
                around.append(event)
