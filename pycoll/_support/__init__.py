"""What every layer uses: lazy imports, settings of the environment, errors at the public edge."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
