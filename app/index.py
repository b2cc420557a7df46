"""What the dashboard knows of every exploration without opening it: read once, and again when a file changes.

Opening an exploration makes objects of all its points; what lists and tables over all explorations need is a
hundredth of that. An exploration that cannot be read is known by its fault, and never stands in others' way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.plan.cluster_offers import SomeDevices, some_devices
from tensoropt.plan.device_sweep import same_step
from tensoropt.plan.exploration_files import DESCRIBED, Costs, read_costs, read_described
from tensoropt.plan.settings import settings_fields

from .recent import Recent

MOST = 10_000
"""The most heads and costs that are remembered; reading one takes about a millisecond."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Head:
    """What an exploration is of; ``fault``: why it cannot be read, "" where it can.

    Attributes:
        source: the model, as ``explore`` was given it.
        cluster: its name.
        step: what explorations must share to be compared, as :func:`same_step` has it.
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


class Index:
    """Heads and costs by folder; safe between threads."""

    def __init__(self) -> None:
        self._recent = Recent(size=MOST)

    def head(self, folder: Path) -> Head:
        """What an exploration is of; its fault where that cannot be read."""
        return self._once("head", folder, _head, lambda fault: Head(fault=fault))

    def costs(self, folder: Path) -> Costs:
        """What the points of an exploration cost; none where they cannot be read."""
        return self._once("costs", folder, read_costs, lambda _: Costs(*[np.array([])] * 3))

    def _once(
        self, what: str, folder: Path, read: Callable[[Path], Found], fault: Callable[[str], Found]
    ) -> Found:
        file = folder / DESCRIBED
        try:
            state = file.stat()
        except OSError as error:
            return fault(f"{file} is gone ({error.strerror})")

        def make() -> Found:
            try:
                return read(folder)
            # Any damage may surface as any error, and must not reach what other explorations show.
            except Exception as error:
                return fault(f"{folder.name} cannot be read ({type(error).__name__}: {str(error)[:200]})")

        found: Found = self._recent.get((what, folder, state.st_mtime_ns, state.st_size), make)
        return found


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
    """What was asked for, else the first size of the first tensor that the model was called with."""
    if model.get("batch"):
        return int(model["batch"])
    call = model.get("call") or {}
    for value in (*call.get("args", ()), *call.get("kwargs", {}).values()):
        if isinstance(value, dict) and value.get("tensor"):
            return int(value["tensor"][0])
    return None


def _compared(data: dict[str, Any]) -> str:
    """The planners that ran beside it."""
    names = dict.fromkeys(row["planner"] for row in data["comparison"])
    return ", ".join(name for name in names if name != "frontier")
