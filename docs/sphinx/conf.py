"""Sphinx's settings for the site; scripts/build_site runs Sphinx with them."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pycoll

project = "pycoll"
author = "The pycoll authors"
copyright = author  # the name that Sphinx asks for
version = release = pycoll.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"

# The pages are Markdown that a git viewer shows, too: its anchors, and nothing beyond it.
myst_heading_anchors = 6
myst_links_external_new_tab = False

# A name in single backticks in a docstring is a link if it is public, else code.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_mock_imports = ["ray", "distributed", "torch"]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# As lists: a line may explain several names, as in "source, tag: ...".
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"pycoll {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None
pygments_style = "default"
pygments_dark_style = "monokai"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _language(lines: list[str]) -> str:
    try:
        ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:
        return "text"
    return "python"


def mark_blocks(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings set tables and programs apart by a blank line and four blanks: show them as such.

    reStructuredText would wrap their lines.
    """
    # Of an attribute napoleon takes what stands before a colon for its type: so begin with an empty
    # comment.
    made = ["..", ""] if what in ("attribute", "property", "data") else []
    before = 0
    while lines:
        line = lines.pop(0)
        if line.strip() and made and not made[-1] and _indent(line) >= before + 4:
            block = [line]
            while lines and (not lines[0].strip() or _indent(lines[0]) > before):
                block.append(lines.pop(0))
            made += [f"{' ' * before}.. code-block:: {_language(block)}", "", *block, ""]
        else:
            before = _indent(line) if line.strip() else before
            made.append(line)
    lines[:] = made


NOT_MADE_BY_USERS = {
    "pycoll.Communicator",
    "pycoll.Grid",
    "pycoll.Message",
    "pycoll.Request",
    "pycoll._drawing.show.Drawing",
    "pycoll._requests.nonblocking.Persistent",
    "pycoll._requests.core_requests.PersistentRequest",
    "pycoll.parallel.CompressedRequest",
}
"""Classes whose parameters are nobody's business: methods and functions return them."""


def signature(
    app: Any, what: str, name: str, value: Any, options: Any, text: str, returns: str
) -> tuple[str, str] | None:
    """The signature that is shown; None: the one that there is."""
    return ("", "") if name in NOT_MADE_BY_USERS else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", mark_blocks, priority=400)  # before napoleon's, 500
    app.connect("autodoc-process-signature", signature)
