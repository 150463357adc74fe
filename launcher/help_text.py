"""What `pycoll-run --help` prints: one screen of 24 lines of 80 columns, and all below it."""

from __future__ import annotations

import argparse

from pycoll._support.environment import VARIABLES

_START = """\
usage: pycoll-run [options] script.py [arguments]
       pycoll-run [options] -m package.module [arguments]
       pycoll-run [options] -- program [arguments]

Start a program on several ranks, of this machine or of several.

  pycoll-run -n 4 train.py --lr 0.1           4 ranks on this machine
  pycoll-run -H node1:8,node2:8 train.py      8 ranks on each of two others
"""
_END = "Exit status: 0 if every rank ended with 0, else that of the first to fail."
_STATUSES = """\
exit status:
  0 if every rank ended with 0, else that of the rank that failed first (128 + signal if a signal
  killed it; the code of abort(code)); 124 after --timeout, 130 after Ctrl-C, 143 after SIGTERM,
  127 or 126 if the program cannot be run, 2 if this command line is wrong, 69 if a host, a port or
  the like is not to be had, 1 if a host is lost, 70 after an error of pycoll-run itself"""
_COMMON = (
    *("size", "hosts", "exports", "tag_output", "log_dir"),
    *("timeout", "op_timeout", "transport", "verbose", "help_all"),
)
_WIDTH = 26  # of what a user types, before what it means


def screen(parser: argparse.ArgumentParser) -> str:
    """What a new user needs: how to start a program, the commonest options, where the rest is."""
    by_name = {action.dest: action for action in parser._actions}
    rows = [_row(by_name[name]) for name in _COMMON]
    return "\n".join([_START, "common options:", *rows, "", _END])


def everything(parser: argparse.ArgumentParser) -> str:
    """The screen, and below it every option, exit status and environment variable."""
    parts = [screen(parser)]
    for group in parser._action_groups:
        if group._group_actions:
            rows = [_row(action) for action in group._group_actions]
            parts.append("\n".join([f"options {group.title}:", *rows]))
    return "\n\n".join([*parts, _STATUSES, variables_text()])


def variables_text() -> str:
    """The table of all environment variables."""
    width = max(len(variable.name) for group in VARIABLES.values() for variable in group)
    lines = []
    for heading, group in VARIABLES.items():
        lines.append(f"environment variables {heading}:")
        lines.extend(f"  {variable.name:{width}}  {variable.meaning}" for variable in group)
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(action: argparse.Action) -> str:
    """One option: what a user types, two blanks or a new line, what it means."""
    typed = "  " + ", ".join(action.option_strings)
    if action.metavar is not None:
        typed += f" {action.metavar}"
    if len(typed) > _WIDTH - 2:
        typed += "\n" + " " * _WIDTH
    return f"{typed:{_WIDTH}}{action.help}"
