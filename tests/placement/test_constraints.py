"""Constraints reach the placed problem, or are refused by name."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tensoropt.capture import capture
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan import load_model
from tensoropt.plan.constraints import constraints_of
from tensoropt.plan.problem import prepare_graph
from tensoropt.plan.settings import Settings
from tensoropt.planners.placed import dpos, m_etf, m_topo, placer
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.constraints import ConstraintError
from tensoropt.sharding.groups import GroupGraph

TWO_KINDS = {
    "devices": [{"kind": "H100-80GB", "count": 1}, {"kind": "V100-16GB", "count": 1}],
    "links": {"intra_node": "PCIe4"},
}


@cache
def graph() -> GroupGraph:
    loaded = load_model("zoo:mlp", device="meta", seed=0, batch=8)
    return prepare_graph(capture(loaded.model, loaded.args, loaded.kwargs, mode="train").graph).graph


def linears() -> list[str]:
    return [g.name for g in graph().groups if g.parameters]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("cluster") / "two.json"
    file.write_text(json.dumps(TWO_KINDS))
    return load_cluster(str(file))


def prices(cluster: Cluster, **given: Any) -> PlacedPrices:
    costs = CostSource(cluster, ProfileStore(":memory:"), Settings(), None)
    return PlacedPrices(graph(), cluster, costs, constraints_of(given or None))


def test_without_constraints_everything_is_free(cluster: Cluster) -> None:
    problem = prices(cluster).price().problem
    assert problem.together == problem.pinned == ()


def test_kinds_are_devices_an_operator_may_lie_on(cluster: Cluster) -> None:
    first, last = linears()[0], linears()[-1]
    question = prices(
        cluster,
        devices=[
            {"operators": first, "kinds": ["V100*"], "soft": True},
            {"operators": last, "kinds": ["H100*"], "soft": True},
        ],
    )
    problem = question.price().problem
    at = {name: i for i, name in enumerate(problem.names)}
    assert dict(problem.pinned) == {at[first]: (1,), at[last]: (0,)}
    for planner in (placer, m_topo, m_etf, dpos):
        device = planner.place(problem, None, 0).placement.device
        assert (device[at[first]], device[at[last]]) == (1, 0)


def test_what_belongs_together_shares_a_device(cluster: Cluster) -> None:
    first, last = linears()[0], linears()[-1]
    kinds = [{"operators": first, "kinds": ["V100*"], "soft": True}]
    question = prices(cluster, together=[[first, last]], devices=kinds)
    problem = question.price().problem
    at = {name: i for i, name in enumerate(problem.names)}
    assert problem.together == (tuple(sorted((at[first], at[last]))),)
    for planner in (placer, m_topo, m_etf, dpos):
        device = planner.place(problem, None, 0).placement.device
        assert device[at[first]] == device[at[last]] == 1


def test_pieces_of_a_group_are_limited_like_it(cluster: Cluster) -> None:
    first = linears()[0]
    question = prices(cluster, devices=[{"operators": first, "kinds": ["V100*"], "soft": True}])
    label, count = question.split_choices(graph().group_of[_anchor(first)])[0]
    problem = question.price({first: (label, count)}).problem
    assert len(problem.pinned) == count
    assert {devices for _, devices in problem.pinned} == {(1,)}


def _anchor(group: str) -> str:
    return next(g.anchor.name for g in graph().groups if g.name == group)


def test_pins_of_mesh_axes_mean_nothing_here(cluster: Cluster) -> None:
    pin = {"operators": linears()[0], "axes": {"gpu": "batch"}}
    with pytest.raises(ConstraintError, match=r"pin 1 .* a placed plan has no mesh axes"):
        prices(cluster, pin=[pin]).price()
    soft = prices(cluster, pin=[{**pin, "soft": True}])
    assert soft.price().problem.pinned == ()
    assert "given up, as it is soft: pin 1" in soft.limits.notes[0]


def test_kinds_that_are_not_here(cluster: Cluster) -> None:
    entry = {"operators": linears()[0], "kinds": ["B200*"]}
    with pytest.raises(ConstraintError, match=r"no device of .* is of such a kind"):
        prices(cluster, devices=[entry]).price()
    assert "given up" in prices(cluster, devices=[{**entry, "soft": True}]).limits.notes[0]


def test_kinds_that_leave_nothing(cluster: Cluster) -> None:
    kinds = [{"operators": linears()[0], "kinds": [kind]} for kind in ("V100*", "H100*")]
    with pytest.raises(ConstraintError, match="another entry of 'devices' leaves"):
        prices(cluster, devices=kinds).price()
