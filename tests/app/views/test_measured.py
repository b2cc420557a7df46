"""Predicted beside measured, in rows and words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tensoropt_app.views.plan import MOST_EVENTS, align_options, figure_rows, left_words
from tensoropt_app.views.units import Unit, Units

from tensoropt.report.beside import Beside, MeasuredFigure
from tensoropt.simulate.recording import TimelineEvent

UNITS = Units(Unit("GiB", 2.0**30), Unit("ms", 1e-3))
EVENT = TimelineEvent("kernel", "device 0 stream 7", 0.0, 0.002, "compute", "")
TOLD = Beside(
    "profiler trace", "ProfilerStep#3", ("ProfilerStep#3", "peak", "whole"), 0.5, np.array([0.0, 0.1]),
    np.array([2.0**30, 2.0**31]), "cuda:0", (EVENT,),
    (MeasuredFigure("peak memory", "bytes", 2.0**30, 1.1 * 2**30), MeasuredFigure("step", "s", 0.1, 0.05),
     MeasuredFigure("computing", "s", 0.1, None), MeasuredFigure("communication, all", "s", 0.0, 0.01)), (),
)  # fmt: skip


def test_figures_have_a_ratio_and_its_change_where_both_are_known():
    assert figure_rows(TOLD, UNITS) == [
        ["peak memory", "1.00 GiB", "1.10 GiB", "1.10 (+10 %)"],
        ["step", "100 ms", "50.0 ms", "0.50 (−50 %, far off)"],
        ["computing", "100 ms", "not told", ""],
        ["communication, all", "0 ms", "10.0 ms", ""],
    ]


def test_ways_to_lay_it_over_the_step_have_names():
    assert [o["label"] for o in align_options(TOLD)] == [
        "step ProfilerStep#3", "by the peaks", "the whole recording as one step",
    ]  # fmt: skip


def test_what_is_not_drawn_is_said():
    assert left_words(TOLD) == ""
    assert (
        left_words(replace(TOLD, events=(EVENT,) * (MOST_EVENTS + 7)))
        == "the 7 shortest events are not drawn"
    )
