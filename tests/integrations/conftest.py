"""What the tests of all integrations compare with."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the jobs of a test's module find in this one process, without a plan; each is run once."""
    jobs = request.module.jobs.JOBS
    return cache(lambda what: jobs[what](tmp_path_factory.mktemp(what), None))
