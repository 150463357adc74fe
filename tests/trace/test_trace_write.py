"""A trace that cannot be written leaves what was there before, and nothing else."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pycoll._launcher import tracing
from pycoll._trace.records import RankRecords
from pycoll._trace.timeline import Clock, RankTrace


def test_a_full_disk_leaves_the_trace_before(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text("before")
    traces = [RankTrace(0, "host", Clock(), RankRecords(1, []))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tracing.write(str(file), traces)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert file.read_text() == "before"
    tracing.write(str(file), traces)
    assert '"format": "pycoll trace 1"' in file.read_text()
