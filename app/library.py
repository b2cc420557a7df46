"""The explorations that a page may request, by key: the ready-made ones, an opened folder, finished jobs.

A page names an exploration only by its key. Keys are looked up here and never become a path, so nothing
outside these folders can be opened from the web.

The index: what the dashboard knows of every exploration without opening it, read once, and again when a file
changes. Opening an exploration makes objects of all its points; lists and tables of all explorations need a
hundredth of that. An exploration that cannot be read is listed with its fault and does not affect others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.exploration.cluster_offers import (
    ClusterCurve,
    SomeDevices,
    folders_in,
    same_step,
    some_devices,
)
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.exploration_files import DESCRIBED, Costs, read_costs, read_described
from tensoropt.exploration.verified import Verified, load_verified
from tensoropt.question.model_source import is_onnx
from tensoropt.question.settings import settings_fields

from .labels import Labels
from .recent import Recent

_MOST = 10_000
"""The most heads and costs that are remembered; reading one takes about a millisecond."""
Indexed = TypeVar("Indexed")


@dataclass(frozen=True)
class Head:
    """The description of an exploration; ``fault``: why it cannot be read, "" if it can.

    Attributes:
        source: the model, as given to ``explore``.
        cluster: its name.
        step: a key that comparable explorations share (:func:`same_step`).
        kind: the kind of the devices with the least memory.
        price: the price of a device-hour; None if unknown.
        kinds: the kinds of its cluster's devices, with the fields that a tariff needs.
        settings: what distinguishes two explorations of one model, as pairs of name and words.
        batch: samples per step; None if unknown.
        devices: the number of the cluster's devices.
        capacity_bytes: the memory of the devices with the least of it.
    """

    source: str = ""
    cluster: str = ""
    step: tuple[Any, ...] = ()
    kind: str = ""
    price: float | None = None
    kinds: tuple[SomeDevices, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    devices: int = 0
    capacity_bytes: float = 0.0
    fault: str = ""


class _Index:
    """Heads and costs by folder; safe between threads."""

    def __init__(self) -> None:
        self._recent = Recent(size=_MOST)

    def head(self, folder: Path) -> Head:
        """Return the head of an exploration; with its fault if it cannot be read."""
        return self._once("head", folder, _head, lambda fault: Head(fault=fault))

    def costs(self, folder: Path) -> Costs:
        """Return the costs of an exploration's points; none if they cannot be read."""
        return self._once("costs", folder, read_costs, lambda _: Costs(*[np.array([])] * 3))

    def _once(
        self, kind: str, folder: Path, read: Callable[[Path], Indexed], fault: Callable[[str], Indexed]
    ) -> Indexed:
        file = folder / DESCRIBED
        try:
            state = file.stat()
        except OSError as error:
            return fault(f"{file} is gone ({error.strerror})")

        def make() -> Indexed:
            try:
                return read(folder)
            # Any damage may surface as any error, and must not reach what other explorations show.
            except Exception as error:
                return fault(f"{folder.name} cannot be read ({type(error).__name__}: {str(error)[:200]})")

        value: Indexed = self._recent.get((kind, folder, state.st_mtime_ns, state.st_size), make)
        return value


def _head(folder: Path) -> Head:
    data = read_described(folder)
    model, cluster, settings = data["model"], data["cluster"], data["settings"]
    if not cluster["kinds"]:
        raise TensorOptError("its cluster has no devices")
    least = min(cluster["kinds"], key=lambda kind: float(kind["memory_bytes"]))
    prices = [kind.get("price_per_hour") for kind in cluster["kinds"]]
    return Head(
        source=str(model["source"]),
        cluster=str(cluster["name"]),
        step=same_step(str(model["fingerprint"]), settings),
        kind=str(least["name"]),
        # A cluster with one price missing has none: a sum of what is known would be too low.
        price=None if None in prices else max(map(float, prices)),
        kinds=some_devices(cluster),
        settings=(
            ("devices", str(len(cluster.get("devices", ())))),
            ("batch", str(model.get("batch") or "")),
            *((s.flag, s.notable(settings.get(s.name, s.default))) for s in settings_fields()),
            ("beside", _compared(data)),
        ),
        batch=_batch(model),
        devices=len(cluster.get("devices", ())),
        capacity_bytes=float(least["memory_bytes"]),
    )


def _batch(model: dict[str, Any]) -> int | None:
    """Return the requested batch, otherwise the first size of the first tensor that the model was called
    with."""
    if model.get("batch"):
        return int(model["batch"])
    call = model.get("call") or {}
    for value in (*call.get("args", ()), *call.get("kwargs", {}).values()):
        if isinstance(value, dict) and value.get("tensor"):
            return int(value["tensor"][0])
    return None


def _compared(data: dict[str, Any]) -> str:
    """Return the planners that ran on it, in words."""
    names = dict.fromkeys(row["planner"] for row in data["comparison"])
    return ", ".join(name for name in names if name != "frontier")


READY_MADE = Path(__file__).parent / "data"
FIRST = "llama3-8b-8x24gib"
"""The ready-made exploration that is shown first: a model that needs to be split."""
CACHED = 8
"""The number of explorations kept in memory: one with 20,000 points, once looked at in full, takes
100 MiB."""


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
        """The identity that stays the same whichever folder a dashboard was started with: names are kept by
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
        fixed = [Entry(f.name, f, "ready-made") for f in folders_in(ready_made)]
        self._fixed = sorted(fixed, key=lambda entry: entry.key != FIRST)
        self._jobs = jobs
        self._opened = opened
        self._index = _Index()
        self.labels = Labels()
        """People's names of them; :func:`.server.create_app` keeps these beside the jobs."""
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

        def with_newer(entry: Entry) -> Entry:
            if not (chain := shown[entry]):
                return entry
            keys = [key_of[folder.resolve()] for folder in chain if folder.resolve() in key_of]
            return replace(entry, newer=chain[-1], also=tuple(keys))

        return tuple(with_newer(e) for e in order if e.folder.resolve() not in elsewhere)

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
        plans."""
        step = self.head_of(self.entry(key)).step
        return self._curves(lambda head: head.step == step)

    def at_other_batches(self, key: str) -> dict[Entry, ClusterCurve]:
        """Return the explorations of the same model and settings on the same cluster that have points,
        whatever their batch, in the library's order, with their plans."""
        own = self.head_of(self.entry(key))
        if not own.source or is_onnx(
            own.source
        ):  # sizes of a file's inputs may differ in more than the batch
            return {}
        same = own.source, own.step[1:], own.kinds, own.cluster
        curves = self._curves(
            lambda head: (head.source, head.step[1:], head.kinds, head.cluster) == same and bool(head.batch)
        )
        return {entry: replace(curve, batch=self.head_of(entry).batch) for entry, curve in curves.items()}

    def _curves(self, is_meant: Callable[[Head], bool]) -> dict[Entry, ClusterCurve]:
        """Return the plans of explorations; of those that have points and can be read."""
        curves = {}
        for entry in self.entries():
            head = self.head_of(entry)
            if not is_meant(head) or not head.kinds or not len(self.costs_of(entry).needs):
                continue
            with suppress(TensorOptError):
                curves[entry] = replace(ClusterCurve.of(self.load(entry.key)), batch=None)
        return curves

    def model_name(self, source: str) -> str:
        """Return a model's display name: its upload's or the zoo's name, or the last part of its file's."""
        return self._names().get(source) or source.removeprefix("zoo:").rpartition("/")[2] or "model"

    def verified(self, key: str) -> tuple[Verified, ...]:
        """Return what is known about plans of exploration ``key`` that were run.

        Raises:
            UnknownExplorationError, TensorOptError: no such key; the file is damaged.
        """
        entry = self.entry(key)
        folders = dict.fromkeys((entry.shown, entry.folder))
        return tuple(run for folder in folders for run in load_verified(folder))

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
        exploration: Exploration = self._recent.get(
            (folder, stamp), lambda: _checked(load_exploration(folder), folder)
        )
        return exploration


def _chain(folder: Path, newer_of: Mapping[Path, Path]) -> list[Path]:
    """Return the folders that are shown in a folder's place, each in that of the previous one."""
    folders: list[Path] = []
    while (newer := newer_of.get(folder.resolve())) is not None and newer not in folders:
        folders.append(newer)
        folder = newer
    return folders


def _checked(exploration: Exploration, folder: Path) -> Exploration:
    """Return the exploration, if its pages can be drawn; raise :class:`TensorOptError` otherwise."""
    try:
        str(exploration.cluster["name"]), len(exploration.cluster["devices"])
        if min(float(kind["memory_bytes"]) for kind in exploration.cluster["kinds"]) <= 0:
            raise ValueError("a device without memory")
        spaces = exploration.all_points.column("space")
        if not ((spaces >= 0) & (spaces < len(exploration.spaces))).all():
            raise ValueError("a point of no space")
    except (KeyError, TypeError, ValueError) as error:
        raise TensorOptError(
            f"{folder.name} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    return exploration
