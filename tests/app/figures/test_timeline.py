"""What was measured, drawn over what is predicted."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tensoropt_app.figures.timeline import below_timeline, memory_figure, over_curve, timeline_figure
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


def test_nothing_measured_changes_nothing():
    nothing = replace(TOLD, times_s=np.zeros(0), bytes=np.zeros(0), events=())
    figure = timeline_figure(PREDICTED, UNITS, "light")
    assert over_curve(figure, nothing, UNITS, "light") is figure
    assert below_timeline(figure, nothing, UNITS, "light") is figure
