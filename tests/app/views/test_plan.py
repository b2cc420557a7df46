"""The plan page as data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from samples_app import GIB, exploration, point, space
from tensoropt_app.state import View
from tensoropt_app.views.detail import GraphEdge
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.picture import picture
from tensoropt_app.views.plan import (
    axes_words,
    beside_rows,
    blocks_words,
    changed_operators,
    device_bars,
    memory_bar,
    operator_rows,
    option_words,
    recomputation_difference,
    step_bar,
)
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
    assert rows["embedding"].axes == "batch ×8"
    assert rows["mlp"].axes == "whole"
    assert rows["mlp"].module == "model.mlp"


def test_two_plans_differ_where_operators_are_split_otherwise() -> None:
    found = exploration([point(GIB, 1.0), point(2 * GIB, 0.5, choice=(1, 1, 0, 1))])
    assert changed_operators(found, 1, 0) == (
        ("attention", "model.attention", "output features ×8", "batch ×8"),
    )


def test_the_picture_collapses_operators_to_their_modules() -> None:
    rows = operator_rows(DATA.exploration, 0)
    sent = {"x": (2**20, "x [4, 8] float32")}
    chain = [GraphEdge(a.group, b.group, i == 1, sent) for i, (a, b) in enumerate(itertools.pairwise(rows))]
    found = picture(rows, chain)
    assert [n.key for n in found.nodes] == ["model.embedding", "model.attention", "model.mlp", "model.head"]
    edge = next(e for e in found.edges if e.source == "model.attention")
    assert (edge.target, edge.resharded, edge.bytes) == ("model.mlp", True, 2**20)
    assert edge.tip == ("model.attention → model.mlp, resharded on the way", "x [4, 8] float32, 1 MiB")
    assert found.nodes[0].tip == ("model.embedding", "1 operator: batch ×8", "hands on:",
                                  "x [4, 8] float32, 1 MiB")  # fmt: skip
    assert dict(found.legend)["batch ×8"] == 0
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


def test_below_devices_of_different_loads_stands_what_the_headline_says() -> None:
    mark = point(20 * GIB, 0.9, planner="m_etf", choice=(), options=(), placed=PLACED, exact=False)
    found = replace(exploration(), others=(mark,))
    row = len(found.points)
    assert beside_rows(found, row, None) == ()
    (headline,) = beside_rows(found, row, object())
    assert (headline.memory_bytes, headline.compute_s) == (mark.memory_bytes, mark.compute_s)
    assert headline.communication_s == mark.communication_s


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


def test_plans_over_two_meshes_are_compared_by_what_they_split() -> None:
    """Both split the batch eight ways: the names of the axes are no difference."""
    found = exploration([point(GIB, 1.0), point(2 * GIB, 0.5, space=1)], (space((8,)), space((2, 4))))
    assert changed_operators(found, 1, 0) == ()
    other = replace(found, points=(found.points[0], replace(found.points[1], choice=(1, 1, 0, 1))))
    assert [row[0] for row in changed_operators(other, 1, 0)] == ["attention"]


def test_the_blocks_that_only_one_plan_recomputes_are_listed() -> None:
    blocks = {"attention": "h.0", "mlp": "h.1"}
    of = replace(space(), regions=blocks)
    found = exploration(
        [point(GIB, 1.0, choice=(1, 5, 3, 1)), point(2 * GIB, 0.5, choice=(1, 5, 0, 1))], (of,)
    )
    assert recomputation_difference(found, 1, 0) == (("in both", "h.0"), ("only there", "h.1"))
    assert recomputation_difference(exploration(), 1, 0) == ()
    assert blocks_words(["model.h.0", "model.h.1", "model.h.2", "model.h.7"]) == "model.h.0–2, model.h.7"


def test_what_is_split_and_stored_is_said_in_words() -> None:
    sizes = {"a": 2, "b": 4}
    assert axes_words({"a": "rows.0", "b": "out_features.2@S(0)"}, "rows.0", sizes) == (
        "batch ×2, output features 2 ×4"
    )
    assert axes_words({"a": "none", "b": "d2"}, "d0", sizes) == "dim 2 ×4"
    configuration = {"a": "rows", "b": "out_features"}
    keys = {"p_w": "model.fc.weight", "p_b": "model.fc.bias"}
    told = option_words(("p_w: S(0), S(1), held", "p_b: R, S(0)"), configuration, "rows", sizes, keys)
    assert told == "weight: ZeRO-2 ×2"
    assert option_words(("recomputes h.0",), {"stage": "0"}, "", {}, {}) == "recomputes h.0"
