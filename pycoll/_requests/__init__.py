"""Requests: calls that go on while their caller computes, in the compiled core or beside it."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
