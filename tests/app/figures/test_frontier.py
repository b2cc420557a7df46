"""The frontier's plot as a dictionary.

Which of many points are drawn: those left out are covered by one that is.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from contrast_app import lab, linear
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from samples_app import GIB, exploration, long_exploration, point
from tensoropt_app.figures import frontier as drawing
from tensoropt_app.figures.frontier import MOST, PLACES, Window, apart
from tensoropt_app.figures.palette import GRAPH_CONFIG
from tensoropt_app.pages.frontier.callbacks import marking
from tensoropt_app.state import View
from tensoropt_app.views.certificate import certificate, certificate_sentence
from tensoropt_app.views.frontier import FrontierData

from tensoropt.plan.plan_names import PLANNER_TITLES
from tensoropt.plan.point import Point
from tensoropt.plan.time_range import TimeRange

LINEAR = (False, False)


def test_few_points_are_all_drawn() -> None:
    values = np.zeros(MOST)
    assert apart(values, values, LINEAR).tolist() == list(range(MOST))


@given(arrays.arrays(float, (2, 3000), elements=st.floats(-1e6, 1e6)))
def test_every_point_lies_in_a_place_that_is_drawn(points: np.ndarray) -> None:
    """Curves keep the finest places; of points all over the plot, places grow until there are few enough."""
    x, y = points
    found = apart(x, y, LINEAR)
    assert len(found) <= MOST + 2
    assert found.tolist() == sorted(set(found.tolist()))
    assert {0, len(x) - 1} <= set(found.tolist())


@pytest.mark.parametrize("logs", [LINEAR, (True, False), (True, True)])
def test_what_is_left_out_of_a_curve_is_covered(logs: tuple[bool, bool]) -> None:
    x = np.geomspace(1, 1000, 30_000)
    y = 1 / x
    found = apart(x, y, logs)
    across, up = (np.log10(v) if log else v for v, log in zip((x, y), logs, strict=True))
    across, up = (across - across.min()) / np.ptp(across), (up - up.min()) / np.ptp(up)
    places = np.stack([across[found], up[found]])
    for i in range(0, len(x), 97):
        near = np.abs(places - [[across[i]], [up[i]]])
        # A grid that has grown once is half as fine again.
        assert np.any((near[0] <= 1.6 / PLACES[0]) & (near[1] <= 1.6 / PLACES[1]))


def test_a_window_has_points_of_its_own() -> None:
    x = np.linspace(0, 1, 50_000)
    whole, near = apart(x, -x, LINEAR), apart(x, -x, LINEAR, Window("", (0.5, 0.51), (-0.51, -0.5)))
    assert set(whole) < set(near)
    inside = near[(x[near] >= 0.5) & (x[near] <= 0.51)]
    assert len(inside) > 20 * np.count_nonzero((x[whole] >= 0.5) & (x[whole] <= 0.51))
    # Plotly's ends of an axis may run either way.
    assert apart(x, -x, LINEAR, Window("", (0.51, 0.5), (-0.5, -0.51))).tolist() == near.tolist()


def test_what_has_no_place_on_a_logarithmic_axis_is_left_out() -> None:
    x = np.arange(3000.0)
    found = apart(x, np.where(x % 2, x, 0.0), (False, True))
    assert all(n % 2 for n in found[1:-1])


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["of", "x", "y"]), inner)))  # fmt: skip
def test_what_a_browser_sends_is_a_window_or_none(sent: object) -> None:
    found = Window.read(sent)
    assert found is None or np.isfinite([*found.x, *found.y]).all()


def test_a_window_is_read() -> None:
    assert Window.read({"of": "a", "x": [1, 2.5], "y": [3, 4]}) == Window("a", (1, 2.5), (3, 4))


DATA = FrontierData.of(exploration())


def figure(view: View, data: FrontierData = DATA) -> dict:
    return drawing.frontier_figure(data, view, "light")


def test_points_that_do_not_fit_are_grey_and_there() -> None:
    traces = figure(View(headroom=0.15))["data"]
    assert traces[drawing.FITS]["x"] == [10, 20, 30, 40, 50, 60]
    assert traces[drawing.OVER]["x"] == [70, 80]
    assert traces[drawing.FITS]["marker"]["color"] != traces[drawing.OVER]["marker"]["color"]


def test_a_click_finds_its_point_by_customdata() -> None:
    """Plain lists: arrays are missing from a click's data."""
    trace = figure(View())["data"][drawing.FITS]
    assert trace["customdata"][3] == [3, "DP 2×4 (TP 25 %)", "point 4"]


def test_the_lines_of_the_papers_figure_come_on_demand() -> None:
    assert figure(View())["data"][drawing.COMPUTE]["visible"] is False
    lines = figure(View(lines=True))["data"]
    assert lines[drawing.COMPUTE]["y"][0] == pytest.approx(800 * 2 / 3, rel=1e-6)
    assert lines[drawing.NETWORK]["line"]["dash"] == "dot"


def summed(memory: float, time_s: float, gap: float | None, sums: tuple[float, float]) -> Point:
    """A point whose sums are other figures than its simulated ones, as they are."""
    own = {"additive_memory_bytes": sums[0], "additive_time_s": sums[1]}
    return point(memory, time_s, gap=gap, exact=gap == 0.0, **own)


PROVEN = FrontierData.of(
    exploration(
        [
            summed(2 * GIB, 2.2, 0.1, (GIB, 2.0)),
            summed(3 * GIB, 1.4, 0.0, (2 * GIB, 1.0)),
            summed(5 * GIB, 1.2, None, (4 * GIB, 0.1)),
        ]
    )
)


def test_the_band_is_off_unless_asked_for() -> None:
    traces = figure(View(), PROVEN)["data"]
    assert not traces[drawing.BAND]["visible"]
    assert certificate_sentence(PROVEN, View()) == ""


def test_the_band_is_drawn_in_the_sums_of_the_search() -> None:
    """Of which alone something is proven; the line and the dots are where the simulator puts the plans."""
    traces = figure(View(band=True), PROVEN)["data"]
    unit, second = PROVEN.units.memory.factor, PROVEN.units.time.factor
    band = traces[drawing.BAND]
    # A plan holds for all that may use more, and a bound for all that need less: each edge steps to its side.
    there, back = [(1, 2.0), (2, 2.0), (2, 1.0)], [(2, 1.0), (1, 1.0), (1, 2.0 / 1.1)]
    corners = [*there, *back, there[0]]
    assert band["x"] == pytest.approx([size * GIB / unit for size, _ in corners])
    assert band["y"] == pytest.approx([time_s / second for _, time_s in corners])
    assert band["fill"] == "toself"
    assert traces[drawing.LINE]["y"] == pytest.approx(PROVEN.time / second)
    assert "fill" not in traces[drawing.LINE]
    ends = figure(View(band=True), PROVEN)["layout"]["xaxis"]["range"]
    assert ends[0] < GIB / unit
    assert "nothing is proven of where they lie" in certificate_sentence(PROVEN, View(band=True))


def test_no_band_where_nothing_is_proven_or_the_axes_are_others() -> None:
    heuristic = FrontierData.of(exploration([point(GIB, 1.0, gap=None, exact=False)]))
    assert not figure(View(band=True), heuristic)["data"][drawing.BAND]["visible"]
    assert "Nothing is proven" in certificate_sentence(heuristic, View(band=True))
    hours = View(band=True, across="hours")
    assert not figure(hours, PROVEN)["data"][drawing.BAND]["visible"]
    assert "not drawn over these axes" in certificate_sentence(PROVEN, hours)


@pytest.mark.parametrize("seed", range(5))
def test_what_the_band_claims_holds_for_every_plan(seed: int) -> None:
    """Against the definition: no point's sums lie below the lower edge, the best of them on the upper one."""
    drawn = np.random.default_rng(seed)
    sums = [
        (float(m), float(t)) for m, t in zip(drawn.uniform(1, 9, 12), drawn.uniform(1, 9, 12), strict=True)
    ]
    gaps = []
    for memory, time_s in sums:
        best = min(t for m, t in sums if m <= memory)
        gaps.append(time_s / best - 1 + float(drawn.uniform(0, 0.3)))
    points = [
        summed(GIB * (i + 1), 99.0 - i, gap, s) for i, (s, gap) in enumerate(zip(sums, gaps, strict=True))
    ]
    band = certificate(FrontierData.of(exploration(points)), np.arange(12))
    for memory, time_s in sums:
        at_least = band.lower[np.searchsorted(band.memory, memory)]
        assert time_s >= at_least * (1 - 1e-12)
        known = band.upper[np.searchsorted(band.memory, memory, side="right") - 1]
        assert known == min(t for m, t in sums if m <= memory)
    assert (band.lower <= band.upper * (1 + 1e-12)).all()


def test_a_selection_moves_three_traces_two_veils_and_the_budget() -> None:
    """What the patch says is what a whole new figure would say."""
    view = View(point=4, other=1, budget_bytes=35 * GIB)
    patch = json.loads(json.dumps(marking(DATA, view, "light").to_plotly_json()))
    whole = figure(view)
    found = {tuple(o["location"]): o["params"]["value"] for o in patch["operations"]}
    assert set(found) == {
        *(
            ("data", i, name)
            for i in (drawing.KNEE, drawing.OTHER, drawing.SELECTED)
            for name in ("x", "y", "showlegend")
        ),
        ("data", drawing.SELECTED, "error_y"),
        *(("layout", "shapes", i) for i in (drawing.BUDGET, drawing.TARGET, drawing.LIMIT)),
        ("layout", "annotations", drawing.LABEL),
    }
    for (_, i, name), value in ((k, v) for k, v in found.items() if k[0] == "data"):
        assert whole["data"][i][name] == value
    for of, i in (("shapes", drawing.BUDGET), ("shapes", drawing.LIMIT), ("annotations", drawing.LABEL)):
        assert whole["layout"][of][i] == found["layout", of, i]


def test_a_time_with_a_range_has_a_bar_through_its_point(monkeypatch: pytest.MonkeyPatch) -> None:
    time_s = DATA.time[4]
    with monkeypatch.context() as patch:
        ranged = TimeRange(0.9 * time_s, time_s, 1.2 * time_s, 0.8, "w")
        patch.setattr(drawing, "range_of", lambda *_: ranged)
        traces = drawing.frontier_figure(DATA, View(point=4, other=1), "light")["data"]
    selected, second = traces[drawing.SELECTED], DATA.units.time.factor
    middle = DATA.time[4] / second
    assert selected["error_y"]["array"] == pytest.approx([0.2 * middle])
    assert selected["error_y"]["arrayminus"] == pytest.approx([0.1 * middle])
    assert figure(View())["data"][drawing.SELECTED]["error_y"] == {"visible": False}


@pytest.mark.parametrize("log", [False, True])
def test_the_budget_is_a_line_with_its_words_over_it(log: bool) -> None:
    frame = figure(View(budget_bytes=24 * GIB, log_x=log))["layout"]
    line, label = frame["shapes"][drawing.LIMIT], frame["annotations"][drawing.LABEL]
    assert line["visible"]
    # On a logarithmic axis Plotly takes shapes by their values, and annotations by their powers of ten.
    assert (line["xanchor"], label["x"]) == (24, pytest.approx(np.log10(24) if log else 24))
    assert (label["xref"], label["text"]) == ("x", "24 GiB")


def test_a_budget_that_is_beyond_the_plot_or_not_set_is_at_its_edge() -> None:
    for budget, at, words in ((200 * GIB, 1, "200 GiB ▸"), (GIB, 0, "◂ 1 GiB"), (None, 1, drawing.NO_BUDGET)):
        label = figure(View(budget_bytes=budget))["layout"]["annotations"][drawing.LABEL]
        assert (label["xref"], label["x"], label["text"]) == ("paper", at, words)
    hours = figure(View(budget_bytes=24 * GIB, across="hours"))["layout"]
    assert not hours["annotations"][drawing.LABEL]["visible"]
    assert not hours["shapes"][drawing.LIMIT]["visible"]


LONG = FrontierData.of(long_exploration(20_000))


def test_of_many_points_those_are_drawn_that_can_be_told_apart() -> None:
    assert drawing.is_thinned(LONG, View())
    assert not drawing.is_thinned(DATA, View())
    found = figure(View(lines=True), LONG)["data"]
    assert {trace["type"] for trace in found} == {"scatter"}
    for place in (drawing.LINE, drawing.COMPUTE, drawing.NETWORK):
        assert 100 < len(found[place]["x"]) <= MOST + 2
    needs = LONG.needs[[n for place in (drawing.FITS, drawing.OVER) for n, *_ in found[place]["customdata"]]]
    # From the leanest to one that differs by less than 1 % from the last.
    assert needs.min() == LONG.needs.min()
    assert needs.max() > 0.99 * LONG.needs.max()


def test_a_file_without_a_server_has_every_point() -> None:
    trace = drawing.frontier_figure(LONG, View(), "light", thinned=False)["data"]
    assert len(trace[drawing.FITS]["x"]) + len(trace[drawing.OVER]["x"]) == 20_000


def test_what_is_zoomed_into_has_its_points() -> None:
    whole = figure(View(), LONG)
    xs = LONG.needs / LONG.units.memory.factor
    low, high, ups = (
        (xs[10_000] + xs[9_999]) / 2,
        (xs[10_199] + xs[10_200]) / 2,
        whole["layout"]["yaxis"]["range"],
    )
    window = Window(whole["layout"]["uirevision"], (low, high), tuple(ups))
    near = drawing.frontier_figure(LONG, View(), "light", window)

    def inside(found: dict) -> int:
        return sum(low <= x <= high for x in found["data"][drawing.LINE]["x"])

    assert inside(whole) < 20
    assert inside(near) == 200


def test_other_planners_are_marks_of_their_own_shape() -> None:
    points = [
        point(10 * GIB, 1.0),
        point(15 * GIB, 1.2, planner="zero"),
        point(16 * GIB, 1.3, planner="megatron"),
    ]
    trace = figure(View(), FrontierData.of(exploration(points)))["data"][drawing.MARKS]
    assert trace["text"] == ["ZeRO", "Megatron"]
    assert len(set(trace["marker"]["symbol"])) == 2


MARKED = FrontierData.of(
    exploration(
        others=tuple(
            point((15 + i) * GIB, 1.2, planner=p) for i, p in enumerate(("zero", "megatron", "zero"))
        )
    )
)


@pytest.mark.parametrize("narrow", [False, True])
def test_the_legend_has_every_shape_and_no_entry_twice(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["DP 8", "TP 8", "ZeRO-1", "CP 2", "PP 2 1F1B", "placed", "other", "DP 8 · 1/2 blocks recomputed"]
    monkeypatch.setattr(type(MARKED.exploration), "names", tuple(names + ["DP 8"] * 3))
    view = View(headroom=0.15, point=2, other=3)
    for scheme in ("light", "dark"):
        traces = drawing.frontier_figure(MARKED, view, scheme, narrow=narrow)["data"]
        entries = [t for t in traces if t["showlegend"] and t.get("visible", True)]
        assert len({t["name"] for t in entries}) == len(entries)
        looks = {(t["marker"]["color"], t["marker"]["symbol"]) for t in entries}
        assert len(looks) == len(entries)
        seen = [lab(linear(colour)) for colour, symbol in looks if symbol == "circle"]
        # CIE76 distances; 10 is told apart at a glance.
        assert all(np.linalg.norm(a - b) > 20 for a, b in itertools.combinations(seen, 2))
        shapes = {t["marker"]["symbol"].removesuffix("-open") for t in entries}
        drawn = {s.removesuffix("-open") for s in traces[drawing.FITS]["marker"]["symbol"]}
        assert shapes >= {*drawn, *traces[drawing.MARKS]["marker"]["symbol"]}
        colours = {t["marker"]["color"] for t in entries}
        assert colours >= {*traces[drawing.FITS]["marker"]["color"], traces[drawing.OVER]["marker"]["color"]}
        assert "compared" in {t["name"] for t in entries}
    assert "compared" not in {t["name"] for t in figure(View(point=2))["data"] if t["showlegend"]}


def test_no_plot_offers_to_upload_itself() -> None:
    assert "sendChartToCloud" in GRAPH_CONFIG["modeBarButtonsToRemove"]
    assert GRAPH_CONFIG["displaylogo"] is False


def test_ticks_of_logarithmic_axes_are_whole_numbers() -> None:
    layout = figure(View(log_x=True))["layout"]
    assert layout["xaxis"]["tickformat"] == ",~r"
    assert "tickformat" not in layout["yaxis"]


def test_a_zoom_is_kept_while_the_axes_are_the_same() -> None:
    window = Window(figure(View())["layout"]["uirevision"], (20, 40), (300, 600))
    kept = drawing.frontier_figure(DATA, View(lines=True), "light", window)["layout"]
    assert (kept["xaxis"]["range"], kept["yaxis"]["range"]) == ([20, 40], [300, 600])
    other = drawing.frontier_figure(DATA, View(log_x=True), "light", window)
    assert other == figure(View(log_x=True))


def test_a_planners_marks_have_one_shape_in_every_exploration() -> None:
    for planners in (("zero", "megatron"), ("megatron",), ("data_parallel", "optcnn", "megatron")):
        others = tuple(point((15 + i) * GIB, 1.2, planner=p) for i, p in enumerate(planners))
        trace = figure(View(), FrontierData.of(exploration(others=others)))["data"][drawing.MARKS]
        assert trace["marker"]["symbol"][-1] == drawing.symbol_of("megatron")
    known = [name for name in PLANNER_TITLES if name != "frontier"]
    assert len({drawing.symbol_of(name) for name in known}) == len(known)
