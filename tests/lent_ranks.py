"""Ranks that are lent to what would start its own: each start takes seconds."""

from __future__ import annotations

from typing import Any

import pytest

from tensoropt.ranks.pool import RankPool


class KeptRanks:
    """A pool for whoever starts one, with ranks that outlive him."""

    def __init__(self, pool: RankPool):
        self.pool = pool

    def __enter__(self) -> RankPool:
        return self.pool

    def __exit__(self, *error: object) -> None:
        pass


def lend_ranks(patch: pytest.MonkeyPatch, pool: RankPool) -> None:
    """Measure and verify on the ranks of a pool wherever this process would start as many CPU ranks."""

    def pool_of(world_size: int, **settings: Any) -> RankPool | KeptRanks:
        alike = world_size == pool.world_size and settings.get("backend", "gloo") == "gloo"
        return (
            KeptRanks(pool) if alike and not settings.get("share_gpu") else RankPool(world_size, **settings)
        )

    for module in ("tensoropt.ranks.local_hardware", "tensoropt.verify.predict"):
        patch.setattr(f"{module}.RankPool", pool_of)
