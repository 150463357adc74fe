"""Starts the ranks that measure the links of hosts, and takes their result."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from pycoll._selection.topology import VARIABLE
from pycoll._support.environment import version
from pycoll._topology.links import HostLinks, number_text
from pycoll._topology.worker import MARK


class MeasuringError(Exception):
    """The job has failed; the text says what was missing, if the job itself has not."""


def measure(options: Sequence[str]) -> HostLinks:
    """Run a job that measures.

    Args:
        options: of pycoll-run.

    Raises:
        MeasuringError: it failed.
        ValueError: it has one host.
    """
    command = [sys.executable, "-P", "-m", "pycoll._launcher", "--no-tag-output", *options]
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with subprocess.Popen(
        [*command, "-m", "pycoll._topology.worker"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            printed, _ = job.communicate()
        except KeyboardInterrupt:  # which a terminal tells the job, too
            job.terminate()
            job.wait()
            raise
    line = next((line for line in printed.splitlines() if line.startswith(MARK)), None)
    if job.returncode or line is None:
        raise MeasuringError(f"nothing was measured: pycoll-run ended with {job.returncode}")
    said = json.loads(line.removeprefix(MARK))
    hosts = tuple(said["hosts"])
    if len(hosts) < 2:
        raise ValueError(
            "--measure: there is one host, and no link; name several, as -H a:1,b:1, or pretend "
            "some on this one, as --emulate-hosts 3"
        )
    widths = [[0.0] * len(hosts) for _ in hosts]
    latencies = [[0.0] * len(hosts) for _ in hosts]
    for sender, receiver, latency, speed in said["links"]:
        # As they stand in the file: who searches in that again finds the same ring.
        widths[sender][receiver] = float(number_text(speed / 1e6))
        latencies[sender][receiver] = float(number_text(latency * 1e6))
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    origin = f"measured by pycoll topology {version()}, {today}"
    return HostLinks(hosts, widths, latencies, origin=origin)
