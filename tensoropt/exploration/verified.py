"""Two small files beside an exploration: what running its plans showed, and what it was made from.

``verified.json`` keeps what running a plan showed: ``tensoropt verify PLAN --save DIR`` writes it, the
dashboard shows it.

``changed.json`` names the exploration that this one was made from where only planners were added: if nothing
else differs, one can be shown in place of the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.files import write_text
from tensoropt.plan.findings import Findings
from tensoropt.plan.keys import plan_key
from tensoropt.plan.plan import Plan
from tensoropt.plan.point import FRONTIER, Point

_CHANGED_SCHEMA = "tensoropt.changed/1"
CHANGED = "changed.json"
PLANNERS, COSTS = "planners", "costs"
"""Keys of what planners were added to: with the same frontier, or with another one."""
MOST_BYTES = 2**16
"""Of a file that is read; ours have a few hundred."""


@dataclass(frozen=True)
class Changed:
    """The exploration that this one was made from, and what is different.

    Attributes:
        of: the other's :func:`fingerprint`.
        key: :data:`PLANNERS` or :data:`COSTS`.
        title: the change in words.
    """

    of: str
    key: str
    title: str


def fingerprint(found: Findings) -> str:
    """Return 16 hex digits that identify an exploration's model, cluster, settings and figures; saving it
    changes nothing.
    """
    data = [
        found.model.fingerprint,
        found.cluster,
        found.settings,
        [[p.planner, p.memory_bytes, p.time_s] for p in found.all_points],
    ]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def only_planners_differ(before: Findings, after: Findings) -> bool:
    """Return whether the search found the same in both; points that a planner's plan beats may be missing."""

    def own(of: Findings) -> dict[tuple[str, float, float], Point]:
        rows = zip(of.keys, of.points, strict=False)
        return {(key, p.memory_bytes, p.time_s): p for key, p in rows if p.planner == FRONTIER}

    def beaten(point: Point, of: Findings) -> bool:
        return any(p.memory_bytes <= point.memory_bytes and p.time_s <= point.time_s for p in of.points)

    first, second = own(before), own(after)
    return all(beaten(first[known], after) for known in first.keys() - second.keys()) and all(
        beaten(second[known], before) for known in second.keys() - first.keys()
    )


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is no plain data")


def save_changed(folder: str | os.PathLike[str], changed: Changed) -> None:
    """Write the file beside the exploration in ``folder``; raise TensorOptError if that fails."""
    write_text(Path(folder) / CHANGED, json.dumps({"schema": _CHANGED_SCHEMA, **asdict(changed)}) + "\n")


def load_changed(folder: str | os.PathLike[str]) -> Changed | None:
    """Return what the exploration in ``folder`` was made from; None if it was not made from another.

    Raises:
        TensorOptError: the file is damaged.
    """
    file = Path(folder) / CHANGED
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] != _CHANGED_SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return Changed(str(data["of"]), str(data["key"]), str(data["title"]))
    # Deeply nested JSON exceeds Python's recursion before it is decoded.
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TensorOptError(
            f"{file} is damaged ({type(error).__name__}: {error}); delete it, or explore again"
        ) from error


SCHEMA = "tensoropt.verified/2"
FILE = "verified.json"
_MEASURED = ("memory_tracked_bytes", "time_measured_s", "loss_difference", "gradient_difference")


@dataclass(frozen=True)
class Verified:
    """One plan, predicted and run; bytes and seconds, None for what was not measured (fake ranks).

    Attributes:
        key: the key of the plan (:mod:`tensoropt.plan.keys`).
        checked_on: the place where it ran, in words.
        error: why it did not run, "" if it did.
    """

    key: str
    mesh: str
    micro_batches: int
    memory_predicted_bytes: float
    time_predicted_s: float
    memory_tracked_bytes: float | None
    time_measured_s: float | None
    loss_difference: float | None
    gradient_difference: float | None
    ok: bool
    checked_on: str
    error: str = ""

    @classmethod
    def of(cls, plan: Plan, found: Mapping[str, Any]) -> Verified:
        """Return the result that ``tensoropt.verify.verify_plan`` gives for a plan."""
        (one,) = found["plans"]
        return cls(
            key=plan_key(plan),
            mesh=plan.mesh.label,
            micro_batches=plan.micro_batches,
            memory_predicted_bytes=plan.predicted.tensor_bytes,
            time_predicted_s=plan.predicted.time_s,
            ok=bool(found["ok"]),
            checked_on=str(found["checked_on"]),
            error=str(one["error"] or ""),
            **{name: one[name] for name in _MEASURED},
        )

    def is_of(self, exploration: Exploration, point: int) -> bool:
        """Return whether this is about point ``point`` of ``exploration.all_points``."""
        return exploration.keys[point] == self.key


def save_verified(folder: str | os.PathLike[str], plan: Plan, found: Mapping[str, Any]) -> Verified:
    """Keep what was found of a plan beside its exploration; what was kept of the same plan is replaced.

    Raises:
        TensorOptError: the folder holds no exploration, or one that the plan is not a point of.
    """
    exploration = load_exploration(folder)
    new = Verified.of(plan, found)
    if plan.model.fingerprint != exploration.model.fingerprint or new.key not in exploration.keys:
        raise TensorOptError(
            f"the plan is not a point of the exploration in {folder}, so nothing was saved there; name the "
            "folder that it was chosen from"
        )
    kept = [old for old in load_verified(folder) if old.key != new.key]
    data = {"schema": SCHEMA, "plans": [asdict(one) for one in (*kept, new)]}
    write_text(Path(folder) / FILE, json.dumps(data, indent=1) + "\n")
    return new


def load_verified(folder: str | os.PathLike[str]) -> tuple[Verified, ...]:
    """Return the results of running an exploration's plans; empty if none was verified.

    Raises:
        TensorOptError: the file is damaged.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        return ()
    try:
        return _plans(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TensorOptError(
            f"{file} is damaged ({type(error).__name__}: {error}); delete it and verify again"
        ) from error


def verified_from(data: Any) -> tuple[Verified, ...]:
    """Return the results in such a file, whose content is read already.

    Raises:
        TensorOptError: it is damaged.
    """
    try:
        return _plans(data)
    except (ValueError, KeyError, TypeError) as error:
        raise TensorOptError(
            f"the results are damaged ({type(error).__name__}: {error}); verify again"
        ) from error


def _plans(data: Any) -> tuple[Verified, ...]:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r} and not {SCHEMA!r}, which says whose the results are")
    return tuple(_read(one) for one in data["plans"])


def _read(one: Any) -> Verified:
    """Return one entry; raise TypeError or ValueError if a field is of the wrong kind."""
    if not isinstance(one, Mapping):
        raise TypeError(f"{one!r} is no entry")
    known = {f.name: one[f.name] for f in fields(Verified) if f.name in one}
    for name in known.keys() & {*_MEASURED}:
        known[name] = None if known[name] is None else float(known[name])
    return Verified(**known)
