"""The event scheduler against its slow twin: schedules worked out by hand, and what none may break."""

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.placement.flat import joined as rows
from tensoropt.simulate.timeline import by_predecessor, joined, take_place
from tests import naive
from tests.naive import Schedule, Task


def schedule(tasks: list[Task], slower: float = 0.0) -> Schedule:
    """The twin's schedule, which the compiled one equals."""
    found = naive.schedule(tasks, slower)
    names = sorted({name for task in tasks for name in (*task.resources, *task.ends)})
    pairs = np.array([(j, i) for i, task in enumerate(tasks) for j in task.after], np.int64).reshape(-1, 2)
    columns = (
        np.array([task.duration_s for task in tasks], float),
        *by_predecessor(*pairs.T.copy(), len(tasks)),
        np.arange(len(tasks)),
        *rows([names.index(r) for r in task.resources] for task in tasks),
        *rows([names.index(end) for end in task.ends] for task in tasks),
        np.array([-1 if t.ends or not t.resources else names.index(t.resources[0]) for t in tasks], np.int64),
    )
    starts, ends, order = take_place(*columns, slower)
    assert (starts.tolist(), ends.tolist(), order.tolist()) == (found.starts, found.ends, found.order)
    return found


def compute(name: str, seconds: float, *after: int, on: str = "device 0") -> Task:
    return Task(name, seconds, (on,), after)


def link(name: str, seconds: float, *after: int, on: str = "link") -> Task:
    return Task(name, seconds, (on,), after)


def test_a_reduction_runs_beside_the_next_operator():
    """a 2 s, b 3 s; a's gradient takes 2.5 s to reduce: all of it beside b."""
    found = schedule([compute("a", 2), link("reduce a", 2.5, 0), compute("b", 3, 0)])
    assert found.spans() == {"a": [0, 2], "reduce a": [2, 4.5], "b": [2, 5]}
    assert found.total_s == 5


def test_two_on_one_link_queue_and_two_on_two_do_not():
    def tasks(other: str) -> list[Task]:
        return [compute("a", 1), link("x", 3, 0), link("y", 2, 0, on=other)]

    assert schedule(tasks("link")).spans() == {"a": [0, 1], "x": [1, 4], "y": [4, 6]}
    assert schedule(tasks("other link")).spans() == {"a": [0, 1], "x": [1, 4], "y": [1, 3]}


def test_a_blocking_collective_holds_device_and_link():
    """It waits for the link, and the operator behind it waits with it."""
    blocking = Task("gather", 1, ("device 0", "link"), (0,))
    found = schedule([compute("a", 1), link("reduce", 5, 0), blocking, compute("b", 1, 0, 2)]).spans()
    assert found["gather"] == [6, 7]
    assert found["b"] == [7, 8]


def test_tasks_that_wait_for_each_other_do_not_take_place():
    assert schedule([compute("a", 1, 1), compute("b", 1, 0), compute("c", 1)]).order == [2]


RESOURCES = ("device 0", "device 1", "link")


@st.composite
def task_lists(draw):
    tasks = []
    for i in range(draw(st.integers(1, 12))):
        ends = draw(st.sets(st.sampled_from(RESOURCES[:2]))) if draw(st.booleans()) else ()
        work = (draw(st.sampled_from(RESOURCES[:2])), *draw(st.sets(st.just("link"))))
        tasks.append(
            Task(
                f"t{i}",
                draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])),
                ("link",) if ends else work if draw(st.booleans()) else (),
                tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
                tuple(sorted(ends)),
            )
        )
    return tasks


@given(task_lists(), st.sampled_from([0.0, 0.0, 0.25, float("inf")]))
def test_no_schedule_breaks_a_rule(tasks, slower):
    found = schedule(tasks, slower)
    for resource in RESOURCES:
        on_resource = [i for i in found.order if resource in tasks[i].resources]
        assert all(found.ends[a] <= found.starts[b] for a, b in itertools.pairwise(on_resource))
    assert all(found.ends[j] <= found.starts[i] for i, task in enumerate(tasks) for j in task.after)
    # No schedule is shorter than the longest chain of predecessors.
    chains = nx.DiGraph()
    edges = ((j, i, task.duration_s) for i, task in enumerate(tasks) for j in (-1, *task.after))
    chains.add_weighted_edges_from(edges)
    assert nx.dag_longest_path_length(chains) <= found.total_s * (1 + 1e-12)
    # A message blocks the work at two ends at most, half of its seconds each.
    most = sum(t.duration_s * (2 if slower and t.ends else 1) for t in tasks)
    assert found.total_s <= most * (1 + 1e-12)
    assert found.total_s >= max(sum(t.duration_s for t in tasks if r in t.resources) for r in RESOURCES)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8))
def test_joined_spans_cover_the_same_points(pairs):
    given_spans = [(start, start + length) for start, length in pairs]
    found = joined(given_spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    for point in range(60):
        at = point / 2 + 0.25
        assert any(a < at < b for a, b in found) == any(a < at < b for a, b in given_spans)


def message(name: str, seconds: float, *after: int) -> Task:
    return Task(name, seconds, ("link",), after, ("device 0", "device 1"))


@pytest.mark.parametrize(("slower", "work", "extra"), [
    (0.0, 3, 0.0), (0.25, 3, 0.2), (float("inf"), 3, 1.0), (0.25, 0.5, 0.125),
])  # fmt: skip
def test_work_is_slower_beside_a_message_by_hand(slower, work, extra):
    """An end of a message of 2 s counts 1 s of the work beside it: a quarter slower, 0.8 s of work are done
    in it."""
    found = schedule([compute("a", 1), message("m", 2, 0), compute("b", work, 0)], slower)
    assert found.spans()["b"] == [1, pytest.approx(1 + work + extra)]


def test_what_is_over_slows_nothing_down():
    """The device waits for the message, and works when it is there."""
    found = schedule([compute("a", 1), message("m", 2, 0), compute("b", 3, 1)], slower=0.25)
    assert found.spans()["b"] == [3, 6]
