"""The planning task: what every planner is given, and how a sharded one answers.

A planner picks :class:`Selection`\\ s from a task's tables. What they cost is found by the simulator
(:mod:`.results`), the same for all: no planner prices itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.plan import problem as prepared
from tensoropt.plan.exploration import Exploration
from tensoropt.planners.tables import TableSpace

if TYPE_CHECKING:
    from tensoropt.planners.pipelined.common.task import PipelineTask


@dataclass(frozen=True)
class Selection:
    """A strategy by its indices in one space's tables.

    Attributes:
        space: index into :attr:`PlanningTask.spaces`.
        choice: per variable its configuration.
        options: per variable its option; absent means the first.
        notes: what the planner says of it (a solver's gap, a budget that ran out).
    """

    space: int
    choice: Mapping[str, int]
    options: Mapping[Any, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanningTask:
    """A model on a cluster, priced: the question every planner answers.

    Attributes:
        prepared: the captured, grouped model.
        spaces: one per mesh and micro-batch count.
        base: an exploration of the same model; it knows how to write plans. Where placing planners are asked
            its last spaces are theirs, one for each of ``placed_counts``.
        placed: what operators cost on single devices; None where no placing planner is asked.
        placed_counts: into how many micro-batches placing planners may cut the batch.
        staged: the same for methods that cut the model into stages; None where none is asked.
    """

    prepared: prepared.Problem
    cluster: Cluster
    spaces: tuple[TableSpace, ...]
    base: Exploration
    placed: PlacedPrices | None = None
    staged: PipelineTask | None = None
    placed_counts: tuple[int, ...] = (1,)
    _placing: dict[int, PricedGraph] = field(default_factory=dict, repr=False, compare=False)

    def placing(self, micro_batches: int = 1) -> PricedGraph:
        """The model as placing planners see it, with nothing split, in so many micro-batches."""
        if self.placed is None:
            raise TensorOptError("this task was made without prices for placing planners")
        if micro_batches not in self._placing:
            self._placing[micro_batches] = self.placed.price(micro_batches=micro_batches)
        return self._placing[micro_batches]

    def placed_space(self, micro_batches: int) -> int:
        """The number of the space that plans of so many micro-batches belong to."""
        first = len(self.base.spaces) - len(self.placed_counts)
        return first + self.placed_counts.index(micro_batches)

    @property
    def staging(self) -> PipelineTask:
        """The model as planners of pipelines see it."""
        if self.staged is None:
            raise TensorOptError("this task was made without prices for planners of pipelines")
        return self.staged

    @property
    def search_s(self) -> float:
        """Seconds that tracking the frontier took; 0 where the exploration does not say."""
        return float(self.base.report.get("seconds", {}).get("search", 0.0))
