"""The agent of another machine, which is this one: `python other_agent.py NAME STARTER`.

Names that are the same up to the first dot are one machine.
"""

from __future__ import annotations

import sys

from pycoll._launcher import agent

if __name__ == "__main__":
    name, starter = sys.argv[1:]
    agent.place = lambda: f"machine {name.partition('.')[0]}"
    sys.exit(agent.main(starter))
