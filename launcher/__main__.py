"""`python -m pycoll._launcher` is `pycoll-run`."""

from __future__ import annotations

import sys

from pycoll._launcher.cli import main

sys.exit(main())
