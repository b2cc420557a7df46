"""One model on several clusters, from the index alone; and what the plot draws of it.

Devices × memory → time over the explorations of one model, each figure leading to its point.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from samples_app import CALL, GIB, exploration, of_model, point, space
from tensoropt_app.figures.clusters import clusters_figure
from tensoropt_app.figures.palette import LIGHT
from tensoropt_app.library import Library
from tensoropt_app.pages.clusters import clicked
from tensoropt_app.state import View
from tensoropt_app.views.clusters import (
    batches_by_memory,
    clusters_data,
    devices_by_memory,
    point_view,
    strange_prices,
    unpriced_kinds,
)

from tensoropt.exploration.rates import Tariff
from tensoropt.shopping import shop


def save(folder: Path, devices: int, points: list[tuple[float, float]], **settings: str) -> None:
    found = exploration([point(m * GIB, t) for m, t in points], [space((devices,))])
    replace(found, settings={**found.settings, **settings}).save(folder)


def test_every_figure_leads_to_its_point(tmp_path: Path) -> None:
    save(tmp_path / "two", 2, [(16, 1.2), (32, 0.6)])
    save(tmp_path / "four", 4, [(4, 1.5), (16, 0.5)])
    save(tmp_path / "other", 8, [(4, 0.1)], optimizer="sgd")  # another step, not to be compared
    table = devices_by_memory(Library(tmp_path), View(exploration="opened-two", price=3.6))
    assert [(row.label, row.current) for row in table.rows] == [
        ("2 × H100-80GB", True), ("4 × H100-80GB", False)
    ]  # fmt: skip
    assert table.rows[0].cells[0] is None
    last = table.rows[1].cells[-1]
    assert (last.time, last.cost) == ("500 ms", "2.00 per 1,000 steps")
    assert (last.view.exploration, last.view.point) == ("opened-four", 1)
    assert "x=opened-four" in last.view.to_query()


def test_one_number_of_devices_is_no_table(tmp_path: Path) -> None:
    save(tmp_path / "two", 2, [(16, 1.2)])
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-two")) is None
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-gone")) is None


def save_batch(folder: Path, batch: int, points: list[tuple[float, float]], **changes: str) -> None:
    found = exploration([point(m * GIB, t) for m, t in points], [space((8,))])
    call = {**CALL, "kwargs": {"input_ids": {"tensor": [batch, 100], "dtype": "int64"}}}
    of_model(found, batch=batch, fingerprint=f"{batch:064}", call=call, **changes).save(folder)


def test_batches_are_compared_by_what_they_read_in_a_second(tmp_path: Path) -> None:
    save_batch(tmp_path / "eight", 8, [(16, 1.0), (32, 0.8)])
    save_batch(tmp_path / "sixteen", 16, [(4, 4.0), (32, 1.0)])
    save_batch(tmp_path / "other", 32, [(4, 0.1)], source="zoo:other")
    table = batches_by_memory(Library(tmp_path), View(exploration="opened-eight"))
    assert table.corner == "tokens/s within"
    assert [(row.label, row.current) for row in table.rows] == [("batch 8", True), ("batch 16", False)]
    cells = [[cell and cell.time for cell in row.cells] for row in table.rows]
    assert (cells[0][0], cells[0][-1]) == (None, "1,000")
    assert (cells[1][0], cells[1][-1]) == ("400", "1,600")
    last = table.rows[1].cells[-1]
    assert (last.view.exploration, last.view.point) == ("opened-sixteen", 1)
    # The same devices: no table by devices.
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-eight")) is None
    assert batches_by_memory(Library(tmp_path), View(exploration="opened-other")) is None
    assert batches_by_memory(Library(tmp_path), View(exploration="opened-gone")) is None


VIEW = View(exploration="opened-fast", prices="H100-80GB=3, A100-80GB=1", headroom=0.0, currency="EUR")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Two clusters of one step, one of another step, one that cannot be read, one that was refused."""
    folder = tmp_path_factory.mktemp("clusters")
    for name, cluster, points in (
        ("fast", "dgx-h100", [(10, 0.4), (90, 0.2)]),
        ("slow", "dgx-a100", [(10, 0.9), (40, 0.6)]),
    ):
        found = exploration([point(m * GIB, t) for m, t in points], [space((8,))], cluster=cluster)
        of_model(found, call=CALL).save(folder / name)
    other = exploration(cluster="dgx-b200")
    replace(other, settings={**other.settings, "optimizer": "sgd"}).save(folder / "other")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "exploration.json").write_text("{")
    (folder / "refused.json").write_text(json.dumps({"l40s-pcie": "no plan fits"}))
    return Library(folder, ready_made=folder / "none")


def test_the_page_answers_as_the_engine_does(library: Library) -> None:
    found = clusters_data(library, replace(VIEW, within_s=0.5))
    assert [row.label for row in found.rows] == ["dgx-h100", "dgx-a100"]
    assert (found.cheapest, found.fastest) == (0, 0)
    assert found.refused == (("l40s-pcie", "no plan fits"),)
    opened = [library.load(row.entry.key) for row in found.rows]
    told = shop(
        opened, time_s=0.5, tariff=Tariff(by_kind={"H100-80GB": 3.0, "A100-80GB": 1.0}, currency="EUR")
    )
    assert tuple(told.sentences()) == found.answer
    for mine, theirs in zip(found.rows, told.rows, strict=True):
        assert (mine.offer.index, mine.offer.cost, mine.offer.hours, mine.offer.reason) == (
            theirs.index, theirs.cost, theirs.hours, theirs.reason,
        )  # fmt: skip


def test_limits_choose_otherwise(library: Library) -> None:
    assert clusters_data(library, VIEW).rows[1].offer.cost == pytest.approx(1000 * 0.6 / 3600 * 8)
    assert clusters_data(library, VIEW).cheapest == 1
    assert clusters_data(library, VIEW).fastest == 0
    assert clusters_data(library, replace(VIEW, within_s=0.1)).cheapest is None


def test_without_prices_device_hours_are_shown(library: Library) -> None:
    view = replace(VIEW, prices="")
    found = clusters_data(library, view)
    assert not found.priced
    assert found.money_title == "device-hours for 1,000 steps"
    assert clusters_data(library, VIEW).money_title == "cost of 1,000 steps, EUR"
    assert found.rows[0].money == pytest.approx(1000 * 0.4 / 3600 * 8)
    assert unpriced_kinds(found, view) == ["H100-80GB", "A100-80GB"]
    one = clusters_data(library, replace(VIEW, prices="A100-80GB=1"))
    assert one.rows[0].money is None
    assert one.rows[1].money is not None


def test_an_amount_that_the_model_lacks_is_said(library: Library) -> None:
    assert clusters_data(library, replace(VIEW, amount="1e9 tokens")).fault == ""
    found = clusters_data(library, replace(VIEW, exploration="opened-other", amount="1e9 tokens"))
    assert "tokens of a step are unknown" in found.fault
    assert found.amount == "1,000 steps"


def test_the_plot_has_a_mark_per_cluster_and_lines_of_limits(library: Library) -> None:
    view = replace(VIEW, within_s=0.5, within_cost=5.0)
    figure = clusters_figure(clusters_data(library, view), view, "light")
    line, first, second, fastest, cheapest = figure["data"]
    assert (first["name"], second["name"]) == ("dgx-h100", "dgx-a100")
    assert first["marker"]["color"] != second["marker"]["color"]
    assert (first["x"], second["x"]) == ([400.0], [600.0])  # the fastest that fits, not the others
    assert (first["marker"]["symbol"], second["marker"]["symbol"]) == ("circle", "circle-open")
    assert first["customdata"][0][:3] == [0, 0, "dgx-h100"]
    assert "2.67 EUR for 1,000 steps" in first["customdata"][0][3]
    assert "too slow: 600 ms a step" in second["customdata"][0][3]
    assert line["x"] == [400.0]
    assert fastest["text"] == ["cheapest, fastest"]
    assert cheapest["x"] == []
    assert [(s["x0"], s["y0"]) for s in figure["layout"]["shapes"]] == [(500.0, 0), (0, 5.0)]
    assert [a["text"] for a in figure["layout"]["annotations"]] == ["at most 500 ms", "at most 5.00 EUR"]
    x, y = (figure["layout"][f"{side}axis"] for side in "xy")
    assert x["type"] == y["type"] == "log"
    assert 10 ** x["range"][0] < 400 < 600 < 10 ** x["range"][1]
    # Without prices there is no line of equal cost.
    bare = replace(VIEW, prices="", within_cost=5.0)
    assert clusters_figure(clusters_data(library, bare), bare, "dark")["layout"]["shapes"] == []


def test_a_budget_chooses_each_clusters_plan(library: Library) -> None:
    view = replace(VIEW, budget_bytes=16.0 * GIB)
    found = clusters_data(library, view)
    assert [row.time_s for row in found.rows] == [0.4, 0.9]
    assert "within 16 GiB a device" in found.answer[0]
    assert point_view(view, found.rows[1], 0).budget_bytes == 16.0 * GIB
    none = clusters_data(library, replace(VIEW, budget_bytes=4.0 * GIB))
    assert [row.point for row in none.rows] == [0, 0]
    assert all("does not fit" in row.words[-1] for row in none.rows)
    assert none.unbeaten == ()
    marks = clusters_figure(none, VIEW, "light")["data"][1:3]
    assert {mark["marker"]["color"] for mark in marks} == {LIGHT.faded}


def test_those_are_unbeaten_that_no_other_is_faster_and_cheaper_than(library: Library) -> None:
    found = clusters_data(library, VIEW)
    assert [row.label for row in found.unbeaten] == ["dgx-h100", "dgx-a100"]
    dear = clusters_data(library, replace(VIEW, prices="H100-80GB=1, A100-80GB=1"))
    assert [row.label for row in dear.unbeaten] == ["dgx-h100"]


@pytest.mark.parametrize("custom", [None, [], [0], ["0", 1], [True, 0], [2, 0], [0, 99], [-1, 0], {"a": 1}])
def test_a_made_up_click_opens_nothing(library: Library, custom: object) -> None:
    assert clicked({"points": [{"customdata": custom}]}, clusters_data(library, VIEW)) is None
    assert clicked(custom, clusters_data(library, VIEW)) is None


def test_a_click_opens_the_point_and_keeps_prices(library: Library) -> None:
    found = clusters_data(library, VIEW)
    assert clicked({"points": [{"customdata": [1, 0, "words"]}]}, found) == (1, 0)
    view = point_view(VIEW, found.rows[1], 0)
    assert (view.exploration, view.point, view.prices, view.currency) == (
        "opened-slow", 0, VIEW.prices, "EUR",
    )  # fmt: skip


def test_an_exploration_that_is_gone_is_none(library: Library) -> None:
    assert clusters_data(library, View(exploration="opened-gone")) is None
    assert clusters_data(library, View(exploration="opened-damaged")) is None


@pytest.mark.parametrize(
    ("prices", "fault"),
    [
        ("H100-80GB=3, A100-80GB=1", ""),
        ("2.5", ""),
        ("H100-80GB=3, H100=2", "there is a price for H100"),
        ("B200-180GB=4", "there is a price for B200-180GB"),
    ],
)
def test_a_price_for_devices_that_no_cluster_has_is_refused_with_those_there_are(
    library: Library, prices: str, fault: str
) -> None:
    said = strange_prices(clusters_data(library, VIEW), replace(VIEW, prices=prices))
    assert said.startswith(fault)
    assert bool(said) == bool(fault)
    if fault:
        assert "A100-80GB" in said
        assert "H100-80GB" in said
