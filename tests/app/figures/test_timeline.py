"""What was measured, drawn over what is predicted."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from contrast_app import contrast, lab, linear
from tensoropt_app.figures.timeline import (
    below_timeline,
    memory_figure,
    over_curve,
    timeline_figure,
    timeline_height,
)
from tensoropt_app.views.plan import Bars
from tensoropt_app.views.units import Unit, Units

from tensoropt.report.beside import Beside
from tensoropt.simulate.recording import TimelineEvent

UNITS = Units(Unit("GiB", 2.0**30), Unit("ms", 1e-3))
EVENTS = (
    TimelineEvent("gemm", "device 0 stream 7", 0.0, 0.004, "compute", ""),
    TimelineEvent("ncclKernel", "device 0 stream 20", 0.001, 0.002, "communication", ""),
)
TOLD = Beside("profiler trace", "whole", ("whole",), 2.0, np.array([0.0, 0.01]), np.array([2.0**30, 2.0**31]),
              "cuda:0", EVENTS, (), ())  # fmt: skip
PREDICTED = [TimelineEvent("forward a", "compute", 0.0, 0.001, "forward", "a")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_line_lies_over_the_stack_and_not_in_it(scheme):
    figure = memory_figure([0.0, 0.001], {"parameters": [1.0, 2.0]}, 1e12, UNITS, scheme)
    found = over_curve(figure, TOLD, UNITS, scheme)
    line = found["data"][-1]
    assert line["name"] == "measured, cuda:0"
    assert (line["x"], line["y"]) == ([0.0, 10.0], [1.0, 2.0])
    assert "stackgroup" not in line
    # First in the figure stays the predicted one: clicks are read off it.
    assert found["data"][:-1] == figure["data"]
    json.dumps(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_streams_are_rows_below_the_predicted_ones(scheme):
    figure = timeline_figure(PREDICTED, UNITS, scheme)
    found = below_timeline(figure, TOLD, UNITS, scheme)
    rows = found["layout"]["yaxis"]["categoryarray"]
    assert rows == ["compute", "measured device 0 stream 20", "measured device 0 stream 7"]
    assert [t["name"] for t in found["data"]] == ["forward", "measured compute", "measured communication"]
    # Seconds are told as they were measured, and drawn in the step's time.
    assert found["data"][1]["x"] == [4.0]
    assert found["data"][1]["customdata"] == [["", "2.00 ms", "0 ms"]]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["compute"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_entries_of_a_legend_differ(scheme):
    """Every phase at once, known or not, with what was measured: no two entries look alike."""
    phases = ["forward", "backward", "again", "optimizer", "send", "send gradient", "send forward", "a", "b",
              "send backward", "gathered parameters", "gradients", "communication", "resharding"]  # fmt: skip
    events = [TimelineEvent(phase, "compute", float(i), 1.0, phase, "") for i, phase in enumerate(phases)]
    copied = TimelineEvent("memcpy", "device 0 stream 9", 0.0, 0.001, "copy", "")
    told = replace(TOLD, events=(*EVENTS, copied))
    figure = below_timeline(timeline_figure(events, UNITS, scheme), told, UNITS, scheme)
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(events) + 3
    looks = [(t["marker"]["color"], t["marker"].get("pattern", {}).get("shape", "")) for t in figure["data"]]
    assert len({trace["name"] for trace in figure["data"]}) == len(looks)
    for (a, first), (b, second) in itertools.combinations(looks, 2):
        assert first != second or np.linalg.norm(lab(linear(a)) - lab(linear(b))) > 10
    # Names on bars have the colour of what lies behind the plot.
    for colour, _ in looks:
        assert contrast(colour, figure["layout"]["paper_bgcolor"]) >= 3.0


def test_bars_have_the_names_of_modules_and_room_for_them():
    said = Bars(("h.0.mlp.c_fc",), {"a": "linear h.0.mlp.c_fc<br>of linear mlp.c_fc (12 ×), 30 %"})
    figure = timeline_figure(PREDICTED, UNITS, "light", said)
    (trace,) = figure["data"]
    assert trace["text"] == ["h.0.mlp.c_fc"]
    assert trace["customdata"] == [["a", "1.00 ms", "0 ms", said.words["a"], "forward"]]
    lanes = [TimelineEvent("a", f"link {i}", 0.0, 0.001, "send", "") for i in range(40)]
    few, many = (timeline_height(timeline_figure(of, UNITS, "light")) for of in (PREDICTED, lanes))
    assert few == 270 < 40 * 17 < many


def test_nothing_measured_changes_nothing():
    nothing = replace(TOLD, times_s=np.zeros(0), bytes=np.zeros(0), events=())
    figure = timeline_figure(PREDICTED, UNITS, "light")
    assert over_curve(figure, nothing, UNITS, "light") is figure
    assert below_timeline(figure, nothing, UNITS, "light") is figure
