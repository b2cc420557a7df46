"""One thing changed about an exploration: which changes there are, what each asks, what is searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import tensoropt
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.errors import ClusterError, TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point_records import StagesRecord
from tensoropt.report.changes import (
    change_named,
    changes,
    question_of_change,
    searched_counts,
    twice_the_devices,
    was_searched,
    with_faster_links,
)
from tests.costs.models import gpt2
from tests.plan.explorations import small_exploration


def keys(found: Exploration, index: int) -> dict[str, str]:
    return {change.key: change.refusal for change in changes(found, index)}


def test_what_may_be_changed_of_a_point(gpus: Any) -> None:
    found = gpus.found
    twice = next(i for i, p in enumerate(found.points) if found.spaces[p.space].micro_batches == 2)
    once = next(i for i, p in enumerate(found.points) if found.spaces[p.space].micro_batches == 1)
    level = load_cluster("rtx-4090").levels[-1].name
    devices = 2 * load_cluster("rtx-4090").device_count
    assert set(keys(found, twice)) == {
        f"bandwidth:{level}", "bfloat16", "micro-batches:4", f"devices:{devices}",
    }  # fmt: skip
    assert was_searched(next(c for c in changes(found, once) if c.key == "micro-batches:2"))
    assert searched_counts(found) == (1, 2)


def test_a_change_asks_for_one_thing_and_nothing_else(gpus: Any) -> None:
    found = gpus.found
    cluster = load_cluster("rtx-4090")
    graph = found.recorded.graph
    for change in changes(found, len(found.points) - 1):
        if change.refusal:
            continue
        asked = question_of_change(found, change.key)
        same = {
            "cluster": asked.cluster.fingerprint == cluster.fingerprint,
            "graph": asked.graph.fingerprint == graph.fingerprint,
            "micro-batches": asked.settings.micro_batches == (1, 2),
            "dtype": asked.settings.dtype == "float32",
        }
        kind = change.key.partition(":")[0]
        differs = {
            "bandwidth": {"cluster"}, "devices": {"cluster"}, "bfloat16": {"graph", "dtype"},
            "micro-batches": {"micro-batches"},
        }[kind]  # fmt: skip
        assert {name for name, is_same in same.items() if not is_same} == differs
        assert asked.settings.epsilon == found.settings["epsilon"]
        assert asked.settings.memory_bytes is None
        assert asked.model.fingerprint == asked.graph.fingerprint


def test_bfloat16_of_a_saved_graph_is_what_capturing_in_it_gives(gpus: Any) -> None:
    model, args, kwargs = gpt2(n_layer=1)
    captured = capture(model, args, kwargs, mode="train", dtype="bfloat16")
    asked = question_of_change(gpus.found, "bfloat16")
    assert asked.graph.fingerprint == captured.graph.fingerprint != gpus.found.model.fingerprint


def test_faster_links_are_those_of_a_level() -> None:
    cluster = load_cluster("dgx-h100x2")
    before = {level.name: level.link for level in cluster.levels}
    for level in (None, "node", "gpu"):
        after = {one.name: one.link for one in with_faster_links(cluster, level).levels}
        for name, link in after.items():
            factor = 2 if level in (None, name) else 1
            assert link.bandwidth_bytes_per_s == factor * before[name].bandwidth_bytes_per_s
            assert link.latency_s == before[name].latency_s
    pairs = load_cluster("dgx-v100")
    assert pairs.pairs
    faster = with_faster_links(pairs, pairs.levels[-1].name)
    assert all(
        faster.pairs[pair].bandwidth_bytes_per_s == 2 * link.bandwidth_bytes_per_s
        for pair, link in pairs.pairs.items()
    )


@pytest.mark.parametrize(
    ("name", "twice"),
    [("dgx-h100[2]", "dgx-h100[4]"), ("dgx-h100", "dgx-h100x2"), ("dgx-h100x2", "dgx-h100x4")],
)
def test_twice_the_devices_of_a_preset_are_a_preset(name: str, twice: str) -> None:
    found = twice_the_devices(load_cluster(name))
    assert found.name == twice
    assert found.fingerprint == load_cluster(twice).fingerprint


def test_twice_the_devices_of_others_widen_the_outermost_level() -> None:
    own = replace(load_cluster("dgx-h100x2"), name="ours", source="a file")
    found = twice_the_devices(own)
    assert [(level.name, level.size) for level in found.levels] == [("node", 4), ("gpu", 8)]
    assert found.device_count == 32
    single = replace(load_cluster("dgx-h100[1]"), name="ours")
    with pytest.raises(ClusterError, match="with a single device; describe it in a file"):
        twice_the_devices(single)
    with pytest.raises(ClusterError, match="links of single pairs"):
        twice_the_devices(replace(load_cluster("dgx-v100"), name="ours"))


def test_of_a_pipeline_all_of_its_micro_batches_divide_the_batch(gpus: Any) -> None:
    """Counts are asked for each place: half as many were searched, which says nothing of these."""
    found = gpus.found
    batch = 4
    space = replace(
        found.spaces[0],
        micro_batches=batch,
        mesh=found.spaces[0].mesh.model_copy(update={"shape": (batch, 1), "names": ("stage", "gpu")}),
    )
    one = found.points[0].changed(
        record=StagesRecord(StagesInfo(schedule="1f1b", stages=())), space=0, choice=(), options=()
    )
    pipelined = on(found, points=(one,), spaces=(space,))
    (change,) = [c for c in changes(pipelined, 0) if c.key.startswith("micro-batches")]
    assert change.refusal.startswith(f"{2 * batch} micro-batches do not divide the batch of {batch}")


def on(found: Exploration, **more: Any) -> Exploration:
    return replace(found, **more)


REFUSALS: dict[str, tuple[Callable[[Exploration], Exploration], str, str]] = {
    "links of this machine": (
        lambda found: on(found, cluster=load_cluster("cpu:2").to_dict()), "bandwidth:cpu", "timed"),
    "devices of this machine": (
        lambda found: on(found, cluster=load_cluster("cpu:2").to_dict()), "devices:4", "no more to time"),
    "bfloat16 already": (
        lambda found: on(found, settings={**found.settings, "dtype": "bfloat16"}), "bfloat16", "already"),
    "searched already": (lambda found: found, "micro-batches:2", "searched already"),
    "no divisor": (lambda found: found, "micro-batches:7", "do not divide the batch"),
    "refused by the model": (
        lambda found: on(found, report={**found.report, "micro_batches_refused": "batch norm"},
                         settings={**found.settings, "micro_batches": [1]}),
        "micro-batches:2", "batch norm"),
    "inference": (
        lambda found: on(found, settings={**found.settings, "mode": "inference"}), "micro-batches:4", "one"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_explored_says_why(gpus: Any, name: str) -> None:
    change, key, why = REFUSALS[name]
    found = change(gpus.found)
    assert why in change_named(found, key).refusal
    with pytest.raises(TensorOptError, match=f"cannot be explored: .*{why}"):
        question_of_change(found, key)


@pytest.mark.parametrize("key", ["", "bandwidth", "bandwidth:nix", "micro-batches:0", "micro-batches:²", "x"])
def test_a_change_that_there_is_not_names_those_there_are(gpus: Any, key: str) -> None:
    with pytest.raises(TensorOptError, match=r"there is no change .* there are bandwidth:.*bfloat16"):
        change_named(gpus.found, key)


def test_without_the_operator_graph_nothing_is_explored() -> None:
    found = replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())
    with pytest.raises(TensorOptError, match="saved without its operator graph"):
        question_of_change(found, "bfloat16")


@pytest.mark.slow
def test_a_change_is_searched_with_all_else_as_it_was(gpus: Any) -> None:
    level = load_cluster("rtx-4090").levels[-1].name
    faster = tensoropt.explore_changed(gpus.found, f"bandwidth:{level}", store=gpus.store)
    # No plan is slower with faster links: beyond the gap that both searches allow, no point of the old
    # frontier is faster than the best of the new one within its memory.
    gap = 1 + gpus.found.settings["epsilon"]
    for point in gpus.found.points:
        within = [p.time_s for p in faster.points if p.memory_bytes <= point.memory_bytes * gap]
        assert min(within) <= point.time_s * gap
    assert faster.cluster["name"].endswith("links 2x")


@pytest.mark.slow
def test_bfloat16_explored_without_the_model_is_what_the_model_gives(gpus: Any) -> None:
    model, args, kwargs = gpt2(n_layer=1)
    settings = {"micro_batches": (1, 2), "epsilon": 0.05, "placements": "never", "pipelines": "never"}
    anew = tensoropt.explore(
        model, args, kwargs, cluster="rtx-4090", dtype="bfloat16", store=gpus.store, **settings
    )
    found = tensoropt.explore_changed(gpus.found, "bfloat16", store=gpus.store)
    assert [(p.memory_bytes, p.time_s) for p in found.points] == [
        (p.memory_bytes, p.time_s) for p in anew.points
    ]
    assert found.plan(0).model.fingerprint == anew.plan(0).model.fingerprint
    assert found.settings["dtype"] == "bfloat16"
