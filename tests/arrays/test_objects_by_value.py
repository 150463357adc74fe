"""Objects of functions and classes that other ranks cannot import: they travel with their code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pycoll._arrays import objects

NOTEBOOK = """
import dataclasses
import numpy as np
import pycoll


@dataclasses.dataclass
class Measured:
    rank: int
    values: object


def main(comm):
    mine = Measured(comm.rank, np.full(40_000, comm.rank))
    everybody = comm.all_gather(mine)
    assert all(type(other) is Measured for other in everybody)
    assert [int(other.values[-1]) for other in everybody] == [0, 1]
    gathered = comm.gather(mine)
    assert gathered is None or gathered[1].rank == 1
    other = comm.sendrecv(mine, 1 - comm.rank, 1 - comm.rank)
    other.values[0] = 7  # arrays inside arrive writable
    step = comm.broadcast((lambda x: x + comm_free) if comm.rank == 0 else None)
    return step(comm.rank), comm.all_reduce(mine, op=later)


def later(a, b):
    return b


comm_free = 10
results = pycoll.run(main, 2)
assert [step for step, _ in results] == [10, 11]
assert all(type(last) is Measured and last.rank == 1 for _, last in results)
print("well")
"""


def test_objects_of_a_scripts_own_classes_and_lambdas_travel_inside_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTEBOOK)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("well\n", "")


SCRIPT = """
import pycoll


class Base:
    class Inner:
        pass


class Mine(Base):
    def double(self, x):
        return 2 * super_free(x)


def super_free(x):
    return x


comm = pycoll.init()
other = 1 - comm.rank
mine, inner, step = comm.sendrecv((Mine(), Base.Inner(), lambda x: x + 1), other, other)
assert isinstance(mine, Mine) and isinstance(mine, Base) and isinstance(inner, Base.Inner)
assert (mine.double(2), step(1)) == (4, 2)
"""


def test_beside_a_lambda_a_scripts_own_classes_stay_the_same(job: Any) -> None:
    assert job(2, SCRIPT + "ok()\n").content == [0, 1]


def there_and_back(obj: Any) -> Any:
    return objects.load(memoryview(bytearray(b"".join(objects.dump(obj)))))


def test_what_goes_with_its_code_takes_its_arrays_out_of_band() -> None:
    array = np.arange(100_000)
    array.flags.writeable = False
    function, array_there = there_and_back((lambda: 5, array))
    assert function() == 5
    assert array_there.flags.writeable
    assert array_there.tolist() == array.tolist()
    parts = objects.dump((lambda: 5, np.zeros(100_000)))
    assert parts[-1].nbytes == 800_000


def test_ordinary_objects_do_not_meet_cloudpickle() -> None:
    program = (
        "import sys; from pycoll._arrays import objects; import numpy as np; "
        "objects.dump({'a': [1, np.ones(3)], 'b': len}); print('cloudpickle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
