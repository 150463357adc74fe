"""The program of docs/parallel/compression.md: every compressor learns, in the bytes it should."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from example_runs import EXAMPLES, needs_example_packages, run_example
from tiers import few

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/parallel/compression.md").read_text(encoding="utf-8")
MEASURED = PAGE.split("| loss at the end |", 1)[1].split("\n\n", 1)[0]


def rows(output: str) -> dict[str, list[float]]:
    """Formula, bytes counted, share, loss and accuracy by the name of the compressor."""
    found = {}
    for line in output.splitlines()[3:-1]:
        found[line[:20].strip()] = [float(word.strip("%")) for word in line[20:].split()]
    return found


@needs_example_packages
@pytest.mark.parametrize("size", few([3], [1, 2]))
def test_compressors_learn_in_the_bytes_of_their_formulas(size: int, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    output = run_example("parallel/compression.py", size, tmp_path, "--epochs", "4")
    table = rows(output)
    assert len(table) == 8
    assert all(row[0] == row[1] for row in table.values())
    with_feedback = [row for name, row in table.items() if name != "top-k, no feedback"]
    assert max(loss for *_, loss, _ in with_feedback) < 0.6
    assert table["top-k, no feedback"][3] > 1.3
    assert output.endswith("the same bits on all ranks; bytes: as by the formulas\n")


@needs_example_packages
def test_the_page_about_compression_has_the_bytes_of_the_programs_formulas() -> None:
    """Which are those that it counts, or it fails: see above."""
    schemes = runpy.run_path(str(EXAMPLES / "parallel/compression.py"))["SCHEMES"]
    shown = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d.]+) % \|", MEASURED, re.M)
    names = [name.replace(", rank 2", "").replace(", 1 %", "") for name, *_ in shown]
    assert names == list(schemes)
    for (_, nbytes, share), (_, formula) in zip(shown, schemes.values(), strict=True):
        assert int(nbytes) == round(formula(4))
        assert float(share) == round(100 * formula(4) / schemes["none"][1](4), 1)


@pytest.mark.parallel
@needs_example_packages
def test_the_page_has_the_table_that_the_program_prints(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = ("--plot", "compression.png")
    printed = rows(run_example("parallel/compression.py", 4, tmp_path, *plot))
    shown = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d.]+) % \| ([\d.]+) \|", MEASURED, re.M)
    assert len(shown) == len(printed)
    for (name, nbytes, share, loss), row in zip(shown, printed.values(), strict=True):
        assert (float(nbytes), float(share)) == (row[1], row[2]), name
        # Another processor may round differently, and so take another path.
        assert float(loss) == pytest.approx(row[3], rel=0.2), name
    assert (tmp_path / "compression.png").read_bytes().startswith(b"\x89PNG")
