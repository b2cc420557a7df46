"""Plans of every kind, simulated again: at saved costs, and at the costs of now."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tensoropt
from tensoropt import ClusterError, Exploration, TensorOptError, load_cluster
from tensoropt.plan.kinds import PIPELINED, PLACED
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.detail import recorded_of
from tensoropt.report.rebuilt import rebuilt, strategy_on
from tests.report.conftest import gpt2

STAGED = pytest.mark.parametrize("kind", [PIPELINED, PLACED], ids=lambda kind: kind.name)


def check_figures(found: Exploration) -> None:
    for index, point in enumerate(found.points):
        step = rebuilt(found, index, recorded_of(found)).simulated()
        assert step.time_s == pytest.approx(point.time_s, rel=1e-9)
        assert step.memory_bytes == pytest.approx(point.memory_bytes, rel=1e-9)


@STAGED
def test_saved_costs_give_the_figures_of_the_points(staged, kind):
    check_figures(staged[kind.name])


def test_saved_costs_give_the_figures_of_sharded_points(gpus):
    check_figures(replace(gpus.found, points=gpus.found.points[::40]))


@pytest.mark.slow
def test_blocks_that_might_be_recomputed_take_no_memory_of_a_split_backward():
    """The search knows how to recompute either of two equal blocks; the saved plan recomputes none."""
    pin = {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}
    how = {"measure": "never", "placements": "never", "micro_batches": [2], "constraints": pin}
    with ProfileStore(":memory:") as store:
        check_figures(tensoropt.explore(*gpt2(n_layer=3), cluster="cpu:2", store=store, **how))


@pytest.mark.sweep(quick=1)
@STAGED
def test_unchanged_costs_give_the_same_figures(staged, kind):
    found = staged[kind.name]
    again, recosted = tensoropt.recost(found)
    assert [p.time_s for p in again.points] == [p.time_s for p in found.points]
    assert [p.memory_bytes for p in again.points] == [p.memory_bytes for p in found.points]
    for point, recost in zip(found.points, recosted, strict=True):
        assert not recost.reason
        assert recost.time_s == pytest.approx(point.time_s, rel=1e-9)
        assert recost.memory_bytes == pytest.approx(point.memory_bytes, rel=1e-9)


@STAGED
def test_a_cluster_without_such_a_mesh_is_named(staged, kind):
    found = staged[kind.name]
    (index, *_) = (i for i, point in enumerate(found.points) if point.kind is kind)
    graph = recorded_of(found).grouped
    words = r"dgx-a100\[4\] has no mesh (pp2|placed on 2) .* of its 4 devices"
    with pytest.raises(ClusterError, match=rf"{words}.*; this {kind.name} runs on 2: name a cluster"):
        strategy_on(found.plan(index), graph, load_cluster("dgx-a100[4]"))


@pytest.mark.slow
@STAGED
def test_costs_of_several_kinds_of_devices_are_saved_apart(staged, kind):
    mixed = load_cluster("dgx-a100[2]")
    slow = replace(mixed.device, name="half", flops={k: v / 2 for k, v in mixed.device.flops.items()})
    mixed = replace(mixed, name="mixed", devices=(mixed.device, slow))
    found, recosted = tensoropt.recost(staged[kind.name], cluster=mixed)
    assert all(recost.time_s for recost in recosted)
    own = [index for index, point in enumerate(found.points) if point.kind is kind]
    recorded = recorded_of(found)
    check_figures(replace(found, points=tuple(found.points[index] for index in own)))
    with pytest.raises(TensorOptError, match=r"the costs of .* were not saved.*; explore again"):
        rebuilt(found, own[0], replace(recorded, parts={})).simulated()
