"""The frontiers of a model's ranges at each place of a pipeline: one search for each mix of device kinds."""

from __future__ import annotations

from collections.abc import Callable

from tensoropt.cluster import Mesh
from tensoropt.costs.source import CostSource
from tensoropt.pipeline.costs import PipelinePrices, sources_at
from tensoropt.pipeline.stage_frontiers import StageFrontiers


class PlaceFrontiers:
    """The frontiers of ranges by place.

    Places of one kind of devices share them, so that a range is searched once per kind.

    Args:
        mesh: of the whole job; its first axis is the pipeline.
        search: the frontiers at the costs of some of the cluster's kinds.

    Attributes:
        any: those of the first place, for what is the same at all: the cutter, sizes, what is made again.
        prices: of the whole job.
    """

    def __init__(self, costs: CostSource, mesh: Mesh, search: Callable[[CostSource], StageFrontiers]):
        sources = sources_at(costs, mesh.shape[0])
        known = {id(source): search(source) for source in {id(s): s for s in sources}.values()}
        self._places = [known[id(source)] for source in sources]
        self.any = self._places[0]
        self.prices = self.any.prices if sources[0] is costs else PipelinePrices.of(costs, mesh)

    def at(self, place: int) -> StageFrontiers:
        """The frontiers at one place."""
        return self._places[place]
