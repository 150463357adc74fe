"""`python -m pycoll.launcher` is `pycoll-run`."""

from __future__ import annotations

import sys

from pycoll.launcher.cli import main

sys.exit(main())
