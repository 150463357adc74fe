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
    monkeypatch.setenv("PYTEST_PLUGINS", "pycoll._tools.pytest_plugin")
    # To find and to load all plugins that are installed takes every rank 0.7 s.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def installed_plugins(plain_pytest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner pytest loads all plugins that are installed, as a user's does."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    if INSTALLED:
        monkeypatch.delenv("PYTEST_PLUGINS")
