"""The step of four models on one device: predicted from operators that are timed one by one, and measured."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace

from tensoropt.cluster import load_cluster
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import load_model
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import local_backend, local_notes
from tensoropt.selftest.checks.facts import off
from tensoropt.selftest.models import short_name, timed_models
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.selftest.timing import unless_busy
from tensoropt.types import silent
from tensoropt.verify.predict import place_for, predict
from tensoropt.verify.run import predict_and_run, ranks_with

_BOUND = {"cuda": 0.05, "cpu": 0.25}
"""The relative bound for each model: the goal for a GPU. A core of a machine that others use is not as
steady: its step was seen to change by a tenth from one minute to the next, and by more under load."""


def run(context: CheckContext) -> Outcome:
    """Compare predicted and measured steps; on a machine that others use as well a difference says
    nothing."""
    return unless_busy(_predicted_and_measured, context)


def _predicted_and_measured(context: CheckContext) -> Outcome:
    """Measure again, into a store that is then discarded, and compare."""
    cluster = load_cluster("local:1" if context.on_gpu else "cpu:1")
    if local_backend(cluster) is None:
        return Outcome.skipped("nothing can be timed here: " + "; ".join(local_notes(cluster)))
    place = place_for(1, cluster.device_type, cluster.name, "auto")
    figures: list[Bounded] = []
    errors = []
    with ProfileStore(context.folder / "profiles.sqlite") as store:
        for spec in timed_models(context):
            subject = replace(spec, device=place.device)
            with ranks_with(subject, place, 1) as pool:
                settings = Settings(dtype="float32")
                drawn = [(unsplit_strategy(load_model(subject).graph), cluster.meshes(1)[0])]
                simulated = functools.partial(predict, drawn, ())
                # Other checks compare the numbers, of smaller models.
                answer = predict_and_run(
                    subject, simulated, cluster, place, pool, settings, store, silent, numerics=False
                )
            [step] = answer["plans"]
            name = short_name(spec)
            if not step["ok"]:
                return Outcome.failed(f"{name}: the step cannot be run: {step['error'] or 'it differs'}")
            errors.append(off(step["time_predicted_s"], step["time_measured_s"]))
            figures += [
                Bounded.share(f"{name}: predicted against measured", errors[-1], _BOUND[context.device]),
                Bounded(f"{name}: predicted", step["time_predicted_s"], unit="s"),
                Bounded(f"{name}: measured", step["time_measured_s"], unit="s"),
            ]
    figures.append(Bounded("median of the errors", statistics.median(errors), unit="share"))
    return Outcome.of(figures, "a step with Adam, batch and all; operators were timed one by one in this run")
