"""What running a plan showed, kept beside the exploration that it is a point of.

One small file, ``verified.json``: ``tensoropt verify PLAN --save DIR`` writes it, the dashboard shows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.files import write_text
from tensoropt.plan.exploration import Exploration, load_exploration
from tensoropt.plan.keys import plan_key
from tensoropt.plan.plan import Plan

SCHEMA = "tensoropt.verified/2"
FILE = "verified.json"
MEASURED = ("memory_tracked_bytes", "time_measured_s", "loss_difference", "gradient_difference")


@dataclass(frozen=True)
class Verified:
    """One plan, predicted and run; bytes and seconds, None for what was not measured (fake ranks).

    Attributes:
        key: of the plan (:mod:`tensoropt.plan.keys`).
        checked_on: in words, what it ran on.
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
        """From what ``tensoropt.verify.verify_plan`` answers for a plan."""
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
            **{name: one[name] for name in MEASURED},
        )

    def is_of(self, exploration: Exploration, point: int) -> bool:
        """Whether this is about point ``point`` of ``exploration.all_points``."""
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
    """What is known of an exploration's plans; empty where none was verified.

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
    """What such a file holds, read already.

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
    """One entry; TypeError or ValueError where a field is of the wrong kind."""
    if not isinstance(one, Mapping):
        raise TypeError(f"{one!r} is no entry")
    known = {f.name: one[f.name] for f in fields(Verified) if f.name in one}
    for name in known.keys() & set(MEASURED):
        known[name] = None if known[name] is None else float(known[name])
    return Verified(**known)
