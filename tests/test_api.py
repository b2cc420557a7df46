"""The whole pipeline on small models: what `explore` gives, keeps, repeats and refuses."""

from __future__ import annotations

import csv
import itertools
import os
from typing import Any

import pytest
import torch
from torch import nn

import tensoropt
from tensoropt.api import recost
from tensoropt.cluster import Cluster, Mesh
from tensoropt.cluster.files import cluster_from
from tensoropt.errors import TensorOptError
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.strategy import Strategy
from tests.costs.models import gates, two_layers
from tests.lent_ranks import lend_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with ProfileStore(tmp_path_factory.mktemp("profile") / "profile.sqlite") as profile:
        yield profile


@pytest.fixture(scope="module", autouse=True)
def links_from_data_sheets(ranks):
    """Timing links takes most of a minute and is tested elsewhere; the slow test below has it. Workloads are
    timed on ranks that were started once."""
    with pytest.MonkeyPatch.context() as patch:
        lend_ranks(patch, ranks)
        patch.setattr("tensoropt.costs.timings.measure_links", lambda *_, **__: LinkFits(collectives={}))
        yield


def explored(store, build=gates, **settings):
    """What the search alone finds; published planners' plans are tested in session/test_quick_plans.py."""
    model, args, kwargs = build()
    alone = {"placements": "never", "pipelines": "never"}
    settings = {"cluster": "local:2", "micro_batches": (1, 2), "epsilon": 0.0} | alone | settings
    return tensoropt.explore(model, args, kwargs, store=store, **settings)


@pytest.fixture(scope="module")
def exploration(store):
    return explored(store)


def figures(exploration):
    return [
        (p.memory_bytes, p.time_s, p.compute_s, p.communication_s, p.choice, p.options, p.space)
        for p in exploration.frontier
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"args": torch.ones(9, 8)}, r"tuple of example inputs.*pass \(x,\)"),
        ({"loss": 3}, "loss must map the model.s output to a scalar.*3 was given"),
        ({"loss": nn.MSELoss()}, r"MSELoss\(\) was given, which cannot be called with one argument"),
        ({"micro_batches": 2}, r"micro_batches is 'auto' or a tuple of counts, such as \(1, 2\), not 2"),
        ({"cluster": 2}, "a cluster is a text such as.*this is 2"),
        ({"optimizer": torch.optim.AdamW}, "optimizer must be a text, such as 'adam'"),
        ({"memory": True}, "memory must be a number or a text with a unit"),
        ({"micro_batches": "many"}, "neither 'auto' nor a list"),
    ],
    ids=["args", "number-as-loss", "loss-of-two", "number", "cluster", "optimizer", "memory", "word"],
)
def test_words_of_another_type_are_refused_in_a_sentence(given: dict[str, Any], words: str) -> None:
    call = {"args": (torch.ones(9, 8),), "loss": torch.sum, "cluster": "cpu:2", **given}
    with pytest.raises(tensoropt.TensorOptError, match=words):
        tensoropt.explore(nn.Linear(8, 4), call.pop("args"), **call)


def test_choices_that_exclude_each_other_are_refused(exploration: Any) -> None:
    for call, words in (
        (lambda: exploration.choose(knee=True, fastest=True), "give only one of them"),
        (lambda: exploration.choose(knee=True, time="1s"), "give only one of them"),
        (lambda: exploration.choose(point="1"), "point must be a whole number; got '1'"),
        (lambda: exploration.save(None), "takes a folder's path"),
        (lambda: tensoropt.parallelize(nn.Linear(8, 4), {}), "a plan, its file or a strategy, not a dict"),
    ):
        with pytest.raises(TensorOptError, match=words):
            call()


def test_the_frontier_is_strictly_decreasing(exploration):
    points = exploration.frontier
    assert len(points) >= 3
    for a, b in itertools.pairwise(points):
        assert a.memory_bytes < b.memory_bytes
        assert a.time_s > b.time_s
    for p in points:
        assert p.time_s == pytest.approx(p.compute_s + p.communication_s)
        assert p.memory_bytes == sum(p.memory)
        assert p.memory_bytes >= p.memory[0] + p.memory[1] + p.memory[2]
        assert sum(p.sources.values()) == pytest.approx(1.0)
        assert set(p.sources) <= {"measured", "fitted", "data sheet"}
    assert exploration.devices == 2
    assert {s.micro_batches for s in exploration.spaces} == {1, 2}


def test_every_point_is_a_plan_that_comes_back(exploration, tmp_path):
    graph = exploration.recorded.grouped
    for i, point in enumerate(exploration.frontier):
        plan = exploration.plan(i)
        data = plan.strategy_data()
        strategy = Strategy.from_data(data, graph)
        assert strategy.to_data() == data
        assert plan.strategy(graph).stored == strategy.stored
        assert plan.predicted.memory_bytes == point.memory_bytes
        plan.save(tmp_path / "plan.json")
        assert tensoropt.load_plan(tmp_path / "plan.json") == plan


def test_saved_and_loaded_it_is_the_same(exploration, tmp_path):
    exploration.save(tmp_path / "out")
    again = tensoropt.load(tmp_path / "out")
    assert again.points == exploration.points
    assert again.plan(0) == exploration.plan(0)
    with open(tmp_path / "out" / "frontier.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:11] == [
        "point", "memory_bytes", "time_s", "devices", "mesh", "micro_batches",
        "compute_s", "communication_s", "exact", "gap", "planner",
    ]  # fmt: skip
    assert [float(r["time_s"]) for r in rows] == pytest.approx([p.time_s for p in exploration.frontier])


def test_the_same_measurements_give_the_same_points(exploration, store):
    assert figures(explored(store)) == figures(exploration)


@pytest.mark.slow
def test_one_device_has_nothing_to_send(store):
    found = explored(store, two_layers, cluster="local:1", micro_batches=(1, 2))
    assert found.devices == 1
    assert all(p.communication_s == 0.0 and p.collectives == () for p in found.frontier)
    assert all(space.mesh.shape == () for space in found.spaces)
    assert found.choose().strategy_data()["mesh"] in ([1], [2])


@pytest.mark.slow
def test_links_are_fitted(store, monkeypatch):
    from tensoropt.profiling import links

    monkeypatch.setattr("tensoropt.costs.timings.measure_links", links.measure_links)
    found = explored(store, two_layers, micro_batches=(1,))
    assert {"measured"} == {name for p in found.frontier for name in p.sources}


def test_micro_batches_that_the_model_refuses(store):
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    asked = {"loss": torch.sum, "micro_batches": (2,)}
    with pytest.raises(TensorOptError, match=r"2 micro-batches are refused: .*whole batch.*micro-batches 1"):
        explored(store, lambda: (normed, (torch.randn(8, 3, 6, 6),), {}), **asked)


def test_progress_names_the_stages(store):
    seen = []
    explored(store, two_layers, progress=lambda stage, done, total, what: seen.append(stage))
    assert seen[0] == "capture"
    assert {"capture", "configurations", "search", "simulate"} <= set(seen)


@torch.library.custom_op("tensoropt_api_tests::aborting", mutates_args=())
def aborting(x: torch.Tensor) -> torch.Tensor:
    os.abort()


@aborting.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_that_kills_its_process_is_in_the_notes(tmp_path):
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return aborting(super().forward(x))

    with ProfileStore(tmp_path / "profile.sqlite") as profile:
        found = tensoropt.explore(
            Model(8, 8), (torch.randn(4, 8),), cluster="dgx-h100[2]", mode="inference", store=profile
        )
        assert profile.forget_failed() == 1
    (note,) = [note for note in found.report["notes"] if "aborting.default has no rule" in note]
    assert "kept whole on every device: tried on small tensors, the process that tried it died" in note
    assert found.points


def nodes(between: str) -> Cluster:
    """Two nodes of two devices, 10 GB/s inside."""
    links = {
        "intra_node": {"latency": "5us", "bandwidth": "10GB/s"},
        "inter_node": {"latency": "5us", "bandwidth": between},
    }
    devices = [{"kind": "V100-16GB", "count": 2}]
    return cluster_from({"devices": devices, "nodes": 2, "links": links}, name=between)


def crossing_bytes(plan) -> int:
    """Bytes of the collectives whose groups have ranks of both nodes."""
    mesh = Mesh(shape=tuple(plan.mesh.shape))
    return sum(
        c.bytes * c.count
        for c in plan.predicted.collectives
        if any(len({rank // 2 for rank in group}) > 1 for group in mesh.groups(c.axes))
    )


def test_the_chosen_plan_keeps_off_a_slow_link(tmp_path):
    """A tenth of the bandwidth between the nodes: within the same memory less goes there, where that is not
    hidden behind computing."""
    # Wide, so that a further communicator's buffers are little beside tensors.
    with torch.device("meta"):
        layers = [m for _ in range(3) for m in (nn.Linear(8192, 8192), nn.ReLU())]
        batch = torch.randn(16384, 8192)
    never = {"recompute": "never", "pipelines": "never", "measure": "never", "micro_batches": (1,)}
    with ProfileStore(tmp_path / "profile.sqlite") as profile:
        how = {"loss": lambda y: y.square().mean(), "cluster": nodes("10GB/s"), "store": profile} | never
        even = tensoropt.explore(nn.Sequential(*layers), (batch,), **how)
        slow, _ = recost(even, cluster=nodes("1GB/s"), store=profile)
    leanest, spared = slow.needs.min(), 0
    for i in range(len(even.frontier)):
        before, needs = even.plan(i), float(even.needs[i])
        if needs < leanest or not crossing_bytes(before):
            continue
        after = slow.choose(memory_bytes=needs, fastest=True)
        spared += crossing_bytes(after) < crossing_bytes(before)
    assert spared >= 2
