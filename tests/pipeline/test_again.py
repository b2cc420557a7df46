"""What stages make for themselves and what they are sent."""

from __future__ import annotations

import pytest

from tensoropt.cluster.files import cluster_from
from tensoropt.costs.source import CostSource
from tensoropt.pipeline.again import cheaper_again
from tensoropt.pipeline.stages import Cutter
from tensoropt.plan.settings import Settings
from tensoropt.profiling.store import ProfileStore
from tests.costs.models import problem
from tests.pipeline.models import tables


@pytest.mark.parametrize(("bandwidth", "made"), [("100MB/s", True), ("1000TB/s", False)])
def test_the_cheaper_of_making_and_sending(bandwidth: str, made: bool) -> None:
    """A softmax of the inputs reads 1,536 bytes and writes as many: over 2 TB/s, or over the link."""
    cluster = cluster_from(
        {
            "devices": [{"kind": "A100-80GB", "count": 1}],
            "nodes": 2,
            "links": {"inter_node": {"latency": "5us", "bandwidth": bandwidth}},
        },
        name="two",
    )
    cutter = Cutter(problem(tables).graph)
    with ProfileStore(":memory:") as store:
        found = cheaper_again(cutter, CostSource(cluster, store, Settings(measure="never")))
    assert cutter.can_be_made_again
    assert found == (cutter.can_be_made_again if made else frozenset())
