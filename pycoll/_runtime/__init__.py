"""What runs on one rank: its engine, its contexts, its messages, and who is still there."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
