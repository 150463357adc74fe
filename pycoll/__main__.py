"""`python -m pycoll` is the command `pycoll`."""

from __future__ import annotations

import sys

from pycoll.cli import main

sys.exit(main())
