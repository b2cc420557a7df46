"""The event simulation: schedules worked out by hand, and what no schedule may break."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import PlanError
from tensoropt.simulate.timeline import Task, joined, length_s, schedule


def compute(name: str, seconds: float, *after: int, on: str = "device 0", **held) -> Task:
    return Task(name=name, duration_s=seconds, resources=(on,), after=after, **held)


def link(name: str, seconds: float, *after: int, on: str = "link") -> Task:
    return Task(name=name, duration_s=seconds, resources=(on,), after=after)


def spans(timeline) -> dict[str, tuple[float, float]]:
    return {e.task.name: (e.start_s, e.end_s) for e in timeline.events}


def test_a_reduction_runs_beside_the_next_operator():
    """a 2 s, b 3 s; a's gradient takes 2.5 s to reduce: all of it beside b."""
    timeline = schedule([compute("a", 2), link("reduce a", 2.5, 0), compute("b", 3, 0)])
    assert spans(timeline) == {"a": (0, 2), "reduce a": (2, 4.5), "b": (2, 5)}
    assert timeline.total_s == 5


def test_what_sticks_out_is_exposed():
    """The reduction takes 4 s: 3 beside b, 1 exposed before the optimizer."""
    tasks = [compute("a", 2), link("reduce", 4, 0), compute("b", 3, 0), compute("step", 1, 1, 2)]
    timeline = schedule(tasks)
    assert spans(timeline)["step"] == (6, 7)
    assert timeline.busy(["device 0"]) == ((0, 5), (6, 7))
    assert timeline.busy(["device 0", "link"]) == ((0, 7),)


def test_two_on_one_link_queue_and_two_on_two_do_not():
    def tasks(other: str) -> list[Task]:
        return [compute("a", 1), link("x", 3, 0), link("y", 2, 0, on=other)]

    assert spans(schedule(tasks("link"))) == {"a": (0, 1), "x": (1, 4), "y": (4, 6)}
    assert spans(schedule(tasks("other link"))) == {"a": (0, 1), "x": (1, 4), "y": (1, 3)}


def test_a_blocking_collective_holds_device_and_link():
    """It waits for the link, and the operator behind it waits with it."""
    blocking = Task(name="gather", duration_s=1, resources=("device 0", "link"), after=(0,))
    timeline = schedule([compute("a", 1), link("reduce", 5, 0), blocking, compute("b", 1, 0, 2)])
    assert spans(timeline)["gather"] == (6, 7)
    assert spans(timeline)["b"] == (7, 8)


def test_micro_batches_on_three_devices():
    """A pipeline of three stages, 1 s each, half a second per transfer, two micro-batches.

    Stage k starts micro-batch 0 at 1.5 k; the second follows 1 s later, and its transfers find free links.
    """
    tasks: list[Task] = []
    for micro in range(2):
        for stage in range(3):
            before = [len(tasks) - 1] if stage else []
            if micro:
                before.append(5 * (micro - 1) + 2 * stage)
            tasks.append(compute(f"{micro}{stage}", 1, *before, on=f"device {stage}"))
            if stage < 2:
                link_name = f"link {stage}-{stage + 1}"
                tasks.append(link(f"{micro}{stage}>", 0.5, len(tasks) - 1, on=link_name))
    found = spans(schedule(tasks))
    assert [found[f"0{s}"] for s in range(3)] == [(0, 1), (1.5, 2.5), (3, 4)]
    assert [found[f"1{s}"] for s in range(3)] == [(1, 2), (2.5, 3.5), (4, 5)]
    assert found["11>"] == (3.5, 4.0)
    assert schedule(tasks).total_s == 5


def test_memory_of_a_placed_chain():
    """device 0 makes 8 bytes and sends them; both ends hold them during the transfer."""
    sent = Task(
        name="send",
        duration_s=1,
        resources=("link",),
        after=(0,),
        allocates=(("device 1", "kept", 8),),
        frees=(("device 0", "kept", 8),),
    )
    tasks = [
        compute("a", 2, allocates=(("device 0", "kept", 8), ("device 0", "transient", 3)),
                frees=(("device 0", "transient", 3),)),
        sent,
        compute("b", 2, 1, on="device 1", allocates=(("device 1", "transient", 4),),
                frees=(("device 1", "transient", 4), ("device 1", "kept", 8))),
    ]  # fmt: skip
    timeline = schedule(tasks, initial=(("device 0", "parameters", 10),))
    assert timeline.memory("device 0") == (
        (0.0, {"parameters": 10}),
        (0.0, {"parameters": 10, "kept": 8, "transient": 3}),
        (2.0, {"parameters": 10, "kept": 8, "transient": 0}),
        (3.0, {"parameters": 10, "kept": 0, "transient": 0}),
    )
    assert timeline.peak("device 1") == (3.0, {"kept": 8, "transient": 4})


def test_memory_is_given_back_before_it_is_taken():
    first = compute("a", 1, allocates=(("device 0", "t", 5),), frees=(("device 0", "t", 5),))
    second = compute("b", 1, 0, allocates=(("device 0", "t", 7),), frees=(("device 0", "t", 7),))
    assert sum(schedule([first, second]).peak("device 0")[1].values()) == 7


def test_a_moment_without_length_has_a_peak_too():
    held = (("device 0", "t", 5),)
    timeline = schedule([compute("a", 0, allocates=held, frees=held)])
    assert timeline.peak("device 0") == (0.0, {"t": 5})
    assert timeline.memory("device 0")[-1][1] == {"t": 0}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([compute("a", 1, 1), compute("b", 1, 0)], "wait for each other.*a, b"),
        ([compute("a", -1)], "task a takes -1 s"),
        ([compute("a", float("nan"))], "task a takes nan s"),
        ([compute("a", 1, 7)], "task a comes after task 7"),
    ],
)
def test_impossible_tasks_are_named(tasks, words):
    with pytest.raises(PlanError, match=words):
        schedule(tasks)


RESOURCES = ("device 0", "device 1", "link")


@st.composite
def task_lists(draw):
    tasks = []
    for i in range(draw(st.integers(1, 12))):
        device = draw(st.sampled_from(RESOURCES[:2]))
        size = draw(st.integers(0, 9))
        tasks.append(
            Task(
                name=f"t{i}",
                duration_s=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])),
                resources=tuple(sorted(draw(st.sets(st.sampled_from(RESOURCES), max_size=2)))),
                after=tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
                allocates=((device, "transient", size),),
                frees=((device, "transient", size),),
            )
        )
    return tasks


@given(task_lists())
def test_no_schedule_breaks_a_rule(tasks):
    timeline = schedule(tasks)
    started = [timeline.events[i] for i in timeline.order]
    for resource in RESOURCES:
        on_resource = [event for event in started if resource in event.task.resources]
        for a, b in itertools.pairwise(on_resource):
            assert a.end_s <= b.start_s
    for event in timeline.events:
        assert all(timeline.events[i].end_s <= event.start_s for i in event.task.after)
    total = timeline.total_s
    # No schedule is shorter than the longest chain of predecessors.
    edges = ((j, i, task.duration_s) for i, task in enumerate(tasks) for j in (-1, *task.after))
    chains = nx.DiGraph()
    chains.add_weighted_edges_from(edges)
    assert nx.dag_longest_path_length(chains) <= total * (1 + 1e-12)
    assert total <= sum(t.duration_s for t in tasks)
    busiest = max(sum(t.duration_s for t in tasks if r in t.resources) for r in RESOURCES)
    assert total >= busiest
    for device in RESOURCES[:2]:
        curve = timeline.memory(device)
        assert all(size >= 0 for _, kinds in curve for size in kinds.values())
        assert sum(curve[-1][1].values()) == 0
        assert [t for t, _ in curve] == sorted(t for t, _ in curve)
        alive: dict[str, float] = {}
        steps = timeline.steps(device)
        assert len(steps) == len(curve)
        for changes, (_, kinds) in zip(steps, curve, strict=True):
            for kind, size in changes:
                alive[kind] = alive.get(kind, 0.0) + size
            assert alive == kinds
        assert length_s(timeline.busy([device])) <= total


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8))
def test_joined_spans_cover_the_same_points(pairs):
    given_spans = [(start, start + length) for start, length in pairs]
    found = joined(given_spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    for point in range(60):
        at = point / 2 + 0.25
        assert any(a < at < b for a, b in found) == any(a < at < b for a, b in given_spans)


def message(name: str, seconds: float, *after: int) -> Task:
    return Task(
        name=name, duration_s=seconds, resources=("link",), after=after, ends=("device 0", "device 1")
    )


@pytest.mark.parametrize(("slower", "extra"), [(0.0, 0.0), (0.25, 0.2), (float("inf"), 1.0)])
def test_work_is_slower_beside_a_message_by_hand(slower: float, extra: float) -> None:
    """An end of a message of 2 s counts 1 s of the 3 s beside it: a quarter slower, 0.8 s of work are done in
    it."""
    timeline = schedule([compute("a", 1), message("m", 2, 0), compute("b", 3, 0)], slower=slower)
    assert spans(timeline)["b"] == (1, pytest.approx(4 + extra))
    assert timeline.busy(["device 0"]) == ((0, pytest.approx(4 + extra)),)


def test_what_is_over_slows_nothing_down() -> None:
    """The device waits for the message, and works when it is there."""
    timeline = schedule([compute("a", 1), message("m", 2, 0), compute("b", 3, 1)], slower=0.25)
    assert spans(timeline)["b"] == (3, 6)
