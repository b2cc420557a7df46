"""The tasks of a placement's step, against a slow twin that makes them one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.flat import FlatProblem, flat_step, step_s
from tensoropt.placement.problem import PlacedResult, PlacementProblem, repeat_placement
from tests import naive
from tests.planners.placed.placements import random_problem


def shuffled(problem, rng) -> Placement:
    """Random devices, and an order of all operators that no dependence contradicts, in both directions."""
    device = rng.integers(problem.devices.count, size=problem.size).tolist()
    rank = np.arange(problem.size) + rng.integers(3, size=problem.size) * (rng.random() < 0.5)
    for tensor in problem.tensors:
        for reader in tensor.readers:
            rank[reader] = max(rank[reader], rank[tensor.producer] + 1)
    order = sorted(range(problem.size), key=lambda o: (rank[o], o))
    return Placement.in_order(device, problem.devices.count, order)


def scheduled(problem: PlacementProblem, placement: Placement, *, enforced: bool) -> naive.Schedule:
    """The step of a placement from tasks that are made one by one, by name."""
    count, devices = problem.micro_batches, problem.devices
    problem, placement = problem.repeated, repeat_placement(placement, count)
    on, ends = placement.device, np.zeros((devices.count, 6)) if devices.ends is None else devices.ends
    tasks: dict[tuple, list] = {}  # seconds, resources, after, ends

    def add(key: tuple, seconds: float, resources: tuple, after: list, slows: tuple = ()) -> None:
        tasks[key] = [seconds, resources, list(dict.fromkeys(after)), slows]

    def run(phase: str, orders, seconds) -> None:
        for device, order in enumerate(orders):
            for before, o in zip([None, *order], order, strict=False):
                after = [(phase, before)] if enforced and before is not None else []
                add((phase, o), float(seconds[o, device]), (device,), after)

    run("forward", placement.forward, problem.forward_s)
    sent = [(t, d) for t, x in enumerate(problem.tensors) for d in sorted({on[r] for r in x.readers})]
    sent = [(t, d) for t, d in sent if d != on[problem.tensors[t].producer]]
    for t, d in sent:
        x, source = problem.tensors[t], on[problem.tensors[t].producer]
        seconds, lanes = devices.transfer_s(x.bytes, source, d), devices.lanes_of(source, d)
        add(("send", t, d), seconds, lanes, [("forward", x.producer)], (source, d))
    for t, x in enumerate(problem.tensors):
        for r in x.readers:
            source = on[x.producer]
            tasks["forward", r][2].append(("forward", x.producer) if on[r] == source else ("send", t, on[r]))
    for t, d in sent:
        x, readers = problem.tensors[t], [r for r in problem.tensors[t].readers if on[r] == d]
        tasks["forward", x.producer][0] += ends[on[x.producer]][0]
        first = min(readers, key=[o for order in placement.forward for o in order].index)
        tasks["forward", first][0] += ends[d][0] + x.bytes * ends[d][1]
    if problem.training:
        run("backward", placement.backward, problem.backward_s)
        for ahead, order in zip(placement.forward, placement.backward, strict=True):
            for number, o in enumerate(order):
                own = [o, *ahead[-1:]] if enforced and not number else [o]
                tasks["backward", o][2] += [("forward", each) for each in own]
        returned = [(t, d) for t, d in sent if problem.tensors[t].gradient]
        for t, d in returned:
            x, source = problem.tensors[t], on[problem.tensors[t].producer]
            readers = [r for r in x.readers if on[r] == d]
            seconds, lanes = devices.transfer_s(x.bytes, d, source), devices.lanes_of(d, source)
            add(("back", t, d), seconds, lanes, [("backward", r) for r in readers], (d, source))
            last = max(readers, key=[o for order in placement.backward for o in order].index)
            tasks["backward", last][0] += ends[d][0]
            tasks["backward", x.producer][0] += ends[source][0] + x.bytes * ends[source][1]
            if d != min(e for u, e in returned if u == t) or source in {on[r] for r in x.readers}:
                tasks["backward", x.producer][0] += ends[source][2] + x.bytes * ends[source][3]
        for t, x in enumerate(problem.tensors):
            if x.gradient:
                here = [("backward", r) for r in x.readers if on[r] == on[x.producer]]
                tasks["backward", x.producer][2] += here + [("back", u, d) for u, d in returned if u == t]
        for device, order in enumerate(placement.backward):
            seconds = sum(float(problem.update_s[o, device]) for o in order)
            gone = [("back", t, d) for t, d in returned if d == device]
            gone += [("send", t, d) for t, d in sent if on[problem.tensors[t].producer] == device]
            if seconds:
                add(("update", device), seconds, (device,), [("backward", o) for o in order] + gone)
    for number, result in enumerate(problem.results):
        everyone = tuple(range(devices.count))
        add(
            ("result", number), result.seconds, ("all",), [("forward", o) for o in range(problem.size)],
            everyone,
        )  # fmt: skip
    numbers = {key: number for number, key in enumerate(tasks)}
    return naive.schedule(
        [
            naive.Task(key, seconds, resources, tuple({numbers[other] for other in after}), slows)
            for key, (seconds, resources, after, slows) in tasks.items()
        ],
        devices.slower,
    )


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([1, 1, 2, 3]), st.booleans())
def test_the_step_is_that_of_tasks_one_by_one(seed, training, mixed, micro_batches, enforced):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        seed, int(rng.integers(2, 20)), int(rng.integers(1, 4)), training=training, mixed=mixed
    )
    results = (PlacedResult(problem.size - 1, 2**20, 1e-3),) if rng.random() < 0.5 else ()
    shared = dict.fromkeys(((0, 1), (1, 0)), ("bus",)) if rng.random() < 0.5 else {}
    problem = replace(
        problem,
        micro_batches=micro_batches,
        results=results,
        devices=replace(
            problem.devices,
            lanes=shared,
            ends=rng.choice([0.0, 1e-9, 1e-4], size=(problem.devices.count, 6)),
            slower=float(rng.choice([0.0, 0.19, np.inf])),
        ),
        update_s=rng.choice([0.0, 1e-4], size=problem.forward_s.shape),
        host_s=rng.choice([0.0, 1e-3], size=problem.forward_s.shape),
    )
    placement = shuffled(problem, rng)
    found = simulate_placement(problem, placement, enforced=enforced)
    twin = scheduled(problem, placement, enforced=enforced)
    assert found.ends.max() == pytest.approx(twin.total_s, rel=1e-9)
    spans = twin.spans()
    for phase, starts in zip(("forward", "backward"), found.operator_starts, strict=True):
        if phase == "forward" or training:
            expected = [spans[phase, o][0] for o in range(problem.size)]
            assert starts.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9 * twin.total_s)
    if enforced:
        assert step_s(FlatProblem.of(problem), placement) == found.time_s


def test_orders_that_wait_for_each_other_never_end():
    problem = random_problem(1, 6, 1)
    order = np.arange(6)
    last, _, _ = flat_step(tuple(FlatProblem.of(problem)), np.zeros(6, np.int64), order[::-1].copy(), order)
    assert last == np.inf
