"""The explorations that the dashboard shows: ready-made ones, those of an opened folder, finished jobs.

Pages name explorations only by key. A key is looked up and never becomes a path, so nothing outside these
folders can be opened from the web.

Lists need only summaries, which take a hundredth of the time of opening explorations, and are read again when
a file changes. An unreadable exploration is listed with its error and does not affect others.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensoropt.errors import TensorOptError
from tensoropt.exploration.cluster_offers import folders_in, same_step
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.exploration_files import DESCRIBED, LISTED, read_described
from tensoropt.exploration.verified import Verified, load_verified
from tensoropt.question.model_source import is_onnx
from tensoropt.question.settings import settings_fields

from .recent import Recent

_MOST = 10_000
"""Maximum number of cached summaries and costs; reading one takes about a millisecond."""
_Indexed = TypeVar("_Indexed")
Costs = tuple[list[float], list[float]]
"""The memory in bytes that each point needs on a device, and its step time in seconds."""


@dataclass(frozen=True)
class Head:
    """The summary of an exploration.

    Attributes:
        source: the model, as given to ``explore``.
        cluster: the cluster's name.
        step: a key that comparable explorations share (:func:`same_step`).
        kind: the name of the device kind with the least memory.
        kinds: the names of all device kinds.
        settings: (name, value in words) of settings that can differ between explorations of one model.
        batch: samples per step; None if unknown.
        devices: the number of devices.
        fault: why the exploration cannot be read, "" if it can.
    """

    source: str = ""
    cluster: str = ""
    step: tuple[Any, ...] = ()
    kind: str = ""
    kinds: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    devices: int = 0
    fault: str = ""


def _costs(folder: Path) -> Costs:
    with open(folder / LISTED, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["needs_bytes"]) for row in rows], [float(row["time_s"]) for row in rows]


def _head(folder: Path) -> Head:
    data = read_described(folder)
    model, cluster, settings = data["model"], data["cluster"], data["settings"]
    if not cluster["kinds"]:
        raise TensorOptError("its cluster has no devices")
    least = min(cluster["kinds"], key=lambda kind: float(kind["memory_bytes"]))
    return Head(
        source=str(model["source"]),
        cluster=str(cluster["name"]),
        step=same_step(str(model["fingerprint"]), settings),
        kind=str(least["name"]),
        kinds=tuple(str(kind["name"]) for kind in cluster["kinds"]),
        settings=(
            ("devices", str(len(cluster.get("devices", ())))),
            ("batch", str(model.get("batch") or "")),
            *((s.flag, s.notable(settings.get(s.name, s.default))) for s in settings_fields()),
            ("beside", _compared(data)),
        ),
        batch=model.get("batch") or first_size(model.get("call")),
        devices=len(cluster.get("devices", ())),
    )


def first_size(call: Mapping[str, Any] | None) -> int | None:
    """Return the first size of the first tensor in an example call, assumed to be the batch, or None."""
    inputs = (*call.get("args", ()), *call.get("kwargs", {}).values()) if call else ()
    sizes = (one["tensor"] for one in inputs if isinstance(one, dict) and one.get("tensor"))
    return next((int(size[0]) for size in sizes), None)


def _compared(data: dict[str, Any]) -> str:
    """Return the names of the planners that ran beside the search, as a list in words."""
    names = dict.fromkeys(row["planner"] for row in data["comparison"])
    return ", ".join(name for name in names if name != "frontier")


READY_MADE = Path(__file__).parent / "data"
FIRST = "llama3-8b-8x24gib"
"""The ready-made exploration that is shown first; its model does not fit one device."""
_CACHED = 8
"""Number of explorations kept in memory. One with 20,000 points takes 100 MiB once all pages were viewed."""


@dataclass(frozen=True)
class Entry:
    """An exploration on disk.

    Attributes:
        key: the exploration's name in URLs.
        folder: the exploration's folder.
        origin: ``ready-made``, ``opened`` or ``job``.
    """

    key: str
    folder: Path
    origin: str


class Library:
    """The explorations that the dashboard knows, by key, read on first use and when their file changes.

    Args:
        opened: a folder of ``explore --out``, or of several such folders.
        jobs: a function that returns (key, folder) of the results of jobs.
        ready_made: the folder of the ready-made explorations.
        names: a function that returns the display names of uploaded models by source.

    Raises:
        TensorOptError: ``opened`` holds no exploration.
    """

    def __init__(
        self,
        opened: Path | None = None,
        jobs: Callable[[], list[tuple[str, Path]]] = list,
        ready_made: Path = READY_MADE,
        names: Callable[[], Mapping[str, str]] = dict,
    ):
        self._names = names
        fixed = [Entry(f.name, f, "ready-made") for f in folders_in(ready_made)]
        self._fixed = sorted(fixed, key=lambda entry: entry.key != FIRST)
        self._jobs = jobs
        self._opened = opened
        self._index, self._recent = Recent(_MOST), Recent(_CACHED)
        if opened is not None and not any(folders_in(opened)):
            raise TensorOptError(
                f"{opened} holds no exploration (no {DESCRIBED} in it or in a subfolder); "
                "run `tensoropt explore MODEL --cluster CLUSTER --out DIR` and open that DIR"
            )

    def entries(self) -> tuple[Entry, ...]:
        """Return all explorations: opened ones, then jobs', newest first, then ready-made ones."""
        opened = [Entry(f"opened-{f.name}", f, "opened") for f in folders_in(self._opened)]
        jobs = [Entry(key, folder, "job") for key, folder in self._jobs()]
        # The last entry of a key wins: an opened folder replaces a ready-made exploration of the same name.
        unique = {entry.key: entry for entry in (*self._fixed, *jobs, *opened)}
        order = [e for e in (*opened, *jobs, *self._fixed) if unique[e.key] is e]
        return tuple(order)

    def entry(self, key: str) -> Entry:
        """Return the exploration of a key, without reading it.

        Raises:
            TensorOptError: no such key.
        """
        for entry in self.entries():
            if entry.key == key:
                return entry
        raise TensorOptError(
            f"there is no exploration named '{key[:80]}' here any more; pick one from the list above"
        )

    def head_of(self, entry: Entry) -> Head:
        """Return the summary of an exploration without opening it, with the error if it cannot be read."""
        return self._indexed("head", entry.folder, _head, lambda fault: Head(fault=fault))

    def costs_of(self, entry: Entry) -> Costs:
        """Return (memory in bytes, step time in seconds) of an exploration's points; empty if unreadable."""
        return self._indexed("costs", entry.folder, _costs, lambda _: ([], []))

    def _indexed(
        self, kind: str, folder: Path, read: Callable[[Path], _Indexed], fault: Callable[[str], _Indexed]
    ) -> _Indexed:
        file = folder / DESCRIBED
        try:
            state = file.stat()
        except OSError as error:
            return fault(f"{file} is gone ({error.strerror})")

        def make() -> _Indexed:
            try:
                return read(folder)
            # Damaged files may raise any error, which must not affect other explorations.
            except Exception as error:
                return fault(f"{folder.name} cannot be read ({type(error).__name__}: {str(error)[:200]})")

        value: _Indexed = self._index.get((kind, folder, state.st_mtime_ns, state.st_size), make)
        return value

    def alike(self, key: str) -> list[Entry]:
        """Return other explorations of the same operators and training settings, as on other devices."""
        step = self.head_of(self.entry(key)).step
        return self._others(key, lambda head: head.step == step)

    def at_other_batches(self, key: str) -> list[Entry]:
        """Return other explorations of the same model, settings and cluster, at any batch."""
        own = self.head_of(self.entry(key))
        # Input sizes of an ONNX file may differ in more than the batch.
        if not own.source or is_onnx(own.source):
            return []
        same = own.source, own.step[1:], own.kinds, own.devices, own.cluster
        return self._others(
            key,
            lambda head: (
                head.batch and (head.source, head.step[1:], head.kinds, head.devices, head.cluster) == same
            ),
        )

    def _others(self, key: str, is_meant: Callable[[Head], Any]) -> list[Entry]:
        heads = ((entry, self.head_of(entry)) for entry in self.entries() if entry.key != key)
        return [entry for entry, head in heads if head.kinds and is_meant(head)]

    def model_name(self, source: str) -> str:
        """Return a model's display name: the upload's or the zoo's name, or the last part of its path."""
        return self._names().get(source) or source.removeprefix("zoo:").rpartition("/")[2] or "model"

    def verified(self, key: str) -> tuple[Verified, ...]:
        """Return the verifications (results of runs) of an exploration's plans.

        Raises:
            TensorOptError: no such key; the file is damaged.
        """
        return load_verified(self.entry(key).folder)

    def load(self, key: str) -> Exploration:
        """Return the exploration of a key.

        Raises:
            TensorOptError: no such key; its files are damaged.
        """
        folder = self.entry(key).folder
        try:
            # Part of the cache's key, so that a folder explored again shows its new content.
            stamp = (folder / DESCRIBED).stat().st_mtime_ns
        except OSError as error:
            raise TensorOptError(f"the files of '{key}' are gone; pick another exploration") from error
        exploration: Exploration = self._recent.get(
            (folder, stamp), lambda: _checked(load_exploration(folder), folder)
        )
        return exploration


def _checked(exploration: Exploration, folder: Path) -> Exploration:
    """Return an exploration if its pages can be drawn; raise :class:`TensorOptError` otherwise."""
    try:
        str(exploration.cluster["name"]), len(exploration.cluster["devices"])
        if min(float(kind["memory_bytes"]) for kind in exploration.cluster["kinds"]) <= 0:
            raise ValueError("a device without memory")
        if not all(0 <= point.space < len(exploration.spaces) for point in exploration.all_points):
            raise ValueError("a point has a mesh that is not listed")
    except (KeyError, TypeError, ValueError) as error:
        raise TensorOptError(
            f"{folder.name} is damaged ({type(error).__name__}: {error}); explore again"
        ) from error
    return exploration
