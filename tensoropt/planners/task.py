"""The planning task: the input of every planner, and the answer of a sharded one.

A planner picks :class:`Selection`\\ s from a task's tables. The simulator determines their costs
(:mod:`.results`), the same for all: no planner prices itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensoropt.cluster import Cluster
from tensoropt.evaluation import problem as prepared
from tensoropt.exploration.exploration import Exploration
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.planners.tables import TableSpace

if TYPE_CHECKING:
    from tensoropt.planners.pipelined.common.task import PipelineTask

_FINDING = ("search", "judge", "pipelines", "planners", "placements")
"""The keys under which an exploration reports the seconds of finding and of simulating plans; a planner's
seconds cover both, too. Earlier versions wrote ``placements`` instead of ``planners``."""


@dataclass(frozen=True)
class Selection:
    """A strategy, given by its indices in one space's tables.

    Attributes:
        space: index into :attr:`PlanningTask.spaces`.
        choice: the configuration of each variable.
        options: the option of each variable; absent means the first.
        notes: the planner's remarks (a solver's gap, a budget that ran out).
        kind: the kind of plan within the method; the best of each kind are kept.
    """

    space: int
    choice: Mapping[str, int]
    options: Mapping[Any, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class PlanningTask:
    """A model on a cluster, priced: the task of every planner.

    Attributes:
        prepared: the captured, grouped model.
        spaces: one per mesh and micro-batch count.
        base: an exploration of the same model, which can write plans. If placing planners run, its last
            spaces are theirs, one for each of ``placed_counts``.
        placed: the costs of operators on single devices; None if no placing planner runs.
        placed_counts: the numbers of micro-batches into which placing planners may cut the batch.
        staged: the task of pipelined planners; None if none runs.
        refusal: why no sharded plan is allowed, so that there are no spaces; "" if some are.
    """

    prepared: prepared.Problem
    cluster: Cluster
    spaces: tuple[TableSpace, ...]
    base: Exploration
    placed: PlacedPrices | None = None
    staged: PipelineTask | None = None
    placed_counts: tuple[int, ...] = (1,)
    refusal: str = ""
    _placing: dict[int, PricedGraph] = field(default_factory=dict, repr=False, compare=False)

    def placing(self, micro_batches: int = 1) -> PricedGraph:
        """Return the model for placing planners, unsplit, in ``micro_batches`` micro-batches."""
        assert self.placed is not None, "this task was made without the costs of placed plans"
        if micro_batches not in self._placing:
            self._placing[micro_batches] = self.placed.price(micro_batches=micro_batches)
        return self._placing[micro_batches]

    def placed_space(self, micro_batches: int) -> int:
        """Return the index of the space of placed plans with ``micro_batches`` micro-batches."""
        first = len(self.base.spaces) - len(self.placed_counts)
        return first + self.placed_counts.index(micro_batches)

    @property
    def staging(self) -> PipelineTask:
        """The task of pipelined planners, which must not be None."""
        assert self.staged is not None, "this task was made without the costs of pipelines"
        return self.staged

    @property
    def search_s(self) -> float:
        """The seconds of finding and simulating the frontier's plans; 0 if they were not recorded."""
        seconds = self.base.report.get("seconds", {})
        return float(sum(seconds.get(stage, 0.0) for stage in _FINDING))
