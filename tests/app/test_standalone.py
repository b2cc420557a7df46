"""The plot without a server: in a notebook's output and on a page of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from samples_app import exploration, long_exploration, point
from tensoropt_app import standalone
from tensoropt_app.figures.frontier import BUDGET, frontier_figure
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

GIB = 2**30
CARRIED = '<script type="text/plain" class="tensoropt-plotly">'
CHOSEN = View(point=2, budget_bytes=45.0 * GIB)


@pytest.fixture
def data():
    others = [point(74 * GIB, 0.21, planner="zero"), point(78 * GIB, 0.22, planner="data_parallel")]
    return FrontierData.of(exploration(others=others), "gpt2-tiny")


def told(html: str) -> dict[str, Any]:
    """The figures in an output, as the browser reads them."""
    (place,) = ElementTree.fromstring(f"<div>{html}</div>").findall("div[@class='tensoropt-plot']")
    return json.loads(place.attrib["data-figure"])


def test_it_is_the_figure_of_the_frontier_page_in_both_schemes_and_widths(data):
    def drawn(scheme: str, *, narrow: bool = False) -> Any:
        figure = frontier_figure(data, CHOSEN, data.answer(CHOSEN), scheme, narrow=narrow)
        figure["layout"]["annotations"][BUDGET].pop("captureevents")  # nothing is dragged
        return figure

    kept = told(standalone._plot(data, CHOSEN, standalone.Html(), carries=False))
    assert kept["wide"] == plain(drawn("light"))
    swapped = re.sub(
        r"#[0-9a-f]{6}|rgba\([^)]*\)",
        lambda found: kept["dark"].get(found[0], found[0]),
        json.dumps(kept["wide"]),
    )
    assert json.loads(swapped) == plain(drawn("dark"))
    wide, other = kept["wide"], kept["narrow"]
    narrow = [trace | less for trace, less in zip(wide["data"], other["data"], strict=True)]
    phone = plain(drawn("light", narrow=True))
    assert (narrow, wide["layout"] | other["layout"]) == (phone["data"], phone["layout"])


def plain(figure: Any) -> Any:
    return json.loads(json.dumps(figure))


def test_names_do_not_become_markup():
    named = FrontierData.of(exploration(), "</script><b>&'\"")
    html = standalone._plot(named, View(point=0), standalone.Html(), carries=False)
    assert told(html)["wide"]["data"]
    assert "<b>&" not in html + standalone.frontier_page(named, View(point=0))


def running(cell: str) -> SimpleNamespace:
    """An IPython that runs a cell."""
    found = SimpleNamespace(cell=cell)
    found.get_parent = lambda: {"metadata": {"cellId": found.cell}, "header": {"msg_id": "1"}}
    return found


def test_the_first_cell_of_a_kernel_carries_plotly_also_when_it_runs_again(monkeypatch):
    def carried() -> bool:
        return CARRIED in standalone.notebook_plot(exploration(), "<svg/>")

    monkeypatch.setitem(sys.modules, "IPython", None)
    assert carried()
    kernel, another = running("a"), running("b")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    assert carried()
    kernel.cell = "b"
    assert not carried()
    kernel.cell = "a"
    assert carried()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: another))
    assert carried()
    another.cell = "c"
    assert not carried()
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    assert carried()  # each output is a page of its own there


def test_a_notebook_selects_the_answer_within_the_budget_of_the_search():
    kept = told(standalone.notebook_plot(exploration(settings={"memory_bytes": 45.0 * GIB}), "<svg/>"))
    (selected,) = (trace for trace in kept["wide"]["data"] if trace.get("name") == "chosen")
    assert selected["x"] == [40.0]


def test_a_plot_in_python_is_the_notebooks():
    shown = told(standalone.notebook_plot(exploration(), "<svg/>"))["wide"]
    plotted = exploration().plot()
    assert [trace.name for trace in plotted.data] == [trace.get("name") for trace in shown["data"]]
    assert plotted.layout.xaxis.title.text == shown["layout"]["xaxis"]["title"]["text"]
    assert len(plotted.layout.annotations) == len(shown["layout"]["annotations"])


def test_the_page_tells_the_answer_the_chosen_point_and_the_baselines(data):
    page = standalone.frontier_page(data, CHOSEN)
    words = re.sub(r"<[^>]+>", " ", page.split("<script", 1)[0])
    assert re.search(r"Within 45(\.0)? GiB of each of", words)
    assert "point 3 of 8" in page
    assert re.search(r"Fits [^.]*45(\.0)? GiB", page)
    assert re.findall(r">DDP</td>", page)
    assert re.findall(r">(\d+) ◂ chosen</td>", page) == ["3"]
    assert "src=" not in page
    assert "<link" not in page
    assert page.count(CARRIED) == 1


def test_a_long_table_is_thinned_with_the_chosen_point_in_it(data):
    page = standalone.frontier_page(FrontierData.of(long_exploration(1501), "long"), View(point=1000))
    assert "Every 4th of 1,501 is listed." in page
    assert ">1,001 ◂ chosen</td>" in page


@pytest.mark.slow
def test_a_notebook_needs_nothing_that_serves_pages():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tensoropt_app.standalone; "
        "sys.exit(not {'dash', 'flask', 'plotly'}.isdisjoint(sys.modules))"
    )
    folder = str(Path(sys.modules["tensoropt_app"].__path__[0]).parent)
    assert subprocess.run([sys.executable, "-c", code, folder], check=False).returncode == 0
