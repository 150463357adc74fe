"""Jobs of this user on this machine, as `pycoll status` and `pycoll top` find and ask them."""

from __future__ import annotations

import contextlib
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pycoll._launcher import job_socket
from pycoll.errors import Error

ANSWER_S = 10.0
"""For a job to answer; its ranks have a second of that, and three rounds of questions."""
_ABOUT_S = 2.0
_MOST_AT_ONCE = 64

Fields = dict[str, Any]


class RunningJob:
    """A job that runs.

    Attributes:
        about: its "job" (id), "process", "command", "size", "seconds".
    """

    def __init__(self, path: str, about: Fields) -> None:
        self._path = path
        self.about = about

    def ask(self, want: str) -> Fields:
        """Return what it answers.

        Raises:
            Error: it does not.
        """
        try:
            found: Fields = job_socket.ask(self._path, {"want": want}, ANSWER_S)
            return found
        except TimeoutError:
            raise Error(_silent(self._path)) from None
        except OSError:
            raise JobEndedError(f"job {self.name} has ended") from None

    @property
    def name(self) -> str:
        """Its id, in short."""
        return str(self.about["job"])[:8]

    def title(self) -> str:
        """Say what it is: a line."""
        about = self.about
        command = shlex.join(about["command"])
        return (
            f"job {self.name}, process {about['process']}, {about['size']} ranks, "
            f"for {duration(about['seconds'])}: {command}"
        )


class JobEndedError(Error):
    """The job has ended."""


def find(name: str | None) -> RunningJob:
    """Return the job of that name: the beginning of its id, or its launcher's process; None: any.

    Raises:
        Error: there is none, or there are several.
    """
    jobs, silent = running(name)
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        lines = [f"{len(jobs)} jobs run; say which, by its id or its process:"]
        raise SeveralError("\n".join([*lines, *(f"    {job.title()}" for job in jobs)]))
    wanted = "no job of this user runs" if name is None else f"no job {name} of this user runs"
    raise Error("; ".join([f"{wanted} on this machine", *silent]))


class SeveralError(Error):
    """It was not said which of several jobs."""


def running(name: str | None = None) -> tuple[list[RunningJob], list[str]]:
    """Return the jobs that run, the oldest first, and what is to be said of those that are silent.

    All are asked at once: many may be silent, and each is waited for. What a job has left behind
    that was killed with all its helpers is removed.

    Args:
        name: only those of that name, see `find`; None: all.
    """
    paths = []
    for folder in filter(job_socket.is_private, job_socket.folders()):
        for file in os.listdir(folder):  # the id's beginning: see `job_socket.JobSocket`
            process, _, job = file.partition(".")
            if name is None or name == process or job.startswith(name[: len(job)]):
                paths.append(f"{folder}/{file}")
    with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        found = [each for each in threads.map(_asked, paths) if each is not None]
    jobs = [each for each in found if isinstance(each, RunningJob)]
    silent = [each for each in found if isinstance(each, str)]
    return sorted(jobs, key=lambda job: -job.about["seconds"]), silent


def _asked(path: str) -> RunningJob | str | None:
    """Ask a job what it is; what is to be said of it if it is silent; None: it is none of ours."""
    try:
        return RunningJob(path, job_socket.ask(path, {"want": "about"}, _ABOUT_S))
    except ConnectionRefusedError:
        job_socket.forget(path)
    except TimeoutError:
        return _silent(path)
    except OSError:  # it is no socket, or not of this user
        pass
    return None


def _silent(path: str) -> str:
    process = os.path.basename(path).partition(".")[0]
    why = "a Pool whose ranks have nothing to do"
    with contextlib.suppress(OSError):
        from pycoll._launcher.process import doing

        if doing(int(process)) == "stopped":
            why = "it is stopped"
    return f"the job of process {process} does not answer ({why})"


def duration(seconds: float) -> str:
    """Write a time for people: "3 s", "12 min 3 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
