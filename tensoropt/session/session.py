"""What all stages of one exploration share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tensoropt.cluster import Cluster
from tensoropt.plan.settings import Settings
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.session.clock import StageClock
from tensoropt.session.remaining import Remaining
from tensoropt.types import Progress, silent


@dataclass(frozen=True)
class Session:
    """Where and how is explored.

    Attributes:
        store: the profile store; None for the user's own, which is opened where it is needed.
        progress: called with (stage, done, total, what).
        clock: seconds per stage so far.
        remaining: seconds that are left, as far as that can be said.
        keep: tables and frontiers of single spaces are kept beside the profile store, and those that were
            kept are used.
    """

    cluster: Cluster
    settings: Settings
    store: ProfileStore | None = None
    progress: Progress = silent
    clock: StageClock = field(default_factory=StageClock)
    remaining: Remaining = field(default_factory=Remaining)
    keep: bool = False

    def report(self, stage: str, done: int, total: int, what: str, /) -> None:
        """Show progress, and how long all that was announced still takes."""
        words = self.remaining.words
        self.progress(stage, done, total, f"{words}, {what}" if words else what)

    def open_store(self) -> AbstractContextManager[ProfileStore]:
        """The profile store for a block; one that was given stays open behind it."""
        return nullcontext(self.store) if self.store is not None else ProfileStore()

    def open_ranks(self) -> AbstractContextManager[RankPool | None]:
        """Ranks to measure on for a block; None unless the cluster is this machine and may be measured."""
        pool = None if self.settings.measure == "never" else local_pool(self.cluster)
        return pool if pool is not None else nullcontext()
