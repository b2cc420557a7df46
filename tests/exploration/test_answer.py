"""The answer within a budget: its sentence, its baselines, and what more memory would buy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensoropt
from tensoropt import Exploration, Point
from tensoropt.exploration.answer import _pace_words, answer, without_plans
from tests.app.support.samples_app import GIB, exploration, point


def with_baselines() -> Exploration:
    """Eight points from 10 to 80 GiB and 800 to 100 ms, with what people do by hand."""
    marks = (
        point(60 * GIB, 0.35, planner="data_parallel", choice=(1, 1, 1, 1)),
        point(24 * GIB, 0.84, planner="megatron", choice=(2, 2, 2, 2)),
        point(12 * GIB, 1.6, planner="m_etf", choice=(2, 1, 2, 1)),
        point(22 * GIB, 0.77, planner="m_sct", choice=(1, 2, 2, 1)),
    )
    return replace(exploration(), others=marks)


def test_the_sentence_names_the_plan_the_baselines_and_what_more_would_buy():
    found = with_baselines()
    said = answer(found, 30 * GIB).sentence()
    name = found.names[2]
    assert said == (
        f"Within 30 GiB of each of 8 H100-80GB: {name}, 600 ms a step, 30 GiB (tight). DDP (needs 60 GiB) "
        "does not fit. TP +40 %; placed +28 %. 1 GiB more buys nothing."
    )


def test_of_a_kind_the_fastest_that_fits_is_compared_and_else_the_leanest():
    found = with_baselines()
    rows = {base.title: base for base in answer(found, 15 * GIB).baselines}
    assert set(rows) == {"DDP", "TP (Megatron)", "placed (m-ETF)"}
    assert rows["placed (m-ETF)"].verdict() == "+100 %"
    assert rows["DDP"].verdict() == "does not fit, needs 60 GiB"
    rows = {base.title: base for base in answer(found, 80 * GIB).baselines}
    assert rows["placed (m-SCT)"].longer == pytest.approx(0.77 / 0.1 - 1)


@pytest.mark.parametrize(
    ("longer", "said"),
    [(8.0, "+800 %"), (-0.04, "−4 %"), (1e-10, "as fast"), (None, "fits")],
)
def test_how_much_longer_is_said_as_people_do(longer, said):
    assert answer(with_baselines()).baselines[0]._replace(fits=True, longer=longer).verdict() == said


def test_no_plan_fits():
    found = answer(with_baselines(), 5 * GIB)
    assert found.row is None
    assert "no plan fits; the leanest needs 10 GiB" in found.sentence()


def test_without_a_budget_the_usual_share_of_a_device_stays_free():
    found = with_baselines()
    assert answer(found).limit_bytes == 76 * GIB
    assert answer(found).sentence().startswith("Within 76 GiB (95 % of the memory) of each of 8 H100-80GB: ")
    assert answer(found, 76 * GIB).row == answer(found).row
    asked = replace(found, settings={**found.settings, "memory_bytes": 80 * GIB})
    assert answer(asked).sentence().startswith("Within 80 GiB of each of 8 H100-80GB: ")


def test_with_all_memory_nothing_more_is_promised():
    assert answer(with_baselines(), 80 * GIB).sentence().endswith("1 GiB more buys nothing.")


def test_without_points_there_is_no_plan():
    empty = answer(replace(exploration(), points=()), 45 * GIB)
    assert (empty.row, empty.costs()) == (None, "there is no plan")


@given(st.floats(1.0, 80.0), st.lists(st.floats(5.0, 90.0), min_size=1, max_size=12, unique=True))
def test_as_a_search_through_all_points_finds_it(budget, sizes):
    points = [point(size * GIB, 1.0 / (i + 1)) for i, size in enumerate(sorted(sizes))]
    made = exploration(points)
    found, needs = answer(made, budget * GIB), made.needs.tolist()
    fitting = [i for i, need in enumerate(needs) if need <= budget * GIB]
    assert found.row == (max(fitting) if fitting else None)
    most = found.limit_bytes + found.more_bytes
    more = [p.time_s for p, need in zip(points, needs, strict=True) if need <= most]
    if fitting:
        assert found.gain == pytest.approx(1 - min(more) / points[max(fitting)].time_s)
        assert found.sentence().endswith("more buys nothing.") == (found.gain < 0.001)


def test_a_budget_above_the_card_is_answered_for_the_card():
    found = answer(with_baselines(), 100 * GIB)
    assert found.limit_bytes == 80 * GIB
    assert found.sentence().startswith("Within 80 GiB (a device has less than 100 GiB) of each of 8 H100")


def test_a_simpler_plan_is_the_answer():
    found = exploration()
    simple = point(40 * GIB, found.points[4].time_s * 1.02, planner="data_parallel", choice=(1, 1, 1, 1))
    within = answer(replace(found, others=(simple,)), 50 * GIB)
    assert (within.row, within.chosen.fastest) == (8, 4)
    assert "DDP" not in within.sentence().replace(within.name, "")  # it is the answer itself
    assert within.chosen.rule == "the simplest plan within 3 % of the fastest that fits"


def test_a_baseline_is_a_plan_in_its_best_form():
    leaner = point(20 * GIB, 0.5, planner="data_parallel", choice=(1, 1, 1, 2))
    found = replace(with_baselines(), others=(*with_baselines().others, leaner))
    for size, row in ((None, 8), (60 * GIB, 8), (30 * GIB, 12), (5 * GIB, 12)):
        assert [base.row for base in answer(found, size).baselines if base.title == "DDP"] == [row]


def test_our_own_planners_are_no_baselines():
    ours = point(12 * GIB, 0.7, planner="local_search", choice=(1, 1, 3, 1))
    assert answer(replace(exploration(), others=(ours,))).baselines == ()


def test_planners_without_a_plan_say_why():
    found = with_baselines()
    refused = {"planner": "optcnn", "limit_bytes": None, "notes": ["needs one device", "or two"]}
    tried = {"m_topo": {"refusal": "m_topo finds no plan within 9 GiB"}, "megatron": {"refusal": "odd"}}
    found = replace(found, comparison=(refused,), report={**found.report, "tried": tried})
    wanted = {"m_topo": "no plan within 9 GiB", "optcnn": "no plan: needs one device; or two"}
    assert without_plans(found) == wanted


READY_MADE = Path(__file__).parents[2] / "app" / "data"


@pytest.fixture(scope="module")
def found():
    return tensoropt.load(READY_MADE / "llama3-8b-4x80gib")


def test_a_rate_and_a_host_that_holds_the_plan_up(found, monkeypatch):
    (rate,) = _pace_words(found, 0)
    assert rate.endswith(" tokens/s")
    assert rate in answer(found, 2**40).costs() or answer(found, 2**40).row != 0
    monkeypatch.setattr(Point, "host_bound", True)
    assert _pace_words(found, 0) == [rate, "bound by the host"]


def test_one_device_has_no_baselines(found, monkeypatch):
    assert answer(found).baselines
    monkeypatch.setattr(type(found), "devices", 1)
    assert answer(found).baselines == ()
