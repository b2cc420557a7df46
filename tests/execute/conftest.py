"""Ranks are started once per session: starting costs seconds, a run milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensoropt.costs.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=120.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=120.0) as pool:
        yield pool
