"""Timing steps of a user's own script for ``tensoropt tune``: ``parallelize(model, plan, tune=True)``.

After warm-up steps it takes the seconds from one call of the model to the next, including the script's data
and optimizer, then on CPU ranks every operator's seconds in a few more steps. Rank 0 writes all ranks'
findings beside the plan, and training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensoropt.engine.engine import Engine
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.engine.stamps import StepStamps, median_seconds, stamped
from tensoropt.errors import PlanError
from tensoropt.files import write_text

WARM_UP, STEPS, STAMPED = 3, 10, 3
"""Warm-up calls, timed intervals, and calls whose operators are timed: twenty steps are enough
(assumptions)."""
_SCHEMA = "tensoropt.steps/1"


def steps_file(plan: str | os.PathLike[str]) -> Path:
    """Return the file for the step times of a job, given its plan's file."""
    return Path(plan).with_suffix(".steps.json")


class OwnSteps:
    """Times the training steps that a script runs by an engine.

    Args:
        plan: the plan's file; the findings are written beside it.
    """

    def __init__(self, engine: Engine, plan: str | os.PathLike[str]):
        self.engine, self.file = engine, steps_file(plan)
        self._run, self._calls, self._since = engine._call, 0, 0.0
        self._seconds: list[float] = []
        self._stamps: list[StepStamps] = []
        self._stamping = contextlib.ExitStack()
        engine._call = self._counted  # type: ignore[method-assign]

    def _counted(self, *args: Any, training: bool, **more: Any) -> Any:
        if training:
            self._begin()
        return self._run(*args, training=training, **more)

    def _begin(self) -> None:
        now, self._calls = time.perf_counter(), self._calls + 1
        if WARM_UP + 1 < self._calls <= WARM_UP + 1 + STEPS:
            self._seconds.append(now - self._since)
        self._since = now
        self._stamping.close()
        stamps = self._calls - (WARM_UP + 1 + STEPS)
        if stamps == STAMPED or (stamps == 0 and not self._can_stamp):
            self._finish()
        elif stamps >= 0 and self._can_stamp:
            self._stamps.append(self._stamping.enter_context(stamped(self._sharded)))

    @property
    def _sharded(self) -> ShardedEngine:
        assert isinstance(self.engine, ShardedEngine)
        return self.engine

    @property
    def _can_stamp(self) -> bool:
        return isinstance(self.engine, ShardedEngine) and self.engine.runtime.device.type == "cpu"

    def _finish(self) -> None:
        self.engine._call = self._run  # type: ignore[method-assign]
        world = dist.get_world_size() if self.engine.runtime.distributed else 1
        own: dict[str, Any] = {"seconds": self._seconds, **median_seconds(self._stamps)}
        ranks: list[Any] = [own]
        if world > 1:
            ranks = [None] * world
            dist.all_gather_object(ranks, own)
        if world == 1 or dist.get_rank() == 0:
            write_text(self.file, json.dumps({"schema": _SCHEMA, "ranks": ranks}) + "\n")


def read_steps(plan: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return each rank's measurements of a plan's steps, as :func:`tensoropt.tuning.steps.run_steps` would.

    Raises:
        PlanError: the job wrote no file, or a damaged one.
    """
    file = steps_file(plan)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return [
            {
                "steps": [(0.0, float(seconds)) for seconds in rank["seconds"]],
                "collectives": [[] for _ in rank["seconds"]],
                **{way: rank[way] for way in ("forward_s", "backward_s") if way in rank},
            }
            for rank in data["ranks"]
        ]
    except FileNotFoundError:
        raise PlanError(
            f"the job wrote no {file}: call parallelize(model, plan, tune=True) with the plan file that it "
            f"receives, and let it run at least {WARM_UP + STEPS + STAMPED + 2} steps"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file} is damaged ({type(error).__name__}: {error}); run the job again") from error
