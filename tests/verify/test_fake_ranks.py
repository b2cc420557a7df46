"""Any rank of any plan, without the job: what it would send and keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from tensoropt.engine.models import load_model
from tensoropt.errors import PlanError
from tensoropt.ops.calls import RING_SEND
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import workload
from tensoropt.sharding.recipes import groups_run_once
from tensoropt.sharding.regions import find_regions
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.owners import memory_curve
from tensoropt.verify.fake_ranks import check_on_fake_ranks, compare_ranks, fake_job, looked_at
from tensoropt.verify.recorder import compare_collectives, compare_order, in_order
from tests.execute import jobs
from tests.verify.test_verify import around, facts_by_group, predicted, predicted_order


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh", "recompute"),
    [
        ("mlp", (2, 8), "none"),
        ("transformer_dropout", (1, 2, 4), "full"),
        ("transformer_dropout", (2, 2, 4), "products"),
        ("vgg_norm", (1, 8, 8), "none"),
        ("transformer_dropout", (1, 4), "gathered inputs"),
        ("transformer_dropout", (2, 2, 2), "gathered inputs"),
    ],
)
def test_predicted_is_issued(name: str, mesh: tuple[int, ...], recompute: str) -> None:
    spec = jobs.spec(name)
    loaded = load_model(spec)
    strategy = jobs.strategy_of(loaded, mesh, 1)
    if recompute == "gathered inputs":
        strategy = replace(strategy, gathered_again=strategy.gatherable)
        assert strategy.gathered_again
    elif recompute != "none":
        regions = find_regions(loaded.graph)
        once = (groups_run_once(loaded.graph, region, recompute) for region in regions)
        strategy = replace(strategy, recomputed=regions, once=frozenset().union(*once))
        # What was drawn without regions may be gathered for groups that now run again.
        strategy = replace(strategy, gathered_again=strategy.gathered_again & strategy.gatherable)
    found = check_on_fake_ranks(loaded, strategy, "adam")
    issued = [row | {"axes": [a - 1 for a in row["axes"]]} for row in found.collectives_issued]
    assert compare_collectives(predicted(spec, strategy.to_data()), issued) == []
    assert found.issued_order is not None
    order = in_order(found.collectives_issued, found.issued_order)
    assert compare_order(predicted_order(spec, strategy.to_data()), order) == []
    assert found.ranks_unlike == []
    assert not dist.is_initialized()
    facts = {
        n: find_facts(workload(loaded.graph, configuration, mesh))
        for n, configuration in strategy.configurations.items()
    }
    peak = memory_curve(strategy, facts, "adam").peak.total
    assert found.memory_tracked_bytes == pytest.approx(peak, rel=0.005)


def test_messages_around_a_ring_are_predicted() -> None:
    """Of eight ranks that have two positions each."""
    spec = jobs.spec("llama")
    loaded = load_model(spec)
    strategy = Strategy.from_data(around("llama", (1, 8)), loaded.graph)
    found = check_on_fake_ranks(loaded, strategy, "adam")
    issued = [row | {"axes": [a - 1 for a in row["axes"]]} for row in found.collectives_issued]
    # Keys and values forward, again in recomputed blocks, and in backward; gradients all the way home.
    assert len(strategy.recomputed) == 2
    assert sum(row["count"] for row in issued if row["kind"] == RING_SEND) == 2 * (7 + 7 + 7 + 8)
    assert compare_collectives(predicted(spec, strategy.to_data()), issued) == []
    assert found.issued_order is not None
    order = in_order(found.collectives_issued, found.issued_order)
    assert compare_order(predicted_order(spec, strategy.to_data()), order) == []
    assert found.ranks_unlike == []
    most = memory_curve(strategy, facts_by_group(strategy), "adam").peak.total
    assert found.memory_tracked_bytes == pytest.approx(
        most + loaded.graph.atoms.graph.constant_bytes, rel=0.01
    )


def test_ranks_that_would_hang_are_named() -> None:
    sent = [Collective("all_reduce", (1,), 8), Collective("all_gather", (2,), 4)]
    assert compare_ranks(0, sent, 3, list(sent)) == []
    assert compare_ranks(0, sent, 3, [Collective("all_reduce", (1,), 4), sent[1]]) == []
    bigger = Collective("all_reduce", (1,), 16)
    assert "rank 3 sends 16 bytes" in compare_ranks(0, sent, 3, [bigger, sent[1]])[0]
    assert "collective 0: rank 0 issues all_reduce" in compare_ranks(0, sent, 3, sent[::-1])[0]
    assert "rank 0 issues 2 collectives, rank 3 1" in compare_ranks(0, sent, 3, sent[:1])[0]


def test_ranks_looked_at() -> None:
    assert looked_at(2) == (0, 1)
    assert looked_at(64) == (0, 32, 63)


def test_refused_inside_a_job() -> None:
    with fake_job(1, 4):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        with pytest.raises(PlanError, match="a process of its own"), fake_job(0, 2):
            pass
