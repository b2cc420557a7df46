"""Ranks that are lent to what would start its own: each start takes seconds."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tensoropt.engine.runtime import leave_job
from tensoropt.profiling import links, workload_timing
from tensoropt.ranks.pool import RankPool

BRIEF = {(workload_timing, "TARGET_S"): 0.0, (workload_timing, "MIN_REPEATS"): 2}
"""What is timed on lent ranks is timed as on any others, but less often: the figures are rough."""

SHORT, USUAL = (
    {
        (module.__name__, name): brief if short else getattr(module, name)
        for (module, name), brief in BRIEF.items()
    }
    for short in (True, False)
)


def _settle(rank: int, world_size: int, folder: str, constants: dict[tuple[str, str], Any]) -> None:
    """Work in the borrower's folder, where his models are, and time as briefly as he wants."""
    os.chdir(folder)
    for (module, name), value in constants.items():
        setattr(sys.modules[module], name, value)


def _leave(rank: int, world_size: int) -> None:
    leave_job()


def leave_groups(pool: RankPool) -> None:
    """Leave the process groups that were made: two threads of each look for work a hundred times a second."""
    pool.run(_leave)
    pool.reset()


class KeptRanks:
    """A pool for whoever starts one, with ranks that outlive him."""

    def __init__(self, pool: RankPool):
        self.pool = pool

    def __enter__(self) -> RankPool:
        return self.pool

    def __exit__(self, *error: object) -> None:
        pass


class LentRanks(KeptRanks):
    """Such a pool in the folder of its borrower, with brief timings."""

    def __enter__(self) -> RankPool:
        self.pool.run(_settle, os.getcwd(), SHORT)
        return self.pool

    def __exit__(self, *error: object) -> None:
        self.pool.run(_settle, os.sep, USUAL)


def lend_ranks(patch: pytest.MonkeyPatch, pool: RankPool) -> None:
    """Measure and verify on the ranks of a pool wherever this process would start as many CPU ranks."""

    def pool_of(world_size: int, **settings: Any) -> RankPool | KeptRanks:
        alike = world_size == pool.world_size and settings.get("backend", "gloo") == "gloo"
        return (
            LentRanks(pool) if alike and not settings.get("share_gpu") else RankPool(world_size, **settings)
        )

    for module in ("tensoropt.ranks.local_hardware", "tensoropt.verify.predict"):
        patch.setattr(f"{module}.RankPool", pool_of)
    for name, value in (("_MOST_REPEATS", 3), ("_FEWEST_REPEATS", 3)):
        patch.setattr(links, name, value)
