"""Jobs of functions that take a communicator, with options that no pool of ranks has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import p2p_cases
from script_jobs import Done, Jobs

from pycoll._support import pickling


def run_programs(
    job: Jobs, n: int, programs: Sequence[Callable[[Any], None]], *options: str
) -> Done:
    """Run programs in one job, each with a communicator of its own."""
    # The names of these modules mean nothing to the ranks.
    modules = {p2p_cases, *(sys.modules[program.__module__] for program in programs)}
    with contextlib.ExitStack() as by_value:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
            by_value.callback(cloudpickle.unregister_pickle_by_value, module)
        (job.folder / "programs").write_bytes(pickling.dumps(programs))
    return job(
        n,
        """
import pickle
for program in pickle.loads(open(sys.argv[1] + "/programs", "rb").read()):
    with comm.dup() as own:
        program(own)
ok()
""",
        *options,
    )
