"""Several frontiers as one plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contrast_app import lab, linear
from samples_app import exploration, of_model
from tensoropt_app.figures.palette import DARK, LIGHT, Palette, run_colours, run_style
from tensoropt_app.figures.runs import runs_figure
from tensoropt_app.library import Library
from tensoropt_app.views.runs import AxisOptions, Run, common_units, runs_of

from tests.app.figures.test_palette import BLINDNESS


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, ...]:
    for name, cluster in (("a", "dgx-h100"), ("b", "dgx-v100")):
        of_model(exploration(cluster=cluster), batch=32).save(tmp_path / name)
    return runs_of(Library(tmp_path, ready_made=tmp_path / "none"))


def test_every_run_is_a_trace_and_those_not_shown_are_hidden(runs: tuple[Run, ...]) -> None:
    figure = runs_figure(runs, {"opened-b"}, AxisOptions(), common_units(runs), "light")
    one, other = figure["data"]
    assert (one["visible"], other["visible"]) == (False, True)
    assert one["x"] == [10.0 * (i + 1) for i in range(8)]
    assert one["y"][0] == 800.0
    assert one["line"]["shape"] == "hv"
    assert one["customdata"][3] == [4, ""]
    assert "point %{customdata[0]} of 8" in one["hovertemplate"]
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert figure["layout"]["xaxis"]["title"]["text"] == "memory per device (log scale), GiB"
    linear = runs_figure(runs, {"opened-b"}, AxisOptions(log_x=False), common_units(runs), "light")["layout"]
    assert (linear["xaxis"]["type"], linear["yaxis"]["type"]) == ("linear", "log")
    assert linear["xaxis"]["title"]["text"] == "memory per device, GiB"
    lines = {shape["name"]: shape["visible"] for shape in figure["layout"]["shapes"]}
    assert lines == {"H100-80GB": False, "V100-32GB": True}  # of those that are shown


def test_kinds_of_equal_memory_share_a_line_and_its_words(runs: tuple[Run, ...]) -> None:
    one, other = runs
    alike = replace(other.head, kind="A100-80GB", capacity_bytes=one.head.capacity_bytes)
    both = (one, replace(other, head=alike))
    (line,) = runs_figure(both, {other.key}, AxisOptions(), common_units(both), "light")["layout"]["shapes"]
    assert line["label"]["text"] == "H100-80GB, A100-80GB: 80.0 GiB"
    assert line["name"] == "H100-80GB|A100-80GB"  # as runs.js splits it


def test_axes_change_what_is_drawn(runs: tuple[Run, ...]) -> None:
    axes = AxisOptions(total=True, per_sample=True)
    figure = runs_figure(runs, {"opened-a"}, axes, common_units(runs), "dark")
    assert figure["data"][0]["x"][0] == 80.0
    assert figure["data"][0]["y"][0] == 25.0
    assert figure["layout"]["yaxis"]["title"]["text"] == "time per sample (log scale), ms"
    assert figure["layout"]["shapes"] == []
    rate = runs_figure(runs, {"opened-a"}, AxisOptions(per_second=True), common_units(runs), "dark")
    assert rate["data"][0]["y"][0] == 40.0
    assert rate["layout"]["yaxis"]["title"]["text"] == "throughput (log scale), samples/s"
    assert "samples/s per" not in rate["data"][0]["hovertemplate"]
    assert (
        figure["layout"]["uirevision"]
        != runs_figure(runs, (), AxisOptions(), common_units(runs), "dark")["layout"]["uirevision"]
    )


def test_a_name_is_neither_markup_nor_template(runs: tuple[Run, ...]) -> None:
    bad = replace(runs[0], label="<b>%{x}</b>")
    trace = runs_figure([bad], {bad.key}, AxisOptions(), common_units(runs), "light")["data"][0]
    assert trace["hovertemplate"].startswith("<b>&lt;b&gt;&#37;&#123;x}&lt;/b&gt;</b><br>")


def test_nothing_at_all_can_be_drawn() -> None:
    figure = runs_figure((), (), AxisOptions(total=True, per_sample=True), common_units(()), "light")
    assert figure["data"] == []


def test_the_first_192_styles_differ() -> None:
    assert len({run_style(number) for number in range(192)}) == 192
    assert [run_style(n)[0] for n in range(7)] == [0, 1, 2, 3, 4, 5, 0]
    assert run_style(0)[1:] == ("solid", "circle")
    assert run_style(6)[1:] == ("dash", "square")


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("seen", BLINDNESS)
def test_colours_of_runs_are_told_apart_by_everyone(colours: Palette, seen: str) -> None:
    """As in ``test_palette.py``: 10 is told apart at a glance."""
    found = [lab(BLINDNESS[seen] @ linear(c)) for c in run_colours(colours)]
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert np.linalg.norm(one - other) > 10


def test_the_style_sheet_has_the_same_colours() -> None:
    import re

    import tensoropt_app

    text = (Path(tensoropt_app.__file__).parent / "assets" / "runs.css").read_text()
    light, dark = (re.findall(r"--run-\d: (#[0-9a-f]{6})", part) for part in text.split("[data-scheme")[:2])
    assert tuple(light) == run_colours(LIGHT)
    assert tuple(dark) == run_colours(DARK)
