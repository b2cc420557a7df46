"""The question: a model made ready for costs, and the micro-batch counts that may be searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensoropt.capture import Capture
from tensoropt.errors import TensorOptError
from tensoropt.graph import OperatorGraph
from tensoropt.plan.settings import Settings
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import (
    MicroBatchRefused,
    batch_placements,
    micro_batch_strategies,
)
from tensoropt.sharding.discovery.discover import Kept
from tensoropt.sharding.groups import AxisStrategy, GroupGraph, group_operators
from tensoropt.sharding.regions import Region, find_regions

AUTO_MICRO_BATCHES = (1, 2, 4, 8)
"""Counts that ``auto`` searches where they divide the batch; each is a search more. Where they end is an
assumption."""


@dataclass
class Problem:
    """A model made ready for costs: captured, factored into atoms, grouped.

    Attributes:
        captured: None where only the operator graph is there.
        micro: per group its strategy on the micro-batch axis (all unsplit when refused).
        refusal: why the model cannot run in micro-batches, or "".
    """

    captured: Capture | None
    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    refusal: str = ""


def prepare(captured: Capture, kept: Kept | None = None) -> Problem:
    """The captured model as atoms and groups, with the groups' strategies on the micro-batch axis."""
    return prepare_graph(captured.graph, captured, kept)


def prepare_graph(
    operators: OperatorGraph, captured: Capture | None = None, kept: Kept | None = None
) -> Problem:
    """The operator graph as atoms and groups, with the groups' strategies on the micro-batch axis.

    Args:
        kept: what was discovered before of operators without a rule; what is found now is added.
    """
    graph = group_operators(refine_graph(operators, kept))
    try:
        return Problem(captured, graph, micro_batch_strategies(graph))
    except MicroBatchRefused as refusal:
        whole = {g.name: g.unsplit for g in graph.groups}
        return Problem(captured, graph, whole, str(refusal))


def offered_regions(problem: Problem, settings: Settings) -> tuple[Region, ...]:
    """The blocks that the search may recompute."""
    return find_regions(problem.graph) if settings.recompute == "auto" else ()


def micro_batch_counts(problem: Problem, settings: Settings) -> tuple[int, ...]:
    """The micro-batch counts to search.

    Raises:
        TensorOptError: a count asked for is refused by the model or does not divide its batch.
    """
    operators = problem.graph.atoms.graph
    inputs = [operators.tensors[n] for n in operators.inputs]
    places = batch_placements(problem.graph)
    # The first input that is split along its dim 0; the placements say which inputs follow the batch.
    batch = next((t.shape[0] for t in inputs if places[t.name] == 0), 1)
    if settings.micro_batches == "auto":
        if problem.refusal or settings.mode == "inference":
            return (1,)
        return tuple(m for m in AUTO_MICRO_BATCHES if batch % m == 0)
    if isinstance(settings.micro_batches, str):
        raise TensorOptError(
            f"micro-batches '{settings.micro_batches}' is neither 'auto' nor a list such as 1,2,4"
        )
    for count in settings.micro_batches:
        if count > 1 and problem.refusal:
            raise TensorOptError(
                f"{count} micro-batches are refused: {problem.refusal}; use --micro-batches 1"
            )
        if batch % count:
            raise TensorOptError(f"{count} micro-batches do not divide the batch of {batch}; use a divisor")
    return tuple(dict.fromkeys(settings.micro_batches))
