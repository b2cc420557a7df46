"""The timeline of a step, drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from contrast_app import contrast, lab, linear
from tensoropt_app.figures.timeline import (
    timeline_figure,
    timeline_height,
)
from tensoropt_app.views.plan import Bars
from tensoropt_app.views.units import Unit, Units

from tensoropt.simulate.recording import TimelineEvent

UNITS = Units(Unit("GiB", 2.0**30), Unit("ms", 1e-3))
PREDICTED = [TimelineEvent("forward a", "compute", 0.0, 0.001, "forward", "a")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_entries_of_a_legend_differ(scheme):
    """Every phase at once, known or not: no two entries look alike."""
    phases = ["forward", "backward", "again", "optimizer", "send", "send gradient", "send forward", "a", "b",
              "send backward", "gathered parameters", "gradients", "communication", "resharding"]  # fmt: skip
    events = [TimelineEvent(phase, "compute", float(i), 1.0, phase, "") for i, phase in enumerate(phases)]
    figure = timeline_figure(events, UNITS, scheme)
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(events)
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
