"""Search the strategies that a published scheme permits, for methods that fix a part of all choices.

A published scheme fixes how operators split. The layouts of other tensors, and which are saved, are chosen by
frontier tracking, so that no scheme looks worse than it is.

Strategies that split every operator along the batch are the base of data parallelism, ZeRO and Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.tables import Scheme, TableSpace, following_the_batch, in_a_form
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.search import NoStrategyError, track_frontier
from tensoropt.sharding.configurations import MicroBatchRefused, batch_strategies
from tensoropt.sharding.groups import GroupGraph

NO_BATCH = (
    "no mesh of this cluster splits the batch into non-empty parts; choose a batch size that the device "
    "count divides"
)
"""The refusal of methods that only split the batch."""


def batch_labels(graph: GroupGraph) -> Mapping[str, str]:
    """Return, for each operator group, the label (name of the split loop) of its split along the batch.

    Raises:
        UnsuitableError: an operator mixes the samples of a batch.
    """
    try:
        strategies = batch_strategies(graph)
    except MicroBatchRefused as refusal:
        raise UnsuitableError(f"the batch of this model cannot be split: {refusal}") from None
    return {name: str(strategy.label) for name, strategy in strategies.items()}


MOST_POINTS = 64
"""The most points per mesh and micro-batch count; an assumption: a scheme leaves few choices open, so more
points would hardly differ."""


def frontiers(
    task: PlanningTask, allowed: Scheme, suits: Callable[[TableSpace], bool] = lambda _: True
) -> Iterator[Selection]:
    """Yield the frontier of the strategies that a scheme allows, for each mesh and micro-batch count that
    ``suits`` accepts: once with no block recomputed, and once with all.
    """
    for number, space in enumerate(task.spaces):
        if not suits(space):
            continue
        for recomputing in (False, True) if space.tables.regions else (False,):
            graph = space.tables.restricted(partial(in_a_form, allowed, recomputing, space.tables))
            try:
                # A gap of a thousandth: the few open choices do not deserve an exact search.
                frontier = track_frontier(graph, epsilon=1e-3, max_points=MOST_POINTS)
            except NoStrategyError:  # nothing is possible there, for instance because sizes do not divide
                continue
            chosen = frontier.strategies()
            for i in range(len(chosen)):
                yield Selection(number, chosen.strategy(i), chosen.options_of(i))


def on_the_batch(task: PlanningTask, stored: Scheme) -> Iterator[Selection]:
    """Yield the frontier of strategies that split groups along the batch alone, on meshes of one axis.

    ``stored``: the scheme (mask of choices) that says how parameters may be stored.
    """
    labels = batch_labels(task.prepared.graph)
    allowed = following_the_batch(lambda _, group: labels[group], stored)
    return frontiers(task, allowed, lambda space: len(space.names.mesh.shape) <= 1)


def at_least_one(task: PlanningTask, selections: Iterator[Selection], why_not: str) -> list[Selection]:
    """Return the selections as a list.

    Raises:
        UnsuitableError: there is none. The message is that of :func:`why_none`.
    """
    chosen = list(selections)
    if not chosen:
        raise UnsuitableError(why_none(task, why_not))
    return chosen


def why_none(task: PlanningTask, why_not: str) -> str:
    """Return why there is no plan: the user's constraints, if there are any, otherwise ``why_not``."""
    if task.base.settings.get("constraints") is None:
        return why_not
    return "no plan of this planner keeps to the constraints; loosen the constraints or leave them out"
