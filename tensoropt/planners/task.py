"""The input of every planner (:class:`PlanningTask`), and the result of a sharded one (:class:`Selection`).

A sharded planner selects strategies from a task's cost tables. Their costs come from one simulator for all
planners (:mod:`.results`).
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
"""The stages of an exploration that find or simulate plans, as named in its report of seconds; a planner's
seconds cover both, too. Earlier versions wrote ``placements`` instead of ``planners``."""


@dataclass(frozen=True)
class Selection:
    """A strategy, given by its indices in the cost tables of one mesh and micro-batch count.

    Attributes:
        space: index into :attr:`PlanningTask.spaces`.
        choice: the configuration of each variable.
        options: the option of each variable; absent means the first.
        notes: the planner's remarks (a solver's gap, a budget that ran out).
        kind: a variant of the method, such as a ZeRO stage; the best plans of each are kept.
    """

    space: int
    choice: Mapping[str, int]
    options: Mapping[Any, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class PlanningTask:
    """The input of every planner: a model on a cluster, with its costs.

    Attributes:
        prepared: the captured model, its operators in groups.
        spaces: the cost tables, one item per mesh and micro-batch count.
        base: an exploration of the same model, which can write plans. If placing planners run, its last
            search spaces are for them, one for each of ``placed_counts``.
        placed: the costs of operators on single devices; None if no placing planner runs.
        placed_counts: the numbers of micro-batches into which placing planners may cut the batch.
        staged: the input of pipelined planners; None if none runs.
        refusal: the reason why no sharded plan is allowed and ``spaces`` is empty; "" if some are allowed.
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
        """Return the unsplit model with the costs of a step in ``micro_batches`` micro-batches, for planners
        that place operators on single devices."""
        assert self.placed is not None, "this task was made without the costs of placed plans"
        if micro_batches not in self._placing:
            self._placing[micro_batches] = self.placed.price(micro_batches=micro_batches)
        return self._placing[micro_batches]

    def placed_space(self, micro_batches: int) -> int:
        """Return the exploration's index of the search space of placed plans with this many micro-batches."""
        first = len(self.base.spaces) - len(self.placed_counts)
        return first + self.placed_counts.index(micro_batches)

    @property
    def staging(self) -> PipelineTask:
        """The input of pipelined planners; an assertion fails if there is none."""
        assert self.staged is not None, "this task was made without the costs of pipelines"
        return self.staged

    @property
    def search_s(self) -> float:
        """The time in seconds that finding and simulating the frontier took; 0 if it was not recorded."""
        seconds = self.base.report.get("seconds", {})
        return float(sum(seconds.get(stage, 0.0) for stage in _FINDING))
