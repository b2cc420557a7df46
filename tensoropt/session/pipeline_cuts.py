"""The places where the stages of pipelines may begin in a search, and how many stages each device part
has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from tensoropt.costs.source import CostSource
from tensoropt.errors import PlanError
from tensoropt.pipeline.balance import (
    balanced,
    block_cuts,
    dealt_cuts,
    flops_of,
    has_ends,
    narrow_cuts,
    parameter_bytes_of,
    speeds_of,
    stages_to_a_place,
)
from tensoropt.pipeline.composer import Composer
from tensoropt.pipeline.costs import sources_at
from tensoropt.pipeline.stages import Cutter
from tensoropt.sharding.constraints import ConstraintError, PipelinePin
from tensoropt.sharding.regions import find_regions

FEW_POSITIONS = 8
"""The number of positions up to which all cuts are tried; an assumption."""
MOST_STAGES = 16
"""The most stages per place; Llama 3's published job has 8."""


class Cutting:
    """The possible cuts of one problem's pipelines.

    Args:
        again: activations that stages make themselves.
        pin: what constraints say about pipelines.
        costs: the costs by which computation is balanced.
        note: is called with remarks on what is left out.
        small: whether the model is small enough to cut it elsewhere than between blocks.
    """

    def __init__(
        self,
        cutter: Cutter,
        again: frozenset[str],
        pin: PipelinePin | None,
        costs: CostSource,
        note: Callable[[str], None],
        *,
        small: bool,
    ):
        self.cutter, self.again, self.pin, self.note, self.small = cutter, again, pin, note, small
        self._costs = costs

    @property
    def pinned(self) -> bool:
        """Whether constraints name the cuts."""
        return self.pin is not None and bool(self.pin.cuts)

    def stages_to_a_place(self, places: int, micro_batches: int) -> int:
        """Return how many stages per place the bubble calls for."""
        return stages_to_a_place(self._blocks, places, micro_batches, MOST_STAGES, ends=self._ends)

    def positions(self, composer: Composer, costs: CostSource, *, every: bool) -> list[list[int]]:
        """Return where each stage of a composition may begin, and then where the last one ends.

        Args:
            costs: the costs by which the speeds of places are compared.
            every: whether to try all cuts, if they are few.

        Raises:
            PlanError, ConstraintError: the model cannot be cut as the pin says.
        """
        count, stages = len(self.cutter.graph.groups), composer.stages
        if self.pin is not None and self.pin.cuts:
            pinned = tuple(self.cutter.beginning(name) for name in self.pin.cuts)
            if len(pinned) != stages - 1:
                raise ConstraintError(
                    f"{self.pin}: {stages} stages take {stages - 1} cuts, not {len(pinned)}"
                )
            self.cutter.stages(pinned, self.again)
            return [[0], *([cut] for cut in pinned), [count]]
        if composer.per_place > 1 and not self.small and self._blocks + 2 >= stages:
            try:
                dealt = dealt_cuts(self.cutter, stages)
                self.note("pipelines of several stages to a place: of as many blocks each")
                return [[0], *([cut] for cut in dealt), [count]]
            except PlanError as refusal:  # not every block of every model can begin a stage
                self.note(f"pipelines of {stages} stages are not cut between blocks alone: {refusal}")
        places = self._cuttable(stages)
        if len(places) <= FEW_POSITIONS and every:
            return [[0], *(places for _ in range(stages - 1)), [count]]
        self.note("pipelines: cut between where computation and where storage are evened out")
        even = [
            cuts
            for weights, strengths in zip(self._weights, self._strengths(composer, costs), strict=True)
            if (cuts := balanced(weights, places, stages, strengths))
        ]
        windows = []
        for number in range(stages - 1):
            own = [cuts[number] for cuts in even]
            windows.append([cut for cut in places if own and min(own) <= cut <= max(own)])
        return [[0], *windows, [count]]

    @cached_property
    def _blocks(self) -> int:
        """The number of repeated blocks."""
        return len(find_regions(self.cutter.graph))

    @cached_property
    def _ends(self) -> bool:
        """Whether what precedes and what follows the blocks can be stages of their own."""
        return has_ends(self.cutter)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """(groups,) FLOP, and bytes of parameters."""
        return flops_of(self.cutter.graph, self._costs), parameter_bytes_of(self.cutter.graph)

    def _strengths(self, composer: Composer, costs: CostSource) -> tuple[Sequence[float], Sequence[float]]:
        """Return the speed and the memory of each stage's devices, if places differ in them."""
        prices, at = composer.frontiers.prices, composer.place_of
        if not prices.of_places:
            return (), ()
        speeds = speeds_of(self.cutter.graph, sources_at(costs, composer.places))
        return [speeds[place] for place in at], [prices.room(place) for place in at]

    def _cuttable(self, stages: int) -> list[int]:
        """Return where stages may begin: with repeated blocks if there are enough, otherwise where the fewest
        bytes cross."""
        if len(self.cutter.cuts) <= FEW_POSITIONS:
            return list(self.cutter.cuts)
        blocks = block_cuts(self.cutter)
        if len(blocks) >= stages - 1:
            self.note("pipelines: stages begin with blocks")
            return blocks
        self.note("pipelines: stages begin where least crosses")
        return narrow_cuts(self.cutter, stages - 1)
