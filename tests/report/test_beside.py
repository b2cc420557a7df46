"""A prediction with what was observed: windows, scales and figures by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import load_exploration
from tensoropt.exploration.verified import Verified
from tensoropt.observed.files import read_observation
from tensoropt.observed.observation import Observation, ObservedEvent, ObservedMemory, StepMark
from tensoropt.plan.point import Point
from tensoropt.report.beside import PEAK, WHOLE, alignments, beside, thinned
from tensoropt.report.detail import detail
from tensoropt.report.step_parts import Detail
from tensoropt.simulate.recording import MemoryAt
from tests.observed.test_files import SNAPSHOT
from tests.plan.explorations import small_exploration

STEP = Point.of(time_s=10.0, compute_s=7.0, exposed_s=3.0, hidden_s=1.0, idle_s=0.0, space=0, collectives=())
CURVE = (MemoryAt(0.0, 10, 0, 0, 0, 0), MemoryAt(4.0, 10, 0, 0, 90, 0), MemoryAt(8.0, 10, 0, 0, 0, 0))
DETAIL = Detail(0, (), (), (), CURVE, STEP, "", {})
MEMORY = ObservedMemory("cuda:0", np.array([0.0, 20.0, 22.0, 30.0, 35.0]), np.array([5.0, 20, 50, 40, 5]))


def event(category, start_s, duration_s, lane="device 0 stream 7"):
    return ObservedEvent(category, lane, category, start_s, duration_s)


def observed(**changes) -> Observation:
    found = Observation(
        "profiler trace",
        (MEMORY,),
        (event("compute", 20.0, 3.0), event("communication", 21.0, 4.0, "device 0 stream 9")),
        (StepMark("ProfilerStep#1", 10.0, 20.0), StepMark("ProfilerStep#2", 20.0, 25.0)),
    )
    return replace(found, **changes)


def of(observation, align=None):
    return beside(small_exploration(), DETAIL, observation, align)


def test_a_marked_step_is_scaled_to_the_predicted_one():
    found = of(observed())
    assert (found.align, found.scale) == ("ProfilerStep#2", 2.0)
    assert found.alignments == ("ProfilerStep#2", "ProfilerStep#1", PEAK, WHOLE)
    assert found.times_s.tolist() == [0.0, 4.0]
    assert found.bytes.tolist() == [20.0, 50.0]
    assert [(e.lane, e.phase, e.start_s, e.duration_s) for e in found.events] == [
        ("device 0 stream 7", "compute", 0.0, 6.0),
        ("device 0 stream 9", "communication", 2.0, 8.0),
    ]


def test_figures_are_those_of_the_step_in_its_own_seconds():
    figures = {f.name: f for f in of(observed()).figures}
    assert figures["peak memory"].predicted == 100
    assert figures["peak memory"].measured == 50
    assert figures["peak memory"].ratio == 0.5
    measured = {name: figure.measured for name, figure in figures.items()}
    # The collective takes 4 s, of which 2 lie beside the kernel.
    assert measured == {
        "peak memory": 50, "step": 5.0, "computing": 3.0, "communication, all": 4.0,
        "communication, exposed": 2.0,
    }  # fmt: skip
    assert [f.predicted for f in figures.values()] == [100, 10.0, 7.0, 4.0, 3.0]


def test_another_step_begins_with_what_is_there_by_then():
    found = of(observed(), "ProfilerStep#1")
    assert (found.times_s.tolist(), found.bytes.tolist()) == ([0.0], [5.0])
    assert found.events == ()
    assert next(f for f in found.figures if f.name == "computing").measured is None


def test_by_the_peaks_both_are_at_one_moment_and_seconds_stay_seconds():
    found = of(observed(steps=()))
    assert (found.align, found.scale) == (PEAK, 1.0)
    # The predicted peak begins at 4 s, the observed one at 22 s.
    assert found.times_s[int(found.bytes.argmax())] == 4.0
    assert found.times_s.tolist() == [0.0, 2.0, 4.0]
    assert next(f for f in found.figures if f.name == "step").measured is None


def test_the_whole_recording_as_one_step():
    found = of(observed(), WHOLE)
    assert found.scale == pytest.approx(10.0 / 35.0)
    assert found.times_s[-1] == pytest.approx(10.0)
    assert len(found.bytes) == 5


def test_events_without_a_clock_fill_the_step():
    counted = observed(steps=(), events=(), clocked=False)
    assert alignments(counted) == (WHOLE, PEAK)
    assert of(counted).times_s.tolist() == pytest.approx([0, 200 / 35, 220 / 35, 300 / 35, 10])
    assert of(counted, PEAK).times_s[int(of(counted, PEAK).bytes.argmax())] == pytest.approx(4.0)


def test_of_several_devices_one_is_shown_and_it_is_said():
    other = ObservedMemory("cuda:1", np.array([0.0]), np.array([7.0]))
    more = [event("compute", 20.0, 0.5, "device 1 stream 7")]
    found = of(observed(memory=(other, MEMORY), events=(*observed().events, *more)))
    assert found.device == "cuda:0"
    assert {e.lane for e in found.events} == {"device 0 stream 7", "device 0 stream 9"}
    assert any("of 2 devices the fullest is shown, cuda:0" in note for note in found.notes)


def test_an_alignment_that_the_file_lacks_is_refused():
    with pytest.raises(
        TensorOptError, match="cannot be aligned by 'ProfilerStep#9'; choose from ProfilerStep#2"
    ):
        of(observed(), "ProfilerStep#9")


def test_results_of_verify_are_taken_for_their_own_point_only():
    exploration = small_exploration()
    point = exploration.all_points[0]
    space = exploration.spaces[point.space]
    figures = point.tensor_bytes, point.time_s, 60.0, 12.5, 0.0, 0.0
    one = Verified(exploration.keys[0], space.mesh.label, space.micro_batches, *figures, True, "2 CPU ranks")
    found = of(Observation("results of verify", verified=(one,)))
    assert [f.measured for f in found.figures] == [60.0, 12.5, None, None, None]
    assert "checked on 2 CPU ranks" in found.notes
    assert "12.5 s" in "\n".join(found.lines())
    with pytest.raises(TensorOptError, match="none of the 1 verified plans in the file is point 1"):
        of(Observation("results of verify", verified=(replace(one, key="other"),)))


def test_a_thinned_curve_keeps_its_extremes():
    values = np.random.default_rng(0).normal(size=50_000)
    times, kept = thinned(np.arange(50_000.0), values, 900)
    assert len(times) <= 900
    assert (kept.max(), kept.min(), times[0]) == (values.max(), values.min(), 0.0)
    assert thinned(np.arange(3.0), values[:3])[1].tolist() == values[:3].tolist()


def test_a_result_as_plain_data(tmp_path):
    (tmp_path / "a.pickle").write_bytes(SNAPSHOT)
    shipped = Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100"
    saved = load_exploration(shipped)
    found = beside(saved, detail(saved, 0), read_observation(tmp_path / "a.pickle"))
    data = found.to_dict()
    assert data["figures"][0]["measured"] == 512
    assert data["curve"][1][-1] == 512
    assert found.lines()[0] == "beside a memory snapshot, aligned by the peaks:"
