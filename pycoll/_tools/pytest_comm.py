"""The fixture `comm` of the pytest plugin, a plugin of its own, which only ranks have.

The name is an obvious one: who installs pycoll beside another plugin for parallel tests has tests
that ask for the `comm` of that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pycoll._communicator.communicator import Communicator

RANK_PLUGIN = "pycoll-rank"
"""The name of the plugin that a rank's own pytest has."""


@pytest.fixture(scope="session")
def comm(pytestconfig: pytest.Config) -> Communicator:
    """The world communicator of a test marked with @pytest.mark.ranks(2, 4)."""
    rank: Any = pytestconfig.pluginmanager.get_plugin(RANK_PLUGIN)
    world: Communicator = rank.join()
    return world


def explain_missing(report: pytest.TestReport, error: BaseException) -> None:
    """Say in the report of a test without the marker why there is no fixture `comm`."""
    if isinstance(error, pytest.FixtureLookupError) and error.argname == "comm":
        report.longrepr = (
            "the fixture comm is for tests that run on several ranks: mark this one, for example "
            "with @pytest.mark.ranks(2)"
        )
