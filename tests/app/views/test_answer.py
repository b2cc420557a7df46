"""The answer over the plot: from the points that the plot shows, within what the page allows."""

from __future__ import annotations

from dataclasses import replace

from samples_app import GIB, exploration, point
from tensoropt_app.state import View
from tensoropt_app.views.answer import answer_words
from tensoropt_app.views.frontier import FrontierData


def data() -> FrontierData:
    mark = point(60 * GIB, 0.35, planner="data_parallel", choice=(1, 1, 1, 1))
    return FrontierData.of(replace(exploration(), others=(mark,)))


def test_without_a_budget_headroom_is_left_of_a_device() -> None:
    words = answer_words(data(), View())
    assert (words.room, words.devices) == ("76 GiB", "each of 8 H100-80GB")
    assert words.costs == "200 ms a step, 70.0 GiB"
    assert words.beside == (
        "DDP +75 %. A launcher's config can say DP 2×4: 350 ms a step (+75 %). 1 GiB more buys nothing."
    )


def test_a_baseline_is_compared_by_its_link() -> None:
    shown = data()
    (row,) = answer_words(shown, View(exploration="x", point=2, budget_bytes=30 * GIB)).baselines
    assert (row.title, row.memory, row.verdict) == ("DDP", "60.0 GiB", "does not fit, needs 60.0 GiB")
    assert View.from_query(row.link).other == len(shown) - 1
    assert View.from_query(row.link).point == 2


def test_a_baseline_is_used_by_its_link() -> None:
    shown = data()
    (row,) = answer_words(shown, View(exploration="x", point=2)).baselines
    page, _, query = row.use.partition("?")
    assert (page, View.from_query(query).point) == ("/export", len(shown) - 1)


def test_a_baseline_that_is_no_plan_has_a_note_and_no_links() -> None:
    found = data().exploration
    tried = {"data_parallel": {"refusal": "", "local_statistics_s": 0.3}}
    shown = FrontierData.of(replace(found, report={**found.report, "tried": tried}))
    row = answer_words(shown, View(exploration="x", point=2)).baselines[1]
    assert (row.title, row.time, row.link, row.use) == ("DDP, local statistics", "300 ms", "", "")
    assert row.verdict.startswith("+50 %; statistics of each device's rows")


def test_filters_that_leave_nothing_leave_no_plan() -> None:
    words = answer_words(data(), View(mesh="9"))
    assert (words.plan, words.costs) == ("", "no point passes the filters")
    assert [row.verdict for row in words.baselines] == ["fits"]


def test_a_typed_budget_is_what_the_sentence_says_whatever_headroom_is_kept() -> None:
    assert answer_words(data(), View()).costs == "200 ms a step, 70.0 GiB"
    assert answer_words(data(), View(budget_bytes=80 * GIB)).costs == "100 ms a step, 80.0 GiB (tight)"


def test_planners_without_a_plan_are_rows_with_their_reason() -> None:
    shown = data()
    refused = {"limit_bytes": None, "notes": ["needs one device"]}
    both = tuple({"planner": name, **refused} for name in ("m_etf", "m_sct"))
    found = replace(shown.exploration, comparison=both)
    *_, last = answer_words(FrontierData.of(found), View()).baselines
    assert (last.title, last.memory, last.link) == ("m-ETF, m-SCT", "", "")
    assert last.verdict == "no plan: needs one device"
