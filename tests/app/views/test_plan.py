"""The plan page as data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from samples_app import GIB, exploration, point, space
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.picture import picture
from tensoropt_app.views.plan import changed_operators, device_bars, memory_bar, operator_rows, step_bar
from tensoropt_app.views.point import point_card

DATA = FrontierData.of(exploration())


def test_memory_is_stacked_up_to_the_device_with_headroom() -> None:
    bar = memory_bar(DATA, View(headroom=0.1), 3)  # 40 of 80 GiB
    assert sum(s.share for s in bar.segments) == pytest.approx(1.0)
    sizes = {s.kind: s.size for s in bar.segments}
    assert sizes["parameters"] == "8.00 GiB"
    assert (sizes["free"], sizes["headroom"]) == ("32.0 GiB", "8.00 GiB")
    assert bar.summary == "40.0 GiB of 80.0 GiB on each device (50 %)."


def test_a_plan_larger_than_the_device_says_by_how_much() -> None:
    data = FrontierData.of(exploration([point(100 * GIB, 1.0)]))
    assert memory_bar(data, View(), 0).summary == "100 GiB on each device, 20.0 GiB more than it has."


def test_the_step_is_compute_waiting_and_idle() -> None:
    assert [s.size for s in step_bar(DATA, 0).segments] == ["533 ms", "267 ms", "0 ms"]
    parts = {"compute_s": 0.5, "exposed_s": 0.2, "hidden_s": 0.05, "idle_s": 0.1}
    bar = step_bar(FrontierData.of(exploration([point(GIB, 0.8, **parts)])), 0)
    assert "50.0 ms of communication hide behind compute" in bar.summary
    assert sum(s.share for s in bar.segments) == pytest.approx(1.0)


def test_operators_name_the_axis_and_the_dim_it_splits() -> None:
    rows = {o.group: o for o in operator_rows(DATA.exploration, 0)}
    assert rows["embedding"].axes == "a → d0, b → d0"
    assert rows["mlp"].axes == "whole"
    assert rows["mlp"].module == "model.mlp"


def test_two_plans_differ_where_operators_are_split_otherwise() -> None:
    found = exploration([point(GIB, 1.0), point(2 * GIB, 0.5, choice=(1, 1, 0, 1))])
    assert changed_operators(found, 1, 0) == (
        ("attention", "model.attention", "a → out_features, b → out_features", "a → d0, b → d0"),
    )


def test_the_picture_collapses_operators_to_their_modules() -> None:
    rows = operator_rows(DATA.exploration, 0)
    chain = [(a.group, b.group, i == 1) for i, (a, b) in enumerate(itertools.pairwise(rows))]
    found = picture(rows, chain)
    assert [n.key for n in found.nodes] == ["model.embedding", "model.attention", "model.mlp", "model.head"]
    assert ("model.attention", "model.mlp", True) in found.edges
    assert dict(found.legend)["a → d0, b → d0"] == 0
    assert picture(rows, []).edges == ()


PLACED = {
    "operators": {
        name: {"axes": {}, "micro": "", "device": i % 2, "order": i, "backward_order": 3 - i}
        for i, name in enumerate(("embedding", "attention", "mlp", "head"))
    },
    "parameters": {},
    "placed": {"splits": {}, "transfers": [], "peak_bytes": [20 * GIB, 10 * GIB]},
    "notes": [],
}


def test_a_placed_plan_names_devices_instead_of_axes() -> None:
    where = space((2,))
    mesh = where.mesh.model_copy(update={"placed": True, "names": ("device",)})
    bare = replace(where, mesh=mesh, groups={}, keys={})
    mark = point(20 * GIB, 0.9, planner="m_etf", space=1, choice=(), options=(), placed=PLACED, exact=False)
    data = FrontierData.of(replace(exploration(spaces=[space(), bare]), others=(mark,)))
    assert [o.axes for o in operator_rows(data.exploration, 8)] == ["device 0", "device 1"] * 2
    assert memory_bar(data, View(), 8).summary == "20.0 GiB of 80.0 GiB on the fullest device (25 %)."
    assert [(s.title, s.size, s.share) for s in device_bars(data, 8)] == [
        ("device 0", "20.0 GiB", 1.0), ("device 1", "10.0 GiB", 0.5)
    ]  # fmt: skip
    assert device_bars(data, 0) == ()
    assert len(changed_operators(data.exploration, 8, 0)) == 4
    assert point_card(data, View(), 8).facts[0].value == "m-ETF"
