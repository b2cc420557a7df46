"""The state that all stages of one exploration share, with the seconds that stages took and are expected to
take.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.costs.tables import CostTables, search_s
from tensoropt.profiling.measure import Remaining
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.compute_dtype import with_dtype
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Floats, Progress, silent


class _StageClock:
    """A clock that records how long each stage took.

    Attributes:
        seconds: the seconds of each stage, in the order in which the stages ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those recorded under this name."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


LIKE_OUTLINE = 8.0
"""The least factor by which a search takes longer than its outline."""
LIKE_WIDEST = 2.0
"""The factor by which the search of a wide mesh over several levels takes longer than that of the widest
other mesh."""
_SIMULATE_S = 0.02
"""The seconds per variable to simulate neighbours and to make points."""


def outlined_s(tables: CostTables, outline_s: float) -> float:
    """Return the seconds that the search of a space takes, given those of its outline."""
    return max(search_s(tables), LIKE_OUTLINE * outline_s)


def wide_s(levels: int, tables: Sequence[CostTables]) -> float:
    """Return the seconds that a space of a wide mesh takes, given the tables of the others."""
    # Inside one level it mostly brings nothing, so that it is outlined only.
    return (LIKE_WIDEST if levels > 1 else 1.0) * max(map(search_s, tables))


QUICK_PLANS = "planners"
"""The name of the stage of quick planners in progress, and of its seconds in a report."""
_QUICK_S, _QUICK_S_PER_GROUP = 10.0, 0.1
"""The seconds of quick planners, and of these for each group; assumptions, from GPT-2's on two cores."""


def quick_plans_s(groups: int) -> float:
    """Return the estimated seconds that quick planners take."""
    return _QUICK_S + _QUICK_S_PER_GROUP * groups


def simulate_s(tables: CostTables) -> float:
    """Return the seconds from the last search to the exploration."""
    return _SIMULATE_S * len(tables.variables)


@dataclass(frozen=True)
class Session:
    """The settings and resources of an exploration.

    Attributes:
        store: the profile store; None for the user's own, which is opened when it is needed.
        progress: called with (stage, done, total, what).
        clock: the seconds per stage so far.
        remaining: the remaining seconds, as far as they can be estimated.
        keep: whether tables and frontiers of single spaces are kept in the profile store, and reused from
            there.
    """

    cluster: Cluster
    settings: Settings
    store: ProfileStore | None = None
    progress: Progress = silent
    clock: _StageClock = field(default_factory=_StageClock)
    remaining: Remaining = field(default_factory=Remaining)
    keep: bool = False

    def __post_init__(self) -> None:
        # Nobody decided, so the model keeps its own dtypes; plans say which.
        object.__setattr__(self, "settings", with_dtype(self.settings, "", [self.cluster]))

    def report(self, stage: str, done: int, total: int, what: str, /) -> None:
        """Show progress, and how long everything that was announced still takes."""
        self.progress(stage, done, total, self.remaining.before(what))

    @property
    def draw(self) -> Callable[[Floats, Floats], None] | None:
        """The function that shows the points known so far, their memory and time; None if the progress has no
        ``points``, which does."""
        return getattr(self.progress, "points", None)

    def note(self, words: str, /) -> None:
        """Show a line that a person should read before a long part begins, if the progress shows notes."""
        show = getattr(self.progress, "note", None)
        if show is not None:
            show(words)

    def seconds_with(self, report: Mapping[str, Any], stage: str) -> dict[str, float]:
        """Return the seconds per stage of a report, with those of a stage that has ended since."""
        return {**report["seconds"], stage: round(self.clock.seconds[stage], 3)}

    def open_store(self) -> AbstractContextManager[ProfileStore]:
        """Return the profile store for a block; a given store stays open afterwards."""
        return nullcontext(self.store) if self.store is not None else ProfileStore()

    def open_ranks(self) -> AbstractContextManager[RankPool | None]:
        """Return ranks to measure on for a block; None unless the cluster is this machine and may be
        measured."""
        pool = None if self.settings.measure == "never" else local_pool(self.cluster)
        return pool if pool is not None else nullcontext()
