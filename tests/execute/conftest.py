"""The ranks that a test of a mesh takes."""

from math import prod
from typing import Any

import pytest

from tensoropt.ranks.pool import RankPool


@pytest.fixture
def pool(request: pytest.FixtureRequest, ranks: RankPool, mesh: tuple[Any, ...]) -> RankPool:
    """Two ranks, or four, for the parameter ``mesh``."""
    axes = mesh[1:] if isinstance(mesh[0], int) else mesh[2:]
    return request.getfixturevalue("four_ranks") if prod(axes) > 2 else ranks
