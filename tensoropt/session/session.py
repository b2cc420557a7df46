"""The settings, resources and clock that all stages of one exploration share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.compute_dtype import with_dtype
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Progress, silent


class _StageClock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the ``with`` block to that of the named stage."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Session:
    """The settings and resources of an exploration.

    Attributes:
        store: the profile store; None for the user's own, which is opened when it is needed.
        progress: called with (stage, done, total, what). If it has methods ``note``, ``first`` and
            ``points``, they are called with a line, with the answer before the search, and with memory and
            time of the points so far.
        clock: the durations of the stages so far, in seconds.
        keep: whether cost tables are saved in the profile store and reused from there.
        left: what was not searched because of Ctrl-C, in words.
    """

    cluster: Cluster
    settings: Settings
    store: ProfileStore | None = None
    progress: Progress = silent
    clock: _StageClock = field(default_factory=_StageClock)
    keep: bool = False
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Nobody decided, so the model keeps its own dtypes; plans say which.
        object.__setattr__(self, "settings", with_dtype(self.settings, "", [self.cluster]))

    def note(self, words: str, /) -> None:
        """Show a line before a long stage begins, if the progress display can show one."""
        if show := getattr(self.progress, "note", None):
            show(words)

    def seconds_with(self, report: Mapping[str, Any], stage: str) -> dict[str, float]:
        """Return a report's durations of stages in seconds, and that of ``stage``, which ended later."""
        return {**report["seconds"], stage: round(self.clock.seconds[stage], 3)}

    def open_store(self) -> AbstractContextManager[ProfileStore]:
        """Return the profile store for a ``with`` block; a given store stays open afterwards."""
        return nullcontext(self.store) if self.store is not None else ProfileStore()

    def open_ranks(self) -> AbstractContextManager[RankPool | None]:
        """Return ranks to measure on for a ``with`` block, or None if the settings forbid measuring, or the
        cluster cannot be measured here."""
        pool = None if self.settings.measure == "never" else local_pool(self.cluster)
        return pool if pool is not None else nullcontext()
