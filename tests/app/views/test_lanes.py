"""The rows of a timeline."""

from __future__ import annotations

from tensoropt_app.views.lanes import in_rows

from tensoropt.simulate.recording import TimelineEvent


def event(lane: str, group: str = "") -> TimelineEvent:
    return TimelineEvent("work", lane, 0.0, 1.0, "forward", group)


def test_stages_that_share_a_device_have_a_row_each():
    events = [event("device 0", "stage 0"), event("device 0", "stage 2"), event("device 1", "stage 1")]
    assert [e.lane for e in in_rows(events)] == ["device 0 · stage 0", "device 0 · stage 2", "device 1"]


def test_devices_come_before_links_and_by_their_numbers():
    events = [event("link 0"), event("device 10", "a"), event("device 2", "b"), event("compute")]
    assert [e.lane for e in in_rows(events)] == ["compute", "device 2", "device 10", "link 0"]


def test_operators_of_a_device_stay_in_one_row():
    assert [e.lane for e in in_rows([event("compute", "a"), event("compute", "b")])] == ["compute"] * 2
