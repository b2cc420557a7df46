"""The frontier as data: one limit, one verdict, one chosen plan."""

import numpy as np
from samples_app import GIB, exploration, long_exploration, point
from tensoropt_app.state import View
from tensoropt_app.views import frontier
from tensoropt_app.views.frontier import FrontierData

DATA = FrontierData.of(exploration())


def test_limits_of_views_are_those_of_all():
    budgets = {None: 76, 24 * GIB: 24, 79 * GIB: 79, 99 * GIB: 80}
    for budget, limit in budgets.items():
        assert DATA.limit_bytes(View(budget_bytes=budget)) == limit * GIB
        assert DATA.limit_words(View(budget_bytes=budget)) == f"{limit} GiB"
    assert DATA.limit_bytes(View(budget_bytes=79 * GIB, headroom=0.1)) == 72 * GIB
    assert (DATA.room_bytes(View()), DATA.room_bytes(View(headroom=0.1))) == (80 * GIB, 72 * GIB)


def test_the_budget_that_an_exploration_was_made_for_is_the_views():
    asked = float(DATA.needs[1])
    settings = {**DATA.exploration.settings, "memory_bytes": asked}
    made_for = FrontierData.of(exploration(settings=settings))
    assert (made_for.limit_bytes(View()), made_for.chosen(View())) == (asked, 1)
    assert made_for.chosen(View(point=5)) == 5
    assert [made_for.mark(View(), row) for row in (0, 1, 2)] == ["fits", "tight", "over"]


def test_without_a_point_the_recommended_plan_is_chosen():
    assert DATA.chosen(View()) == DATA.chosen(View(point=99)) == DATA.exploration.index()
    assert DATA.chosen(View(budget_bytes=35 * GIB)) == 2
    # Nothing fits: the one that needs least.
    assert DATA.chosen(View(budget_bytes=GIB)) == 0


def test_a_longest_step_chooses_the_leanest_that_is_fast_enough():
    view = View(time_s=0.45)
    assert (DATA.chosen(view), DATA.chosen(View(time_s=0.45, point=6))) == (4, 6)
    assert frontier.address_sentences(DATA, "?time=0.45") == []
    # Of a step that no plan reaches, the recommended plan is shown, and that is said.
    assert DATA.chosen(View(time_s=0.05)) == DATA.exploration.index()
    wanted = ["No plan that fits 76 GiB takes at most 50 ms; the fastest takes 200 ms."]
    assert frontier.address_sentences(DATA, "?time=50ms") == wanted
    assert frontier.without_point(view, 24 * GIB) == View(budget_bytes=24 * GIB)


def test_a_budget_above_the_card_is_none():
    said = "H100-80GB has 80 GiB, which no plan may exceed; plan on other devices for more."
    assert (frontier.budget_fault(DATA, 99 * GIB), frontier.budget_fault(DATA, 80 * GIB)) == (said, "")
    assert frontier.address_sentences(DATA, "?budget=99GiB") == [said]


def test_a_planners_plan_that_none_beats_is_a_point():
    data = FrontierData.of(exploration([point(10 * GIB, 1.0), point(20 * GIB, 0.5, planner="zero")]))
    assert data.chosen(View(budget_bytes=79 * GIB)) == 1
    assert (data.title(1), frontier.count_words(data)) == ("Point 2 of 2", "2 points")


def test_the_line_has_no_point_that_needs_more_than_a_faster_one():
    assert DATA.line.tolist() == list(range(8))
    long = FrontierData.of(long_exploration(20_000))
    assert np.all(np.diff(long.needs[long.line]) > 0)


def test_there_is_one_count_of_points_and_they_are_counted_from_one():
    marks = [
        point((i + 1) * GIB, 2.0, planner=name, choice=(0, 0, 0, i))
        for i, name in enumerate(("zero", "zero", "frontier"))
    ]
    data = FrontierData.of(exploration(others=tuple(marks)))
    wanted = ["Point 1 of 8", "Point 8 of 8", "ZeRO 1 of 2", "ZeRO 2 of 2"]
    assert [data.title(row) for row in (0, 7, 8, 9)] == wanted
    assert frontier.count_words(data) == "8 points, 3 plans of other planners"


def test_a_point_that_does_not_exist_is_said():
    said = "Point 999 does not exist: this frontier has 8 points."
    assert frontier.address_sentences(DATA, "?point=999") == [said]
    assert frontier.address_sentences(DATA, "?point=8") == []
