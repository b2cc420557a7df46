"""What the dashboard knows of every exploration without opening it: read once, and again when a file changes.

Opening an exploration makes objects of all its points; what lists and tables over all explorations need is a
hundredth of that. An exploration that cannot be read is known by its fault, and never stands in others' way.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.files import check_size
from tensoropt.plan.cluster_offers import SomeDevices
from tensoropt.plan.device_sweep import FILE

HEAD_BYTES = 2**18
"""Of a file's beginning, where model, cluster and settings stand; read whole where they take more."""
STEP = (("mode", "train"), ("optimizer", "adam"), ("dtype", "float32"))
"""Settings that tell two steps of one model apart, with what is meant where one is not written."""
TOLD_APART = ("mode", "optimizer", "dtype", "micro_batches", "recompute", "epsilon", "max_points", "seed")
"""Settings by which explorations of one model are told apart in a list."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Head:
    """What an exploration is of; ``fault``: why it cannot be read, "" where it can.

    Attributes:
        source: the model, as ``explore`` was given it.
        cluster: its name.
        step: what explorations must share to be compared, as :func:`tensoropt.plan.device_sweep.same_step`.
        kind: of the devices with the least memory.
        price: money per device-hour, None where unknown.
        kinds: of devices of its cluster, with what a tariff asks of them.
        settings: what tells two explorations of one model apart, as pairs of name and words.
        batch: samples of a step; None where unknown.
        devices: of the cluster.
        capacity_bytes: memory of the devices with the least of it.
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


@dataclass(frozen=True, eq=False)
class Curve:
    """The frontier of an exploration: bytes and seconds of every point, and how many devices each is on."""

    memory: np.ndarray
    time: np.ndarray
    devices: np.ndarray


class Index:
    """Heads and curves by folder; safe between threads."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Path], tuple[tuple[int, int], Any]] = {}
        self._lock = threading.Lock()

    def head(self, folder: Path) -> Head:
        """What an exploration is of; its fault where that cannot be read."""
        return self._once("head", folder, _head, lambda fault: Head(fault=fault))

    def curve(self, folder: Path) -> Curve:
        """The points of an exploration; none where they cannot be read."""
        return self._once("curve", folder, _curve, lambda _: Curve(*[np.array([])] * 3))

    def _once(
        self, what: str, folder: Path, read: Callable[[Path], Found], fault: Callable[[str], Found]
    ) -> Found:
        file = folder / FILE
        try:
            state = file.stat()
        except OSError as error:
            return fault(f"{file} is gone ({error.strerror})")
        stamp = (state.st_mtime_ns, state.st_size)
        with self._lock:
            known = self._known.get((what, folder))
        if known is not None and known[0] == stamp:
            found: Found = known[1]
            return found
        try:
            found = read(file)
        # Any damage may surface as any error, and must not reach what other explorations show.
        except Exception as error:
            found = fault(f"{folder.name} cannot be read ({type(error).__name__}: {str(error)[:200]})")
        with self._lock:
            self._known[what, folder] = (stamp, found)
        return found


def _head(file: Path) -> Head:
    data = _beginning(file)
    model, cluster, settings = data["model"], data["cluster"], data["settings"]
    if not cluster["kinds"]:
        raise TensorOptError("its cluster has no devices")
    least = min(cluster["kinds"], key=lambda kind: float(kind["memory_bytes"]))
    prices = [kind.get("price_per_hour") for kind in cluster["kinds"]]
    return Head(
        source=str(model["source"]),
        cluster=str(cluster["name"]),
        step=(str(model["fingerprint"]), *(str(settings.get(n, usual)) for n, usual in STEP)),
        kind=str(least["name"]),
        # A cluster with one price missing has none: a sum of what is known would be too low.
        price=None if None in prices else max(map(float, prices)),
        kinds=tuple(
            SomeDevices(
                str(kind["name"]),
                sum(number == place for number in cluster.get("devices", ())),
                float(kind["memory_bytes"]),
                None if kind.get("price_per_hour") is None else float(kind["price_per_hour"]),
            )
            for place, kind in enumerate(cluster["kinds"])
        ),
        settings=(
            ("devices", str(len(cluster.get("devices", ())))),
            ("batch", str(model.get("batch") or "")),
            *((name, _words(settings.get(name))) for name in TOLD_APART),
            ("beside", _compared(file)),
        ),
        batch=_batch(model),
        devices=len(cluster.get("devices", ())),
        capacity_bytes=float(least["memory_bytes"]),
    )


def _batch(model: dict[str, Any]) -> int | None:
    """What was asked for, else the first size of the first tensor that the model was called with."""
    if model.get("batch"):
        return int(model["batch"])
    call = model.get("call") or {}
    for value in (*call.get("args", ()), *call.get("kwargs", {}).values()):
        if isinstance(value, dict) and value.get("tensor"):
            return int(value["tensor"][0])
    return None


def _words(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return ""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _beginning(file: Path) -> dict[str, Any]:
    """The first values of a saved exploration, up to its settings; all of it where they lie elsewhere."""
    check_size(file)
    with open(file, encoding="utf-8") as opened:
        text = opened.read(HEAD_BYTES)
        at = text.find(', "versions": ')
        if at > 0:
            try:
                # What stands before it is whole, as our own files have their values in this order.
                data = json.loads(text[:at] + "}")
                if {"model", "cluster", "settings"} <= set(data):
                    return dict(data)
            except ValueError:
                pass
        return dict(json.loads(text + opened.read()))


COMPARED = re.compile(r', "comparison": (?=\[)')


def _compared(file: Path) -> str:
    """The planners that ran beside it, from the end of its file; "" where none is found there."""
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - HEAD_BYTES))
        text = opened.read().decode("utf-8", errors="replace")
    at = COMPARED.search(text)
    if at is None:
        return ""
    try:
        rows, _ = json.JSONDecoder().raw_decode(text, at.end())
        return ", ".join(dict.fromkeys(row["planner"] for row in rows if row["planner"] != "frontier"))
    except (ValueError, KeyError, TypeError):
        return ""


def _curve(file: Path) -> Curve:
    check_size(file)
    text = file.read_text(encoding="utf-8")
    sizes, points = _sizes_and_points(text)
    return Curve(
        np.array([float(p["memory_bytes"]) for p in points]),
        np.array([float(p["time_s"]) for p in points]),
        np.array([sizes[p["space"]] for p in points], dtype=int),
    )


POINTS = re.compile(r'\], "points": (?=\[)')
SHAPE = re.compile(r'\{"mesh": \{"shape": \[([\d, ]*)\]')


def _sizes_and_points(text: str) -> tuple[list[int], list[Any]]:
    """Devices of every space, and the points of the frontier.

    The spaces are nearly all of a file, and only their meshes are wanted: where the file is as we write it,
    they are not decoded, which is 40 times as fast. Otherwise it is read as a whole.
    """
    at = POINTS.search(text)
    if at is not None:
        try:
            points, _ = json.JSONDecoder().raw_decode(text, at.end())
            shapes = SHAPE.findall(text, 0, at.start())
            if shapes and max((p["space"] for p in points), default=0) < len(shapes):
                return [math.prod(map(int, shape.split(", "))) for shape in shapes], points
        except (ValueError, KeyError, TypeError):
            pass
    data = json.loads(text)
    return [math.prod(space["mesh"]["shape"]) for space in data["spaces"]], data["points"]
