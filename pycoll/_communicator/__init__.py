"""What users hold: a communicator, and a grid, which is one."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
