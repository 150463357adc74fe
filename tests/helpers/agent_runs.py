"""Runs of `pycoll-run` with agents."""

from __future__ import annotations

from patience import PATIENCE

LIMIT_S = 60 * PATIENCE


SSH = """\
#!/bin/sh
for word; do last=$word; done
BEFORE
exec env -i HOME="$HOME" PATH=/usr/bin:/bin SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" \\
    sh -c "$last"
"""
