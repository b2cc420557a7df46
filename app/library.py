"""The explorations a page may ask for, by name: the ready-made ones, an opened folder, finished jobs.

A page names an exploration only by its key. Keys are looked up here and never become a path, so nothing
outside the folders that were found can be opened from the web.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration, load_exploration
from tensoropt.plan.cluster_offers import ClusterCurve
from tensoropt.plan.device_sweep import folders_in
from tensoropt.plan.exploration_files import DESCRIBED, Costs
from tensoropt.plan.verified import Verified, load_verified

from .index import Head, Index
from .labels import Labels
from .recent import Recent

READY_MADE = Path(__file__).parent / "data"
CACHED = 8
"""Explorations kept in memory: of a frontier of 20,000 points all that was looked at are 100 MiB."""


@dataclass(frozen=True)
class Entry:
    """An exploration on disk.

    Attributes:
        key: its name in URLs.
        folder: its folder.
        origin: ``ready-made``, ``opened`` or ``job``.
        newer: its folder with planners beside it, if they were run; that is what pages show.
        also: the keys of job results that are, or were, shown in its place.
    """

    key: str
    folder: Path
    origin: str
    newer: Path | None = None
    also: tuple[str, ...] = ()

    @property
    def shown(self) -> Path:
        """The folder whose exploration pages show."""
        return self.newer or self.folder

    @property
    def identity(self) -> str:
        """The identity that stays the same whichever folder a dashboard was started with: labels are kept by
        it."""
        return str(self.folder.resolve()) if self.origin == "opened" else self.key


class UnknownExplorationError(TensorOptError):
    """A key that names no exploration of this library."""


class Library:
    """Explorations by key, read at first use and reread when their file changes.

    Args:
        opened: a folder given to ``explore --out``, or one that holds several such folders.
        jobs: returns (job id, folder) of the jobs that left a result.
        ready_made: the folder of the package's own explorations.
        names: returns model source -> what people call it, if that is not in the source (uploads).
        beside: returns absolute folder -> the folder that is shown in its place.

    Raises:
        TensorOptError: ``opened`` holds no exploration.
    """

    def __init__(
        self,
        opened: Path | None = None,
        jobs: Callable[[], list[tuple[str, Path]]] = list,
        ready_made: Path = READY_MADE,
        names: Callable[[], Mapping[str, str]] = dict,
        beside: Callable[[], Mapping[Path, Path]] = dict,
    ):
        self._names, self._beside = names, beside
        self._fixed = [Entry(f.name, f, "ready-made") for f in folders_in(ready_made)]
        self._jobs = jobs
        self._opened = opened
        self._index = Index()
        self.labels = Labels()
        """People's labels of them; :func:`.server.create_app` keeps the labels beside the jobs."""
        self._recent = Recent(CACHED)
        if opened is not None and not any(folders_in(opened)):
            raise TensorOptError(
                f"{opened} holds no exploration (no {DESCRIBED} in it or in a folder of it); "
                "run `tensoropt explore MODEL --cluster CLUSTER --out DIR` and open that DIR"
            )

    def entries(self) -> tuple[Entry, ...]:
        """Return opened explorations first, then jobs, newest first, then the ready-made ones."""
        opened = [Entry(f"opened-{f.name}", f, "opened") for f in folders_in(self._opened)]
        jobs = [Entry(key, folder, "job") for key, folder in self._jobs()]
        # The last entry of a key wins: an opened folder hides a shipped exploration of the same name.
        unique = {entry.key: entry for entry in (*self._fixed, *jobs, *opened)}
        order = [e for e in (*opened, *jobs, *self._fixed) if unique[e.key] is e]
        beside = self._beside()
        if not beside:
            return tuple(order)
        shown = {e: _chain(e.folder, beside) for e in order}
        elsewhere = {folder.resolve() for chain in shown.values() for folder in chain}
        key_of = {entry.folder.resolve(): entry.key for entry in jobs}

        def told(entry: Entry) -> Entry:
            if not (chain := shown[entry]):
                return entry
            known = [key_of[folder.resolve()] for folder in chain if folder.resolve() in key_of]
            return replace(entry, newer=chain[-1], also=tuple(known))

        return tuple(told(e) for e in order if e.folder.resolve() not in elsewhere)

    def entry(self, key: str) -> Entry:
        """Return the entry called ``key``, or the one that shows it in its place.

        Raises:
            UnknownExplorationError: there is none.
        """
        entries = self.entries()
        for entry in entries:
            if entry.key == key:
                return entry
        for entry in entries:
            if key in entry.also:
                return entry
        raise UnknownExplorationError(
            f"there is no exploration called '{key[:80]}' here any more; pick one from the list above"
        )

    def head_of(self, entry: Entry) -> Head:
        """Return the head of an exploration, which says what it is about, without opening it; its fault if it
        cannot be read."""
        return self._index.head(entry.shown)

    def costs_of(self, entry: Entry) -> Costs:
        """Return the costs of an exploration's points; none if they cannot be read."""
        return self._index.costs(entry.shown)

    def alike(self, key: str) -> dict[Entry, ClusterCurve]:
        """Return the explorations of the same step that have points, in the library's order, with their
        curves; none of them is opened."""
        step = self.head_of(self.entry(key)).step
        found = {}
        for entry in self.entries():
            head = self.head_of(entry)
            if head.step == step and head.kinds and len((costs := self.costs_of(entry)).memory):
                count = int(costs.devices[0])
                found[entry] = ClusterCurve(head.cluster, head.kinds, count, costs.memory, costs.time)
        return found

    def model_name(self, source: str) -> str:
        """Return what people call a model: its upload's or the zoo's name, or the last part of its file's."""
        return self._names().get(source) or source.removeprefix("zoo:").rpartition("/")[2] or "model"

    def verified(self, key: str) -> tuple[Verified, ...]:
        """Return what is known about plans of exploration ``key`` that were run.

        Raises:
            UnknownExplorationError, TensorOptError: no such key; the file is damaged.
        """
        entry = self.entry(key)
        folders = dict.fromkeys((entry.shown, entry.folder))
        return tuple(one for folder in folders for one in load_verified(folder))

    def load(self, key: str) -> Exploration:
        """Return the exploration called ``key``.

        Raises:
            UnknownExplorationError, TensorOptError: no such key; its files are damaged.
        """
        folder = self.entry(key).shown
        try:
            # Part of the cache's key: a folder that is explored again shows its new content.
            stamp = (folder / DESCRIBED).stat().st_mtime_ns
        except OSError as error:
            raise UnknownExplorationError(
                f"the files of '{key}' are gone; pick another exploration"
            ) from error
        found: Exploration = self._recent.get(
            (folder, stamp), lambda: _checked(load_exploration(folder), folder)
        )
        return found


def _chain(folder: Path, beside: Mapping[Path, Path]) -> list[Path]:
    """Return the folders that are shown in a folder's place, each in that of the previous one."""
    found: list[Path] = []
    while (newer := beside.get(folder.resolve())) is not None and newer not in found:
        found.append(newer)
        folder = newer
    return found


def _checked(found: Exploration, folder: Path) -> Exploration:
    """Return the exploration, if its pages can be drawn; raise :class:`TensorOptError` otherwise."""
    try:
        str(found.cluster["name"]), len(found.cluster["devices"])
        if min(float(kind["memory_bytes"]) for kind in found.cluster["kinds"]) <= 0:
            raise ValueError("a device without memory")
        spaces = found.all_points.column("space")
        if not ((spaces >= 0) & (spaces < len(found.spaces))).all():
            raise ValueError("a point of no space")
    except (KeyError, TypeError, ValueError) as error:
        raise TensorOptError(
            f"{folder.name} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    return found
