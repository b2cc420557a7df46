"""Units people decide by, on the page: the same figures as the engine's, for every row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from samples_app import CALL, exploration, of_model, space
from tensoropt_app.state import View, is_tautology
from tensoropt_app.views.frontier import (
    Axes,
    FrontierData,
    amount_in,
    axes_of,
    axis_sentence,
    rate_arrays,
    tariff_of,
)
from tensoropt_app.views.point import point_card
from tensoropt_app.views.points_table import table_columns, table_rows

from tensoropt.exploration.rates import StepWork, rates


def told(flops: bool = True, call: object = CALL) -> FrontierData:
    """Eight points of 0.8 to 0.1 s on eight H100, 1,024 tokens a step."""
    found = exploration(spaces=(space((2, 4)),))
    report = {**found.report, **({"model_flops": {"bfloat16": 8 * 989.4e12 * 0.05}} if flops else {})}
    return FrontierData.of(of_model(replace(found, report=report), call=call))


DATA = told()
VIEW = View(exploration="x", point=7, price=3.0, amount="1e9 tokens", currency="EUR")


def test_arrays_are_the_engine_s_figures() -> None:
    found = rate_arrays(DATA, VIEW)
    assert not found.whys
    assert (found.unit, found.amount) == ("tokens", "1B tokens")
    steps = amount_in(VIEW).steps
    for row in range(len(DATA)):
        one = rates(DATA.exploration, row, tariff=tariff_of(VIEW))
        assert found.rate[row] == pytest.approx(one.tokens_per_s)
        assert found.mfu[row] == pytest.approx(one.mfu)
        count = steps(StepWork.of(DATA.exploration))
        assert found.cost[row] == pytest.approx(one.cost(count))
        assert found.device_hours[row] == pytest.approx(one.device_hours(count))


def test_what_is_unknown_is_no_column_and_says_why() -> None:
    found = rate_arrays(told(flops=False, call=None), View(amount="1e9 tokens"))
    assert found.rate is found.mfu is found.hours is found.cost is None
    assert "FLOP" in found.whys["mfu"]
    assert "tokens of a step are unknown" in found.whys["cost"]
    rows = table_rows(table_columns(DATA, View()))
    assert {row["cost"] for row in rows} == {None}
    assert rows[7]["rate"] == 10240
    assert rows[7]["mfu"] == 50


def test_the_card_says_them_and_why_not() -> None:
    facts = {f.name: f.words for f in point_card(DATA, VIEW, 7).facts}
    assert facts["throughput"].startswith("10,200 tokens/s (1,280 per device), 160 samples/s")
    assert facts["MFU"].startswith("50 %")
    assert facts["1B tokens"] == "27.1 h, 217 device-hours; costs 651 EUR"
    images = told(call={"args": [{"tensor": [4, 3, 8, 8], "dtype": "float32"}], "kwargs": {}})
    facts = {f.name: f.words for f in point_card(images, VIEW, 7).facts}
    assert "reads no sequences of token numbers" in facts["1B tokens"]
    assert facts["1,000 steps"].startswith("1.67 min")


@pytest.mark.parametrize("across", ["memory", "hours", "cost"])
@pytest.mark.parametrize("up", ["time", "rate", "mfu", "cost"])
def test_axes_keep_the_order_of_points(across: str, up: str) -> None:
    axes = axes_of(DATA, replace(VIEW, across=across, up=up))
    up = "time" if is_tautology(across, up) else up
    assert (axes.x.name, axes.y.name) == (across, up)
    # Points ascend in memory and get faster: throughput and MFU rise, time, hours and money fall.
    assert (np.diff(axes.x.values) > 0).all() == (across == "memory")
    assert (np.diff(axes.y.values) > 0).all() == (up in ("rate", "mfu"))


def test_an_axis_without_figures_gives_way_and_says_why() -> None:
    view = View(across="cost", up="mfu")
    axes: Axes = axes_of(told(flops=False), view)
    assert axes.key == "memory/time"
    said = axis_sentence(axes, view)
    assert "cannot show MFU: it was saved without the FLOP" in said
    assert "cannot show cost: no price of a device-hour is known for H100-80GB" in said


def test_what_is_switched_off_is_said() -> None:
    assert axis_sentence(axes_of(DATA, VIEW), VIEW) == ""
    view = replace(VIEW, across="hours", up="rate", budget_bytes=1e9, target_s=1.0, lines=True)
    said = axis_sentence(axes_of(DATA, view), view)
    for off in ("what a device has", "the memory budget", "the time target", "compute and network"):
        assert off in said
