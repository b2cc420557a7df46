"""Plans of an exploration, run beside the unsplit model and compared with their own predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import PlanError
from tensoropt.execute.executable import executable_of_plan
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan import Plan
from tensoropt.plan.made_for import made_for
from tensoropt.plan.settings import Settings
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.types import Progress, silent
from tensoropt.verify.places import Wanted, cluster_of, place_for
from tensoropt.verify.predict import of_each_rank, prediction_of, with_order
from tensoropt.verify.run import Predicted, ranks_with, run_and_answer


def verify_plan(plan: Plan, *, where: Wanted = "auto", progress: Progress = silent) -> dict[str, Any]:
    """Check whether a plan does what it should; :func:`verify_plans` for one plan."""
    return verify_plans([plan], where=where, progress=progress)


def verify_plans(
    plans: Sequence[Plan], *, where: Wanted = "auto", progress: Progress = silent
) -> dict[str, Any]:
    """Check whether plans of one model, cluster and optimizer do what they should, run beside the unsplit
    model.

    Args:
        where: ``auto`` takes the plan's own devices if this machine has them, otherwise fake ranks; ``ranks``
            takes CPU ranks of this machine whatever the plan is for; ``share-gpu`` takes ranks that all use
            its first GPU and communicate through the host, whose steps are not timed; ``fake`` takes fake
            ranks.

    Returns:
        ``ok``; ``plans`` with an entry for each, whose keys :func:`tensoropt.verify.answer.entry_of`
        explains; ``checked_on`` in words; and ``module``: the unsplit graph against the model it came from.

    Raises:
        PlanError: a plan is for another model, or cannot be run on this machine.
    """
    first = plans[0]
    for plan in plans:
        _check_runnable(plan)
    place = place_for(first.devices, *cluster_of(first.cluster), where)
    spec = replace(ModelSpec.of(first), device=place.device)
    with ranks_with(spec, place, first.devices) as pool:
        progress("capture", 0, 1, spec.source)
        graph = load_model(spec).graph
        predicted = [_predicted(plan, graph, progress) for plan in plans]
        progress("capture", 1, 1, spec.source)
        return run_and_answer(spec, predicted, place, pool, first.optimizer, progress)


def _predicted(plan: Plan, graph: GroupGraph, progress: Progress) -> Predicted:
    """Return a plan's strategy and its own predictions, including the order if that can be determined."""
    strategy, found = executable_of_plan(plan, graph).strategy, prediction_of(plan, graph)
    cluster = made_for(plan.cluster)
    if isinstance(strategy, PipelinedStrategy):
        where = cluster or load_cluster(f"cpu:{strategy.devices}")
        settings = Settings(mode=ModelSpec.of(plan).mode, optimizer=plan.optimizer, dtype=plan.compute_dtype)
        with ProfileStore() as store:
            costs = CostSource(where, store, settings, progress=progress)
            return strategy, of_each_rank(found, strategy, costs)
    if not isinstance(strategy, Strategy) or cluster is None:
        return strategy, found
    settings = Settings(mode=ModelSpec.of(plan).mode, optimizer=plan.optimizer, dtype=plan.compute_dtype)
    with ProfileStore() as store:
        return strategy, with_order(found, strategy, CostSource(cluster, store, settings, progress=progress))


def _check_runnable(plan: Plan) -> None:
    if not plan.model.source:
        raise PlanError(
            "the plan does not say where its model comes from, so it cannot be run without a script; explore "
            "with the command line, or pass source= to tensoropt.explore"
        )
