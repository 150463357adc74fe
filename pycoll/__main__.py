"""`python -m pycoll` is the command `pycoll`."""

from __future__ import annotations

import sys

from pycoll._tools.cli import main

sys.exit(main())
