"""Units people decide by, on the page: the same figures as the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samples_app import CALL, exploration, of_model, space
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import point_card
from tensoropt_app.views.result import amount_in, answer_line, pace, rates_of

from tensoropt.exploration.rates import RatesOf, StepWork, Tariff


def told(flops: bool = True, call: object = CALL) -> FrontierData:
    """Eight points of 0.8 to 0.1 s on eight H100, 1,024 tokens a step."""
    found = exploration(spaces=(space((2, 4)),))
    report = {**found.report, **({"model_flops": {"bfloat16": 8 * 989.4e12 * 0.05}} if flops else {})}
    return FrontierData.of(of_model(replace(found, report=report), call=call))


DATA = told()
VIEW = View(exploration="x", point=7, price=3.0, amount="1e9 tokens")


def test_the_answer_has_the_engine_s_figures():
    steps = amount_in(VIEW).steps(StepWork.of(DATA.exploration))
    for row in range(len(DATA)):
        one = RatesOf(DATA.exploration, Tariff(VIEW.price)).of(row)
        assert rates_of(DATA, VIEW).of(row) == one
        line = answer_line(DATA, VIEW, DATA.answer(VIEW), row)
        assert line.pace == pace(one)
        assert float(line.cost.split()[0].replace(",", "")) == pytest.approx(one.cost(steps), rel=6e-3)
        assert line.cost.endswith("for 1B tokens")
    assert answer_line(DATA, VIEW, DATA.answer(VIEW), 7).pace == "10,200 tokens/s"


def test_what_is_unknown_is_left_out_or_says_why():
    bare = told(flops=False, call=None)
    view = View(price=3.0, amount="1e9 tokens")
    line = answer_line(bare, view, bare.answer(view), 7)
    assert line.pace == ""
    assert "tokens of a step are unknown" in line.cost
    assert answer_line(bare, View(), bare.answer(View()), 7).cost == ""


def test_the_card_says_them_and_why_not():
    facts = {f.name: f.words for f in point_card(DATA, VIEW, 7).facts}
    assert facts["throughput"].startswith("10,200 tokens/s (1,280 per device), 160 samples/s")
    assert facts["MFU"].startswith("50 %")
    assert facts["1B tokens"] == "27.1 h, 217 device-hours; costs 651"
    images = told(call={"args": [{"tensor": [4, 3, 8, 8], "dtype": "float32"}], "kwargs": {}})
    facts = {f.name: f.words for f in point_card(images, VIEW, 7).facts}
    assert "no input of token indices" in facts["1B tokens"]
    assert facts["1,000 steps"].startswith("1.67 min")
