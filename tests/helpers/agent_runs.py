"""Runs of `pycoll-run` with agents."""

from __future__ import annotations

from pathlib import Path

from patience import PATIENCE

LIMIT_S = 60 * PATIENCE

_AGENT = Path(__file__).with_name("other_agent.py")

# What ssh is asked to run there is run here, by the agent of a machine of that name.
SSH = f"""\
#!/bin/sh
for word; do name=$last last=$word; done
BEFORE
last=$(printf %s "$last" | sed "s:-m pycoll._launcher.agent:{_AGENT} $name:")
exec env -i HOME="$HOME" PATH=/usr/bin:/bin SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" \\
    sh -c "$last"
"""
