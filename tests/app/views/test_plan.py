"""The plan page as data."""

from __future__ import annotations

import itertools

import pytest
from samples_app import GIB, exploration, point
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.picture import picture
from tensoropt_app.views.plan import changed_operators, memory_bar, operator_rows, step_bar

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
