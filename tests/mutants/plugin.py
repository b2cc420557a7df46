"""A pytest plugin of every trial: the first counterexample will do, and lines are noted by test file."""

from __future__ import annotations

from typing import Any


def pytest_collection_modifyitems() -> None:
    from hypothesis import Phase, settings  # conftest.py has chosen its profile by now

    phases = [Phase.explicit, Phase.generate]  # to find the smallest takes long
    parent = settings.get_profile("ci")
    settings.register_profile("mutants", parent=parent, phases=phases, database=None)
    settings.load_profile("mutants")


def pytest_runtest_logstart(nodeid: str) -> None:
    from coverage import Coverage

    current: Any = Coverage.current()
    if current is not None:
        current.switch_context(nodeid.split("::")[0])
