"""Which algorithm runs: costs, what ranks have agreed on, and the choice."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
