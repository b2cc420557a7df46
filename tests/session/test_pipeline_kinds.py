"""Pipelines on clusters of several device kinds: each place at the pace and in the memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensoropt import Exploration, Plan
from tensoropt.cluster.files import cluster_from
from tensoropt.plan.kinds import PIPELINED
from tensoropt.profiling.store import ProfileStore
from tests.costs.models import Recipe
from tests.models import Call
from tests.session.captured_once import CapturedOnce

LAYERS = 8
FAST, SLOW = "H100-80GB", "A100-80GB"
PINNED, PINNED_4 = ({"pipeline": {"stages": stages, "schedule": "1f1b"}} for stages in (2, 4))


def recipe() -> Recipe:
    """Eight equal layers of which computation takes most of the time."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
    model = Call(lambda module, x, y: nn.functional.mse_loss(module.layers(x), y), layers=layers)
    return model, (torch.randn(8192, 1024), torch.randn(8192, 1024)), {}


LAYERED = CapturedOnce(recipe)


def explored(store: ProfileStore, *devices: dict[str, Any], nodes: int = 1, **settings: Any) -> Exploration:
    links = {"intra_node": "NVLink4", "inter_node": "IB-400G"}
    if nodes == 1:
        del links["inter_node"]
    cluster = cluster_from({"devices": list(devices), "nodes": nodes, "links": links}, name="toy")
    # Of so small a model, what a process takes is most of the memory.
    of_tensors = {"process_memory": False, "constraints": PINNED}
    asked = {"measure": "never", "micro_batches": [8]} | of_tensors | settings
    return LAYERED.explore(cluster=cluster, store=store, **asked)


def fastest(found: Exploration) -> Plan:
    times = [point.time_s for point in found.points]
    return found.plan(times.index(min(times)))


def layers_of(plan: Plan) -> list[int]:
    """How many layers each stage has."""
    return [sum(name.startswith("linear") for name in stage.groups) for stage in plan.stages.stages]


@pytest.fixture(scope="module")
def mixed(store):
    return explored(store, {"kind": FAST, "count": 2}, {"kind": SLOW, "count": 2})


def test_the_fast_place_gets_more_layers(mixed, store):
    plan, slow = fastest(mixed), fastest(explored(store, {"kind": SLOW, "count": 4}))
    assert layers_of(slow) == [LAYERS // 2, LAYERS // 2]
    first, second = layers_of(plan)
    assert first + second == LAYERS
    assert first > second
    # Beside the pace of the slowest kind.
    assert plan.predicted.time_s < 0.8 * slow.predicted.time_s


def test_plans_say_which_kind_each_place_has(mixed, store):
    info = fastest(mixed).stages
    assert info.kinds == (FAST, SLOW)
    assert (len(info.peak_bytes), info.model_dump(mode="json")["kinds"]) == (2, [FAST, SLOW])
    assert any("in order of rank" in note for note in mixed.report["notes"])
    assert fastest(explored(store, {"kind": SLOW, "count": 4})).stages.kinds == ()


def test_in_the_other_order_the_second_place_gets_more(store):
    found = explored(store, {"kind": SLOW, "count": 2}, {"kind": FAST, "count": 2})
    first, second = layers_of(fastest(found))
    assert first < second


def test_places_keep_within_the_memory_of_their_kind(mixed, store):
    room = int(0.8 * fastest(mixed).stages.peak_bytes[0])
    found = explored(store, {"kind": FAST, "count": 2, "memory": room}, {"kind": SLOW, "count": 2})
    for index in range(len(found.points)):
        assert found.plan(index).stages.peak_bytes[0] <= room


@pytest.mark.slow
def test_nodes_of_two_kinds_are_noted_where_places_mix_them(store):
    both = {"kind": FAST, "count": 1}, {"kind": SLOW, "count": 1}
    found = explored(store, *both, nodes=2)
    assert any("several device kinds run at the speed of the slowest" in n for n in found.report["notes"])
    assert fastest(found).stages.kinds == ()
    single = fastest(explored(store, *both, nodes=2, constraints=PINNED_4)).stages
    assert single.kinds == (FAST, SLOW, FAST, SLOW)


def test_several_kinds_are_reason_to_look_for_pipelines(store):
    found = explored(store, {"kind": FAST, "count": 1}, {"kind": SLOW, "count": 1}, constraints=None)
    assert any(point.kind is PIPELINED for point in found.points)
