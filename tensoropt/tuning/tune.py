"""``tensoropt tune``: run a plan, learn its real costs, plan again, and keep the plan measured as faster.

The loop is that of FastT (Yi et al., Fast Training of Deep Learning Models over Multiple GPUs, Middleware
2020, section 4).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tensoropt.api import recost
from tensoropt.cluster import Cluster, Mesh
from tensoropt.console import shows_progress
from tensoropt.costs.residuals import NO_RESIDUALS, load_residuals, save_residuals
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.execute.executable import strategy_of_plan
from tensoropt.execute.own_steps import read_steps, steps_file
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.files import write_text
from tensoropt.plan.keys import plan_key
from tensoropt.plan.plan import Plan, load_plan
from tensoropt.profiling.store import KINDS, ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import has_local_cores, local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.tuning.learned import Learned, priced
from tensoropt.tuning.steps import run_steps, seconds_of
from tensoropt.types import Progress, ProgressChoice, heard
from tensoropt.units import format_seconds

FILE, PLAN, _STORE, _TRIAL = "tuned.json", "tuned_plan.json", "tuned.sqlite", "tuned_trial.json"
_SCHEMA = "tensoropt.tuned/1"
_ROUNDS = 4
"""The most candidates that are tried."""
_DRIFT = 0.03
"""The relative error of predictions, and the least predicted gain, that justify another round."""
_LAPS, _STEPS = 5, 9
"""The runs of each of two plans in turn (the machine's speed drifts), and the timed steps per run."""
_STDERR = 2


@dataclass
class Tuning:
    """The state and result of a run of :func:`tune`, saved after every decision.

    Attributes:
        plan: the plan measured as fastest.
        measured_s, predicted_s: duration of its step in seconds: the measured median, and predicted at
            current costs.
        begun_s, begun_predicted_s: the same durations for the first plan.
        decisions: the plans run, with their durations and the decision on each, in order.
        tried: hash keys of the measured plans.
        done: why the tuning ended, in words; "" before.
    """

    plan: Plan
    measured_s: float
    predicted_s: float
    begun_s: float
    begun_predicted_s: float
    decisions: list[dict[str, Any]] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    done: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the state and its plan as plain data."""
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "plan"}
        return {"schema": _SCHEMA, **others, "plan": self.plan.to_data()}

    @property
    def drift(self) -> float:
        """The relative error of the predicted step time of the plan."""
        return abs(self.predicted_s / self.measured_s - 1.0)


@shows_progress
def tune(
    target: str | os.PathLike[str],
    *,
    point: int | None = None,
    memory_bytes: float | None = None,
    rounds: int = _ROUNDS,
    job: Sequence[str] = (),
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
    say: Callable[[str], None] = lambda line: None,
) -> Tuning:
    """Run a plan on this machine, improve it by measurements, and return the plan measured as fastest.

    The state is saved beside the exploration after every decision.

    Args:
        target: an exploration's folder, or a plan file beside one.
        point: the number, from 1, of the plan to begin with; by default the fastest within ``memory_bytes``.
        memory_bytes: memory limit per device; by default the device's memory or, if ``target`` is a plan
            file, the memory that its plan needs.
        rounds: the largest number of other plans to try.
        job: a command that trains by the plan in ``{plan}`` with ``parallelize(..., tune=True)``; by default
            the model's steps are run alone.
        store: the profile store; by default the user's.
        say: a function that is called with a line about each decision.

    Raises:
        TensorOptError: the plan is not for this machine's CPU ranks, or its exploration is missing.
        InfeasibleError: no plan fits.
    """
    if job and not any("{plan}" in word for word in job):
        raise TensorOptError("the job's command does not name the plan's file; write {plan} for its path")
    folder, exploration, plan = _opened(Path(target), point, memory_bytes)
    cluster = Cluster.from_dict(exploration.cluster)
    if memory_bytes is None:
        of_plan = Path(target).is_file()
        memory_bytes = plan.predicted.memory_bytes if of_plan else cluster.device.memory_bytes
    if not has_local_cores(cluster) or (ranks := local_pool(cluster)) is None:
        raise TensorOptError(
            f"{cluster.name} is not CPU ranks of this machine, so plans for it cannot be timed here; explore "
            "with --cluster local"
        )
    with (
        nullcontext(store) if store else ProfileStore() as users,
        _own_store(folder, users) as own,
        ranks as pool,
    ):
        tuner = _Tuner(folder, exploration, cluster, own, pool, job, heard(progress), say)
        return tuner.run(plan, memory_bytes, rounds)


def _opened(target: Path, point: int | None, memory_bytes: float | None) -> tuple[Path, Exploration, Plan]:
    if target.is_file():
        plan, folder = load_plan(target), target.parent
        if not (folder / "exploration.json").is_file():
            raise TensorOptError(
                f"{target} has no exploration beside it for finding other plans; give the "
                "exploration's folder"
            )
        return folder, load_exploration(folder), plan
    exploration = load_exploration(target)
    if point is not None:
        return target, exploration, exploration.choose(point=point)
    return target, exploration, exploration.choose(memory_bytes=memory_bytes, fastest=True)


def _own_store(folder: Path, users: ProfileStore) -> ProfileStore:
    """Return the folder's own profile store, at first a copy of the user's: factors belong to one model."""
    new = not (folder / _STORE).exists()
    own = ProfileStore(folder / _STORE)
    if new:
        for kind in KINDS:
            own.put_many(dict(users.items(kind)), kind=kind)
    return own


def _end_of(gain: float, drift: float) -> str:
    """Return why a tuning ends; "" if it tries the best other plan.

    Args:
        gain: the predicted reduction in step time by that plan, relative to the current plan's.
        drift: the relative error of the current plan's predicted step time.
    """
    other = f"the best other plan is predicted to be {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
    if drift < _DRIFT:
        within = f"predictions are within {_DRIFT:.0%} (off by {drift:.1%})"
        return f"{within}, and {other}" if gain < _DRIFT else ""
    # With larger errors, a plan predicted a little slower may be faster.
    return f"no candidate is left: predictions are off by {drift:.1%}, and {other}" if gain <= -drift else ""


class _Tuner:
    def __init__(
        self,
        folder: Path,
        exploration: Exploration,
        cluster: Cluster,
        store: ProfileStore,
        pool: RankPool,
        job: Sequence[str],
        progress: Progress,
        say: Callable[[str], None],
    ):
        self.folder, self.exploration, self.cluster = folder, exploration, cluster
        self.store, self.pool, self.progress, self.say = store, pool, progress, say
        self.job = job
        settings = Settings.from_dict(exploration.settings)
        self.costs = CostSource(cluster, store, settings, pool, progress, residuals=NO_RESIDUALS)
        self.learned = Learned(self.costs, load_residuals(store, self.costs.prefix))
        self.spec = ModelSpec.of(exploration.plan(0))
        self.loaded = load_model(self.spec)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self, plan: Plan, memory_bytes: float | None, rounds: int) -> Tuning:
        self.progress("tune", 0, rounds, "running the chosen plan")
        (measured_s,) = self._measured([plan])
        predicted_s = plan.predicted.time_s
        state = Tuning(plan, measured_s, predicted_s, measured_s, predicted_s, tried=[plan_key(plan)])
        self._decided(state, "begin", plan, predicted_s, measured_s, "the chosen plan")
        for number in range(rounds):
            self.progress("tune", number, rounds, "planning again")
            try:
                candidate = self._best(memory_bytes, state)
            except InfeasibleError as error:
                state.done = f"no plan fits any more: {error}"
                break
            if candidate is None:
                break
            self.progress("tune", number, rounds, "running a candidate")
            before_s, after_s = self._measured([state.plan, candidate])
            state.tried.append(plan_key(candidate))
            predicted_s, faster = candidate.predicted.time_s, after_s < before_s
            how = (
                f"in turns with the plan before ({format_seconds(before_s)}), "
                f"{abs(after_s / before_s - 1):.1%} {'faster' if faster else 'slower'}"
            )
            if faster:
                state.plan, state.measured_s, state.predicted_s = candidate, after_s, predicted_s
                self._decided(state, "keep", candidate, predicted_s, after_s, how)
            else:
                state.measured_s = before_s
                self._decided(state, "roll back", candidate, predicted_s, after_s, how)
        tried = f"{rounds} candidate{' was' if rounds == 1 else 's were'} tried, as many as asked for"
        state.done = state.done or f"{tried}, with predictions off by {state.drift:.1%}"
        self._decided(state, "end", state.plan, state.predicted_s, state.measured_s, state.done)
        return state

    def _best(self, memory_bytes: float | None, state: Tuning) -> Plan | None:
        """Return the fastest untried plan at current costs; None, and a reason in ``state.done``, if none."""
        found, _ = recost(self.exploration, store=self.store, progress=self.progress, old_points=False)
        fitting = [
            index
            for index, one in enumerate(found.points)
            if memory_bytes is None or one.memory_bytes <= memory_bytes
        ]
        state.predicted_s = self._predicted(state.plan)
        fresh = [index for index in fitting if plan_key(found.plan(index)) not in state.tried]
        if not fitting:
            found.index(memory_bytes=memory_bytes)  # raises, naming the least memory that would do
        if not fresh:
            state.done = f"every plan that fits was tried, with predictions off by {state.drift:.1%}"
            return None
        candidate = found.plan(min(fresh, key=lambda index: found.points[index].time_s))
        gain = 1.0 - candidate.predicted.time_s / state.predicted_s
        state.done = _end_of(gain, state.drift)
        return None if state.done else candidate

    # -- measuring --------------------------------------------------------------------------------

    def _measured(self, plans: list[Plan]) -> list[float]:
        laps: list[list[float]] = [[] for _ in plans]
        for _ in range(1 if self.job else _LAPS):
            for number, plan in enumerate(plans):
                strategy = strategy_of_plan(plan, self.loaded.graph)
                ranks: list[dict[str, Any]] = (
                    self._in_job(plan)
                    if self.job
                    else self.pool.run(run_steps, self.spec, strategy.to_data(), plan.optimizer, _STEPS)
                )
                self.learned.learn(strategy, Mesh(shape=plan.mesh.shape), ranks)
                laps[number].append(statistics.median(seconds_of(ranks)[0]))
        save_residuals(self.store, self.costs.prefix, self.learned.residuals)
        return [statistics.median(seconds) for seconds in laps]

    def _in_job(self, plan: Plan) -> list[dict[str, Any]]:
        file = self.folder / _TRIAL
        steps_file(file).unlink(missing_ok=True)
        plan.save(file)
        command = [word.replace("{plan}", str(file)) for word in self.job]
        try:
            # Standard output is reserved for answers.
            ran = subprocess.run(command, check=False, stdout=_STDERR)
        except OSError as error:
            raise TensorOptError(f"the job cannot be run: {command[0]}: {error.strerror or error}") from error
        if ran.returncode:
            raise TensorOptError(
                f"the job ended with code {ran.returncode} (its output is above), so nothing was "
                f"decided; earlier decisions are kept: {' '.join(command)}"
            )
        return read_steps(file)

    def _predicted(self, plan: Plan) -> float:
        strategy = strategy_of_plan(plan, self.loaded.graph)
        return priced(strategy, Mesh(shape=plan.mesh.shape), self.costs, self.learned.residuals)[0]

    # -- files ------------------------------------------------------------------------------------

    def _decided(
        self, state: Tuning, what: str, plan: Plan, predicted_s: float, measured_s: float, why: str
    ) -> None:
        """Record a decision; save the state, and the fastest plan so far in a file of its own."""
        one = {
            "decision": what,
            "plan": plan_key(plan),
            "mesh": plan.mesh.label,
            "memory_bytes": plan.predicted.memory_bytes,
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "why": why,
        }
        state.decisions.append(one)
        # The state first: other programs read the plan's file.
        write_text(self.folder / FILE, json.dumps(state.to_dict(), indent=1) + "\n")
        state.plan.save(self.folder / PLAN)
        times = f"predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}"
        self.say(f"{what}: mesh {plan.mesh.label}, {times}; {why}")
