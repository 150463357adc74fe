"""The calls of a communicator, one file a family, from checked arguments to the engine."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
