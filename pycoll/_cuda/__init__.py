"""CUDA: arrays on a GPU, copies of them, and page-locked memory to stage them in."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
