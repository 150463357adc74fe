"""The programs a newcomer runs first do what they say: the examples, and the README's.

`.ci/run` runs some of the examples whenever it runs, too.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import EXAMPLES, PYCOLL_RUN, needs_example_packages, run, run_example
from patience import PATIENCE
from tiers import exhaustive, few

from pycoll._support.environment import usable_cores

ROOT = Path(__file__).resolve().parents[2]

needs_torch = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason="needs PyTorch: pip install torch"
)
needs_jax = pytest.mark.skipif(
    not importlib.util.find_spec("jax"), reason="needs JAX: pip install jax"
)


@exhaustive
@pytest.mark.parametrize("size", few([3], [1]))
def test_hello_is_said_by_every_rank_and_summed_by_rank_0(size: int, tmp_path: Path) -> None:
    lines = run_example("hello.py", size, tmp_path).splitlines()
    said = sorted(line for line in lines if line.startswith("rank "))
    assert [line.split(" is process ")[0] for line in said] == [
        f"rank {rank} of {size}" for rank in range(size)
    ]
    first = 10 * sum(range(size))
    assert f"the sum over all ranks is [{first} {first + size} {first + 2 * size}]" in [
        re.sub(r" +", " ", line).replace("[ ", "[") for line in lines
    ]


@exhaustive
@pytest.mark.parametrize("size", few([3], [1]))
def test_pi_is_right_to_ten_digits(size: int, tmp_path: Path) -> None:
    assert "pi is about 3.1415926535" in run_example("pi.py", size, tmp_path)


@exhaustive
@pytest.mark.parametrize("size", few([3], [1, 6]))
def test_objects_reach_every_rank_and_come_back(size: int, tmp_path: Path) -> None:
    lines = run_example("objects.py", size, tmp_path).splitlines()
    assert [line.split(" read ")[0] for line in lines[:-1]] == [f"rank {r}" for r in range(size)]
    assert lines[-1] == "most frequent: 'e', 16 times"


@exhaustive
@pytest.mark.parametrize("size", few([3], [1, 6]))
def test_a_pool_draws_the_same_picture_with_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    *picture, done_by = run_example("pool.py", size, tmp_path, "--rows", "5").splitlines()
    assert len(picture) == 5
    assert picture[0] == picture[4] == " " * 72
    assert picture[1] == picture[3] != picture[2]
    # On the real axis the set reaches from -2 to 0.25: 2.25 / (2.8 / 72) columns.
    assert picture[2].count("#") == 58
    assert sum(map(int, re.findall(r": (\d+) rows", done_by))) == 5
    assert ("rank 0" in done_by) is (size == 1)


@exhaustive
@pytest.mark.parametrize("size", few([2], [1, 4]))
def test_overlap_times_each_kind_of_computing(size: int, tmp_path: Path) -> None:
    small = ("--elements", "5000", "--rounds", "1")
    lines = run_example("overlap.py", size, tmp_path, *small).splitlines()
    assert lines[0].startswith(f"{size} ranks, {usable_cores()} usable cores, ")
    assert [line.split()[0] for line in lines[2:4]] == ["numpy_work", "python_work"]
    for line in lines[2:4]:
        computing, all_reduce, _, at_once, ratio = map(float, line.split()[1:])
        # The times are shown in hundredths of a millisecond, the ratio is of those before that. To
        # reduce the values of one rank takes less.
        assert min(computing, at_once, all_reduce if size > 1 else 1.0) > 0.0
        assert ratio == pytest.approx(at_once / max(computing, all_reduce), rel=0.2, abs=0.01)
    assert (len(lines) == 5) is (size >= usable_cores())


@exhaustive
@pytest.mark.parametrize("size", few([2], [1, 4]))
def test_heat_has_the_same_bits_on_any_grid_of_ranks(size: int, tmp_path: Path) -> None:
    uneven = ("--height", "21", "--width", "34", "--steps", "40")
    output = run_example("heat.py", size, tmp_path, *uneven)
    assert f"{size // 2 or 1} x {min(size, 2)} ranks, " in output
    assert "the same bits as computed alone: True" in output


@exhaustive
@pytest.mark.parametrize("size", few([3], [1]))
def test_heat_in_shared_memory_has_the_same_bits(size: int, tmp_path: Path) -> None:
    uneven = ("--height", "20", "--width", "34", "--steps", "40")
    output = run_example("heat_shared.py", size, tmp_path, *uneven)
    assert f"{size} strips, 20 x 34 cells, 40 steps" in output
    assert "the same bits as computed alone: True" in output


@exhaustive
@pytest.mark.parametrize("size", few([6], [8]))
def test_training_goes_on_when_two_ranks_are_killed(size: int, tmp_path: Path) -> None:
    command = [PYCOLL_RUN, "-n", str(size), "--survive", str(EXAMPLES / "survive.py")]
    first, second = run(*command, cwd=tmp_path).splitlines()
    left = first.removeprefix(f"{size - 2} of {size} ranks are left: ").split(", ")
    assert len({*left} & {*map(str, range(size))}) == len(left) == size - 2
    loss, without, noise = map(float, re.findall(r"\d+\.\d+", second))
    assert abs(loss - without) <= 12 * noise < 0.01


@exhaustive
def test_a_saved_computation_goes_on_after_a_death_on_other_ranks_and_after_a_warning(
    tmp_path: Path,
) -> None:
    words = [str(EXAMPLES / "checkpoint.py"), "--height", "30", "--width", "40", "--every", "20"]

    def lines(n: int, *options: str, steps: int, more: tuple[str, ...] = ()) -> list[str]:
        command = [PYCOLL_RUN, "-n", str(n), *options, *words, "--steps", str(steps), *more]
        return run(*command, cwd=tmp_path).splitlines()

    alone = lines(1, steps=100, more=("--folder", "alone"))
    assert alone[0] == "attempt 0: 1 ranks begin at step 0"
    two_hosts = ("--emulate-hosts", "2", "--restarts", "1")
    first, second, end = lines(3, *two_hosts, steps=60, more=("--kill-at", "50"))
    assert first == "attempt 0: 3 ranks begin at step 0"
    # That of step 40 may not have been written when the rank was killed.
    assert second in [f"attempt 1: 3 ranks begin at step {step}" for step in (20, 40)]
    assert end.startswith("saved at step 60, the plate is ")
    assert lines(2, steps=100) == ["attempt 0: 2 ranks begin at step 60", alone[-1]]
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-000000080", "step-000000100"]

    endless = [PYCOLL_RUN, "-n", "2", *words, "--steps", "1000000000"]
    with subprocess.Popen(
        endless, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "attempt 0: 2 ranks begin at step 100\n"
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=90 * PATIENCE)
    assert job.returncode == 0, err
    saved = re.match(r"saved at step (\d+), ", out)
    assert saved
    assert (tmp_path / f"checkpoints/step-{int(saved[1]):09d}").is_dir()
    assert re.search(r"\n\[\.{40}\] step \d+ of 1000000000", err)


def test_heat_draws_its_plate(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_example("heat.py", 2, tmp_path, "--steps", "10", "--picture", "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


@exhaustive
@pytest.mark.parametrize("size", few([2], [1, 4]))
def test_asyncio_ranks_answer_while_they_wait(size: int, tmp_path: Path) -> None:
    lines = run_example("asyncio_ranks.py", size, tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"rank {r}" for r in range(size)]
    assert all(int(line.split()[2]) >= 100 for line in lines[1:-1])
    assert lines[-1].startswith("a message that nobody sends: stopped waiting")


@needs_example_packages
@pytest.mark.parametrize("size", few([3], [1, 4]))
def test_digits_are_learned_equally_by_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    output = run_example("train_digits.py", size, tmp_path)
    assert f"the weights have the same bits on all {size} ranks: True" in output


@needs_example_packages
def test_digits_are_learned_without_the_launcher(tmp_path: Path) -> None:
    output = run(sys.executable, str(EXAMPLES / "train_digits.py"), cwd=tmp_path)
    assert "the weights have the same bits on all 1 ranks: True" in output


@needs_example_packages
@needs_torch
@pytest.mark.parametrize("size", few([2], [1, 4]))
def test_digits_are_learned_equally_by_modules_of_pytorch(size: int, tmp_path: Path) -> None:
    output = run_example("train_digits_torch.py", size, tmp_path)
    assert f"parameters and accuracy have the same bits on all {size} ranks: True" in output


@needs_torch
@pytest.mark.parametrize("size", few([2], [1, 4]))
def test_tensors_travel_and_come_back_as_tensors(size: int, tmp_path: Path) -> None:
    lines = run_example("torch_tensors.py", size, tmp_path).splitlines()
    mean = (size + 1) / 2  # of the ranks, counted from 1
    assert lines[:-1] == [
        "weights: [0.5, -1.5, 2.5], torch.bfloat16",
        f"the column of rank {size - 1}: [{10 * size - 9}, {10 * size - 6}]",
        f"the last row of the table: {[size * weight for weight in (0.5, -1.5, 2.5)]}",
        f"the mean gradient: {[mean * weight for weight in (0.5, -1.5, 2.5)]}",
        f"the mean parameter: {[mean] * 3}, requires a gradient: False",
    ]
    assert re.fullmatch(r"tensors on (cpu|cuda), the result on \1", lines[-1])


@needs_jax
@pytest.mark.parametrize("size", few([2], [1, 4]))
def test_jax_arrays_fit_a_line_together(size: int, tmp_path: Path) -> None:
    lines = run_example("jax_arrays.py", size, tmp_path).splitlines()
    assert lines[:2] == [
        "slope 3.000, height -1.000",
        f"the same bits on all {size} ranks: True",
    ]
    assert lines[2].startswith("with out=x: out is a JAX array, and those never change.")
    assert lines[3] == f"of the sum, fetched inside jit: {2 / (size * (size + 1)):.3f}"


def readme_program(name: str, place: Path) -> str:
    """Write a program of the README into `place`; the output that the README shows for it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (place / name).write_text(text.split(f"```python\n# {name}\n", 1)[1].split("```", 1)[0])
    return text.split(f"$ pycoll-run -n 4 {name}\n", 1)[1].split("```", 1)[0]


def test_the_program_in_the_readme_prints_what_the_readme_shows(tmp_path: Path) -> None:
    shown = readme_program("sum.py", tmp_path)
    assert run(PYCOLL_RUN, "-n", "4", "sum.py", cwd=tmp_path) == shown


def test_the_death_in_the_readme_is_reported_as_the_readme_shows(tmp_path: Path) -> None:
    output, _, status = readme_program("fragile.py", tmp_path).partition("$ echo $?\n")
    done = subprocess.run(
        [PYCOLL_RUN, "-n", "4", "fragile.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90 * PATIENCE,
    )
    assert done.returncode == int(status)
    # The ranks' lines come in any order, and the time is never the same, nor who had begun to wait.
    seen, shown = (
        sorted(re.sub(r"after [\d.]+ s|(?<=on world:)(\n    .*)+", "", t).splitlines())
        for t in (done.stderr, output)
    )
    assert seen == shown
