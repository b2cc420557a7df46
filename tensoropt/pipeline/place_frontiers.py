"""The frontiers of a model's ranges at each place of a pipeline: one search for each mix of device kinds."""

from __future__ import annotations

from tensoropt.costs.source import CostSource
from tensoropt.pipeline.costs import PipelinePrices, sources_at
from tensoropt.pipeline.stage_frontiers import StageFrontiers, StageSearch


class PlaceFrontiers:
    """The frontiers of ranges, by place.

    Places with the same kind of devices share them, so that a range is searched once per kind.

    Args:
        costs: the costs of all kinds of devices in the cluster.

    Attributes:
        search: the part that is the same at all places.
        prices: the prices of the whole job.
    """

    def __init__(self, search: StageSearch, costs: CostSource):
        sources = sources_at(costs, search.mesh.shape[0])
        known = {id(s): StageFrontiers(search, s) for s in {id(s): s for s in sources}.values()}
        self._places = [known[id(source)] for source in sources]
        self.search = search
        uniform = sources[0] is costs
        self.prices = self._places[0].prices if uniform else PipelinePrices.of(costs, search.mesh)

    def at(self, place: int) -> StageFrontiers:
        """Return the frontiers at one place."""
        return self._places[place]
