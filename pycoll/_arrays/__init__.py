"""Values: whatever a user passes becomes memory here, and comes back; operators on it."""

from pycoll._support.lazy_import import import_lazily

import_lazily(__name__)
