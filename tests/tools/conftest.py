"""What tests of pycoll's pytest plugin share."""

from __future__ import annotations

import pytest
from plugin_runs import INSTALLED, ROOT


@pytest.fixture
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner pytest finds this plugin, and none of the settings of the outer one."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT) if not INSTALLED else "")
    monkeypatch.setenv("COLUMNS", "120")
    if not INSTALLED:
        monkeypatch.setenv("PYTEST_PLUGINS", "pycoll._tools.pytest_plugin")
