"""The results of running an exploration's plans, which ``tensoropt verify PLAN --save DIR`` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.files import write_text
from tensoropt.plan.keys import plan_key
from tensoropt.plan.plan import Plan

_SCHEMA = "tensoropt.verified/2"
FILE = "verified.json"
_MEASURED = ("memory_tracked_bytes", "time_measured_s", "loss_difference", "gradient_difference")


@dataclass(frozen=True)
class Verified:
    """The predictions and measurements of one plan, in bytes and seconds; None if not measured.

    Attributes:
        key: the hash of the plan (:mod:`tensoropt.plan.keys`).
        checked_on: the ranks on which the plan was checked, in words.
        error: why the plan did not run, or that it is right in float64 only; "" if neither.
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
        """Return the predictions of a plan beside a result of :func:`tensoropt.verify.verify_plan`."""
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
        """Return whether the plan that ran is that of point ``point`` of ``exploration.all_points``."""
        space = exploration.spaces[exploration.all_points[point].space]
        # A cheap test that rules most points out.
        return space.micro_batches == self.micro_batches and plan_key(exploration.plan(point)) == self.key

    def point_of(self, exploration: Exploration) -> int | None:
        """Return the index of the point whose plan ran; None if the exploration has no such point."""
        # Try the plan's own index first; it is right unless the exploration was costed again.
        nearest = np.argsort(abs(exploration.all_points.time - self.time_predicted_s), kind="stable")
        return next((row for row in nearest.tolist() if self.is_of(exploration, row)), None)


def save_verified(folder: str | os.PathLike[str], plan: Plan, found: Mapping[str, Any]) -> Verified:
    """Save the result of running a plan in its exploration's folder, in place of an earlier one of this plan.

    Raises:
        TensorOptError: the folder holds no exploration, or an exploration without this plan.
    """
    exploration = load_exploration(folder)
    new = Verified.of(plan, found)
    if plan.model.fingerprint != exploration.model.fingerprint or new.point_of(exploration) is None:
        raise TensorOptError(
            f"the plan is not a point of the exploration in {folder}, so nothing was saved there; name the "
            "folder that it was chosen from"
        )
    kept = [old for old in load_verified(folder) if old.key != new.key]
    data = {"schema": _SCHEMA, "plans": _PLAIN.dump_python((*kept, new))}
    write_text(Path(folder) / FILE, json.dumps(data, indent=1) + "\n")
    return new


_PLAIN = TypeAdapter(tuple[Verified, ...])


def load_verified(folder: str | os.PathLike[str]) -> tuple[Verified, ...]:
    """Return the saved results of running an exploration's plans; empty if none was run.

    Raises:
        TensorOptError: the file is damaged, or of another version.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        return ()
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}, not {_SCHEMA!r} as in this version")
        return _PLAIN.validate_python(data["plans"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TensorOptError(
            f"{file} is damaged ({' '.join(str(error).split())}); delete it and verify again"
        ) from error
