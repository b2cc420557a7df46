"""Why a point costs what it costs, told by an exploration that comes from disk."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict

import pytest

import tensoropt
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import load_exploration
from tensoropt.plan.kinds import PIPELINED, PLACED
from tensoropt.plan.spent import is_of_group
from tensoropt.report.detail import detail, recorded_of
from tensoropt.report.explain import why_lines
from tensoropt.report.faster import what_is_faster
from tensoropt.report.owners import point_owners
from tensoropt.report.rebuilt import rebuilt
from tensoropt.report.step_parts import COMPUTING
from tensoropt.simulate.recording import COMPUTE
from tensoropt.units import format_seconds
from tests.costs.models import gates
from tests.plan.explorations import small_exploration


@pytest.fixture(scope="package")
def loaded(gpus):
    return gpus.found


@pytest.mark.slow
def test_the_timeline_gives_the_very_figures_of_the_frontier(loaded, details):
    """The walk over all points at once and the event simulation of one agree."""
    for index, told in details:
        plan = rebuilt(loaded, index, recorded_of(loaded))
        point, metrics = told.step, plan.plan.evaluated(plan.costs()).metrics
        assert point == loaded.points[index]
        assert metrics.time_s[0] == pytest.approx(point.time_s, rel=1e-12)
        assert metrics.compute_s[0] == pytest.approx(point.compute_s, rel=1e-12)
        assert metrics.exposed_s[0] == pytest.approx(point.exposed_s, rel=1e-9, abs=1e-15)
        assert metrics.hidden_s[0] == pytest.approx(point.hidden_s, rel=1e-9, abs=1e-15)
        assert metrics.idle_s[0] == pytest.approx(point.idle_s, rel=1e-9, abs=1e-15)
        assert metrics.host_s[0] == point.host_s > 0
        assert point.compute_s + point.exposed_s + point.idle_s == pytest.approx(point.time_s)
        assert point.host_bound == (point.host_s > point.compute_s + point.exposed_s)
        assert told.peak.total == point.tensor_bytes == point.memory_bytes - sum(point.terms.values())
        assert tuple(vars(told.peak).values())[1:] == point.memory


def test_lanes_are_never_double_booked(details):
    for _, told in details:
        lanes = defaultdict(list)
        for event in told.timeline:
            assert event.duration_s > 0
            lanes[event.lane].append((event.start_s, event.start_s + event.duration_s))
        for spans in lanes.values():
            spans.sort()
            assert all(a[1] <= b[0] * (1 + 1e-12) for a, b in itertools.pairwise(spans))
        assert sum(end - start for start, end in lanes[COMPUTE]) == pytest.approx(told.step.compute_s)


def test_memory_begins_and_ends_with_what_stays(details):
    for _, told in details:
        first, last = told.memory_curve[0], told.memory_curve[-1]
        assert first.kept == first.transient == last.kept == last.transient == 0
        assert {at.parameters for at in told.memory_curve} == {first.parameters}
        assert all(at.kept >= 0 and at.transient >= 0 for at in told.memory_curve)
        assert [at.time_s for at in told.memory_curve] == sorted(at.time_s for at in told.memory_curve)


def test_rows_add_up_to_the_point(loaded, details):
    for index, told in details:
        parameters, gradients, state, *_ = loaded.points[index].memory
        assert sum(r.parameters_bytes for r in told.operators) == parameters
        assert sum(r.gradients_bytes for r in told.operators) == gradients
        assert sum(r.state_bytes for r in told.operators) == state
        assert {r.source for r in told.operators} == {"data sheet"}
        assert sum(len(r.members) for r in told.operators) == loaded.report["operators"]
        # a parameter's copy held over the step lies as its reader wants it; its gradient does not go back so
    fastest = loaded.spaces[loaded.points[details[0][0]].space]
    assert set(details[0][1].operators[0].configuration) == set(fastest.mesh.names)


def test_a_trace_that_chrome_opens(details):
    _, told = details[1]
    trace = json.loads(json.dumps(told.trace()))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(told.timeline)
    assert max(e["ts"] + e["dur"] for e in slices) <= told.step.time_s * 1e6 * (1 + 1e-9)
    # The step is host-bound, so that its last moments may be the host's.
    assert max(e["ts"] + e["dur"] for e in slices) >= 0.9 * told.step.time_s * 1e6
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[0] == "compute"
    assert {names[e["tid"]] for e in slices} == {e.lane for e in told.timeline}
    counters = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(sum(c.values()) for c in counters) == told.peak.total
    assert trace["otherData"]["overlap"] == told.overlap


def test_words_say_what_dominates(loaded, details):
    for index, told in details:
        faster = what_is_faster(loaded, index)
        text = "\n".join(why_lines(told, point_owners(loaded, index), faster))
        assert "compute" in told.headline()
        assert "Its tensors peak at" in told.headline()
        assert told.overlap in text
        assert f"memory at {format_seconds(told.peak.time_s)}" in text
        assert all(one.title in text and one.time_s < told.step.time_s for one in faster)
        assert [one.time_s for one in faster] == sorted(one.time_s for one in faster)
        assert json.loads(json.dumps(told.to_dict()))["point"] == told.index + 1


def test_without_saved_costs_it_says_so(tmp_path):
    small_exploration().save(tmp_path)
    with pytest.raises(TensorOptError, match="saved without its operator graph and costs"):
        detail(load_exploration(tmp_path), 0)


def test_saved_costs_are_checked(loaded, tmp_path):
    loaded.save(tmp_path)
    file = tmp_path / "recorded.json.gz"
    whole = file.read_bytes()
    loaded.save(tmp_path)
    assert file.read_bytes() == whole
    file.write_bytes(whole[:100])
    with pytest.raises(TensorOptError, match=r"recorded.json.gz' is incomplete; explore again"):
        detail(load_exploration(tmp_path), 0)
    file.unlink()
    with pytest.raises(TensorOptError, match=r"has lost its recorded.json.gz"):
        load_exploration(tmp_path)


@pytest.mark.slow
def test_recosting_needs_no_model(gpus, loaded, tmp_path):
    same, again = tensoropt.api.recost(loaded, store=gpus.store)
    assert [p.time_s for p in same.points] == [p.time_s for p in loaded.points]
    assert [r.time_s for r in again] == pytest.approx([p.time_s for p in loaded.points])
    assert [r.memory_bytes for r in again] == [p.memory_bytes for p in loaded.points]
    assert same.model == loaded.model
    other, again = tensoropt.api.recost(loaded, cluster="baechi-paper", store=gpus.store)
    assert all(p.host_bound or r.time_s != p.time_s for r, p in zip(again, loaded.points, strict=True))
    assert any(r.time_s != p.time_s for r, p in zip(again, loaded.points, strict=True))
    assert other.points[-1].time_s <= min(r.time_s for r in again) * (1 + 0.05)
    other.save(tmp_path)
    assert detail(load_exploration(tmp_path), 0).step.time_s == pytest.approx(other.points[0].time_s)


def test_strategies_without_a_place_on_the_new_cluster_are_named(gpus):
    model, args, kwargs = gates()
    found = tensoropt.explore(
        model, args, kwargs, cluster="rtx-4090", micro_batches=(1,), epsilon=0.05, placements="never",
        pipelines="never", store=gpus.store,
    )  # fmt: skip
    _, again = tensoropt.api.recost(found, cluster="dgx-a100[2]", store=gpus.store)
    assert all(r.time_s is None for r in again)
    assert {r.reason.split(" among")[0].split("no ")[1] for r in again} <= {"mesh 4", "mesh 2x2"}


def test_operators_and_what_is_beside_them_add_up_to_the_headline(loaded, details):
    for index, told in details:
        point = loaded.points[index]
        operators, beside = told.shares()
        assert len(operators) == len(told.operators)
        every = (*operators, *beside)
        assert sum(s.compute_s for s in every) == pytest.approx(point.compute_s, rel=1e-9)
        assert sum(s.communication_s for s in every) == pytest.approx(point.communication_s, rel=1e-9)
        assert sum(s.memory_bytes for s in every) == pytest.approx(sum(point.memory), rel=1e-12)
    assert any(share.compute_s for _, told in details for share in told.shares()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PIPELINED, PLACED], ids=lambda kind: kind.name)
def test_plans_of_stages_are_shown_operator_by_operator(staged, kind):
    """All parts add up to the step of the busiest place, and each place's work is that of its lane."""
    found = staged[kind.name]
    indices = [index for index, point in enumerate(found.points) if point.kind is kind]
    assert indices
    for index in indices:
        told, point = detail(found, index), found.points[index]
        assert sum(part.seconds for part in told.parts) == pytest.approx(point.time_s)
        computing = [part for part in told.parts if part.key == COMPUTING]
        assert sum(part.seconds for part in computing) == pytest.approx(point.compute_s)
        assert told.peak.total == pytest.approx(point.memory_bytes - sum(point.terms.values()), rel=1e-9)
        assert any(place.idle_s == pytest.approx(point.idle_s, abs=1e-12) for place in told.places)
        assert all(event.duration_s > 1e-12 for event in told.timeline if event.lane.startswith("link"))
        rows = {row.group: row for row in told.operators}
        assert len(rows) == len(told.operators)
        assert {*found.plan(index).operators} <= {*rows}
        work, own = Counter(), Counter()
        for event in told.timeline:
            if event.is_computing:
                work[event.lane] += event.duration_s
                if is_of_group(event, rows):
                    own[event.group] += event.duration_s
        # What copies before the first forward, while parameters are gathered, is not in the lane.
        for i, place in enumerate(told.places):
            assert work[f"device {i}"] == pytest.approx(place.compute_s, rel=0.01)
        for row in told.operators:
            assert row.source
            assert row.compute_s <= own[row.group] * (1 + 1e-9)
        ends = [event.start_s + event.duration_s for event in told.timeline]
        hosts: tuple[float, ...] = ()
        if kind is PLACED:  # its lanes are those of devices, which may wait for hosts when they are done
            again = rebuilt(found, index, recorded_of(found))
            hosts = again.plan.evaluated(again.costs()).host_s
        assert max(*ends, *hosts) == pytest.approx(point.time_s)
        assert told.trace()["traceEvents"]


def test_the_parts_of_a_placed_plan_are_what_its_busiest_device_computes(staged):
    """Summed by hand from the tasks that the simulation ran on that device."""
    found = staged[PLACED.name]
    index = next(index for index, point in enumerate(found.points) if point.kind is PLACED)
    again, told = rebuilt(found, index, recorded_of(found)), detail(found, index)
    simulated = again.plan.evaluated(again.costs())
    busiest = max(range(2), key=lambda device: simulated.busy_s[device])
    groups = {op.name: op.group for op in again.plan.strategy.placed_graph.operators}
    seconds = Counter()
    for event in simulated.events:
        if event.lanes[0] == f"device {busiest}":
            group = groups.get(event.group)
            kind = group.anchor.target if group is not None else event.phase
            seconds[kind] += event.duration_s
    linear = sum(part.seconds for part in told.parts if part.title.startswith("linear "))
    assert linear == pytest.approx(seconds["aten.addmm.default"] + seconds["aten.linear.default"])
    optimizer = sum(part.seconds for part in told.parts if part.title == "the optimizer")
    assert optimizer == pytest.approx(seconds["optimizer"])
    assert told.places[0].title in "\n".join(why_lines(told, point_owners(found, index), ()))
