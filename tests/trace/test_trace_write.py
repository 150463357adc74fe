"""A trace that cannot be written leaves what was there before, and nothing else."""

from __future__ import annotations

import gzip
import resource
from pathlib import Path

import pytest

from pycoll._launcher import tracing
from pycoll._trace.records import RankRecords
from pycoll._trace.timeline import Clock, RankTrace


def test_only_a_trace_is_replaced_by_one(tmp_path: Path) -> None:
    """Or an empty file, as mktemp makes it."""
    others = b'{"traceEvents": []}', gzip.compress(b'{"traceEvents": []}'), b"\x1f\x8bnonsense"
    for number, other in enumerate(others):
        path = tmp_path / f"other.{number}"
        path.write_bytes(other)
        with pytest.raises(FileExistsError, match="is there, and is no trace: delete it"):
            tracing.check_path(str(path))
    for name in "t.json", "t.json.gz":
        tracing.write(str(tmp_path / name), [RankTrace(0, "host", Clock(), RankRecords(1, []))])
        tracing.check_path(str(tmp_path / name))
        tracing.check_path(str(tmp_path / f"new.{name}"))
    (tmp_path / "empty").touch()
    tracing.check_path(str(tmp_path / "empty"))


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
