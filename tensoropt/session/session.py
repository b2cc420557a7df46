"""The state that all stages of one exploration share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tensoropt.cluster import Cluster
from tensoropt.plan.settings import Settings
from tensoropt.profiling.eta import Remaining
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.session.clock import StageClock
from tensoropt.types import Progress, silent


@dataclass(frozen=True)
class Session:
    """The settings and resources of an exploration.

    Attributes:
        store: the profile store; None for the user's own, which is opened when it is needed.
        progress: called with (stage, done, total, what).
        clock: the seconds per stage so far.
        remaining: the remaining seconds, as far as they can be estimated.
        keep: whether tables and frontiers of single spaces are kept beside the profile store, and reused from
            there.
    """

    cluster: Cluster
    settings: Settings
    store: ProfileStore | None = None
    progress: Progress = silent
    clock: StageClock = field(default_factory=StageClock)
    remaining: Remaining = field(default_factory=Remaining)
    keep: bool = False

    def report(self, stage: str, done: int, total: int, what: str, /) -> None:
        """Show progress, and how long everything that was announced still takes."""
        self.progress(stage, done, total, self.remaining.before(what))

    def open_store(self) -> AbstractContextManager[ProfileStore]:
        """Return the profile store for a block; a given store stays open afterwards."""
        return nullcontext(self.store) if self.store is not None else ProfileStore()

    def open_ranks(self) -> AbstractContextManager[RankPool | None]:
        """Return ranks to measure on for a block; None unless the cluster is this machine and may be
        measured."""
        pool = None if self.settings.measure == "never" else local_pool(self.cluster)
        return pool if pool is not None else nullcontext()
