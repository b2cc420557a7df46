"""Timing of a user's own script for ``tensoropt tune``: ``parallelize(model, plan, tune=True)``.

After warm-up steps, each rank measures the duration from one call of the model to the next, including the
script's data and optimizer. Rank 0 writes all ranks' durations beside the plan, and training goes on.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensoropt.engine.engine import Engine
from tensoropt.errors import PlanError
from tensoropt.files import write_text

WARM_UP, STEPS = 3, 10
"""The numbers of warm-up calls and of timed intervals between calls; assumptions."""
_SCHEMA = "tensoropt.steps/1"


def steps_file(plan: str | os.PathLike[str]) -> Path:
    """Return the path of the file for a job's step durations, given its plan's file."""
    return Path(plan).with_suffix(".steps.json")


class OwnSteps:
    """Times a script's training steps, and writes the durations of all ranks to a file.

    Args:
        plan: the plan's file, beside which the durations are written.
    """

    def __init__(self, engine: Engine, plan: str | os.PathLike[str]):
        self.engine, self.file = engine, steps_file(plan)
        self._run, self._calls, self._since = engine._call, 0, 0.0
        self._seconds: list[float] = []
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
        if self._calls == WARM_UP + 1 + STEPS:
            self._finish()

    def _finish(self) -> None:
        self.engine._call = self._run  # type: ignore[method-assign]
        world = dist.get_world_size() if self.engine.runtime.distributed else 1
        ranks: list[Any] = [{"seconds": self._seconds}]
        if world > 1:
            ranks *= world
            dist.all_gather_object(ranks, ranks[0])
        if world == 1 or dist.get_rank() == 0:
            write_text(self.file, json.dumps({"schema": _SCHEMA, "ranks": ranks}) + "\n")


def read_steps(plan: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return each rank's durations of steps, in the form of :func:`tensoropt.tuning.steps.run_steps`.

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
            }
            for rank in data["ranks"]
        ]
    except FileNotFoundError:
        raise PlanError(
            f"the job wrote no {file}: call parallelize(model, plan, tune=True) with the plan file that it "
            f"receives, and let it run at least {WARM_UP + STEPS + 1} steps"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file} is damaged ({type(error).__name__}: {error}); run the job again") from error
