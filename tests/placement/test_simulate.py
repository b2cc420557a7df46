"""The simulator for placed plans, against figures worked out by hand; also of several micro-batches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import PlanError
from tensoropt.placement import (
    DeviceSet,
    PlacedTensor,
    Placement,
    PlacementProblem,
    simulate_placement,
)
from tensoropt.placement.problem import repeat_placement
from tensoropt.simulate.recording import MEMORY_KINDS
from tests.planners.placed.placements import random_problem


def links_of(devices: int) -> DeviceSet:
    """A message takes 1 s per 10 bytes."""
    per_byte = np.where(np.eye(devices, dtype=bool), 0.0, 0.1)
    return DeviceSet(
        capacity_bytes=np.full(devices, 1e3), latency_s=np.zeros((devices, devices)),
        seconds_per_byte=per_byte, lanes={},
    )  # fmt: skip


def by_hand(**changes) -> PlacementProblem:
    """Every operator takes 1 s forward and 2 s backward on two devices; the first one has parameters."""
    count = len(changes["names"])
    first = np.eye(1, count)[0]
    return PlacementProblem(
        **{
            "forward_s": np.ones((count, 2)), "backward_s": 2 * np.ones((count, 2)),
            "update_s": np.outer(first, [0.5, 0.5]), "parameter_bytes": 100 * first,
            "gradient_bytes": 100 * first, "optimizer_bytes": 200 * first,
            "forward_peak_bytes": 0 * first, "backward_peak_bytes": 0 * first, "devices": links_of(2),
            "update_peak_bytes": 0 * first, "host_s": np.zeros((count, 2)), **changes,
        }
    )  # fmt: skip


def diamond(**changes) -> PlacementProblem:
    """a -> b, c -> d."""
    tensors = (
        PlacedTensor(name="a", bytes=10, producer=0, readers=(1, 2), kept_by=(1,)),
        PlacedTensor(name="b", bytes=20, producer=1, readers=(3,)),
        PlacedTensor(name="c", bytes=30, producer=2, readers=(3,)),
    )
    given = {"names": tuple("abcd"), "kept_bytes": np.array([0, 5.0, 0, 0]), "tensors": tensors}
    return by_hand(**given | changes)


def test_a_branch_elsewhere_by_hand():
    # a 0-1, sends 1-2; b 1-2 on device 0; c 2-3 on device 1, sends 3-6; d 6-7.
    # d back 7-9; gradient of c 9-12; b back 9-11; c back 12-14, gradient of a 14-15; a back 15-17, update.
    simulated = simulate_placement(diamond(), Placement.in_order([0, 0, 1, 0], 2))
    assert simulated.time_s == pytest.approx(17.5)
    assert simulated.busy_s == pytest.approx((9.5, 3.0))
    assert simulated.communication_s(0) == simulated.communication_s(1) == pytest.approx(1 + 3 + 3 + 1)
    assert simulated.transfers == ((0, 0, 1, False), (2, 1, 0, False), (2, 0, 1, True), (0, 1, 0, True))


def test_memory_by_hand():
    # Kept from forward to backward: a (10, for b) and b's own 5. d's backward makes the gradients of b and c
    # (20 + 30); the peak is c's, which adds that of a (10) before its own is let go of.
    simulated = simulate_placement(diamond(), Placement.in_order([0, 0, 0, 0], 2))
    stored = 400
    assert simulated.peaks[0]["kept"] == 15
    assert simulated.memory_bytes == stored + 15 + 20 + 30 + 10
    end = simulated.memory(0)[-1][1]
    assert sum(end) == stored


def test_a_stored_parameter_takes_nothing_more_at_home():
    tensors = diamond().tensors
    tied = diamond(tensors=(replace(tensors[0], stored=True), *tensors[1:]))
    home = Placement.in_order([0, 0, 0, 0], 2)
    plain, stored = (simulate_placement(problem, home).memory_bytes for problem in (diamond(), tied))
    assert plain - stored == 10
    elsewhere = Placement.in_order([0, 1, 1, 1], 2)
    plain, stored = (simulate_placement(problem, elsewhere).peak_bytes[1] for problem in (diamond(), tied))
    assert plain == stored


def residual(**changes) -> PlacementProblem:
    """a -> b, and their sum s -> e, 10 bytes each on one device; backward goes e, s, b, a at 12, 14, 16, 18
    s."""
    tensors = (
        PlacedTensor(name="a", bytes=10, producer=0, readers=(1, 2)),
        PlacedTensor(name="b", bytes=10, producer=1, readers=(2,)),
        PlacedTensor(name="s", bytes=10, producer=2, readers=(3,)),
    )
    zeros = np.zeros(4)
    stored = dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes", "kept_bytes"), zeros)
    update_s = np.zeros((4, 2))
    return diamond(**{"tensors": tensors, "update_s": update_s, **stored, **changes})


def alive(problem: PlacementProblem, devices: tuple[int, ...] = (0, 0, 0, 0)) -> dict[str, float]:
    """Per backward the bytes that are alive on its device while it runs."""
    simulated = simulate_placement(problem, Placement.in_order(devices, 2))
    found = {}
    for event in simulated.events:
        if event.phase == "backward":
            at, device = (event.start_s + event.end_s) / 2, ("device 0", "device 1").index(event.lanes[0])
            curve = [now for time_s, now in simulated.memory(device) if time_s <= at]
            found[event.name] = sum(curve[-1])
    return found


def test_a_gradient_is_there_from_its_first_share_on():
    """c makes shares of a's and b's gradients beside the one that it was given. b's share of a's is the
    second: it is there with the first and their sum, but b's gradient is gone by then."""
    assert alive(residual()) == {"d": 10, "c": 30, "b": 30, "a": 10}


def test_a_backward_may_release_what_it_was_given_before_it_makes_more():
    """c has its own gradient's 10 bytes and a's and b's never all at once."""
    problem = residual(backward_peak_bytes=np.array([0, 0, -10.0, 0]))
    assert alive(problem)["c"] == 30 - 10
    simulated = simulate_placement(problem, Placement.in_order((0, 0, 0, 0), 2))
    # The owners add up to the same curve, what is released early among them.
    for device in (0, 1):
        curve, spans = simulated.memory(device), list(simulated.spans(device))
        for point, (_, now) in enumerate(curve):
            alive_now = [0.0] * len(MEMORY_KINDS)
            for holding, first, end in spans:
                alive_now[holding.kind] += holding.bytes if first <= point < end else 0.0
            assert alive_now == now


def test_a_device_makes_room_for_a_message_when_its_order_comes_to_it():
    """a's tensor is sent at once, but its reader's device has an operator to run before it comes to that."""
    a, b, s = residual().tensors
    forward_s = np.array([[0.1, 0.1], [5.0, 5.0], [1.0, 1.0], [1.0, 1.0]])
    tensors = (replace(a, readers=(2,)), replace(b, readers=(3,)), replace(s, readers=(3,)))
    problem = residual(tensors=tensors, forward_s=forward_s)
    simulated = simulate_placement(problem, Placement((0, 1, 1, 1), ((0,), (1, 2, 3))))
    second = next(e for e in simulated.events if e.words == "forward b")
    running = [kinds for at, kinds in simulated.memory(1) if second.start_s <= at < second.end_s]
    # Only its own result, though the message has long come.
    assert max(map(sum, running)) == 10


def test_without_an_order_a_message_needs_no_place_in_it():
    """Devices that run what is ready first follow no order that all of them could share."""
    for device in itertools.product(range(2), repeat=4):
        simulated = simulate_placement(residual(), Placement.in_order(device, 2), enforced=False)
        assert max(simulated.peak_bytes) >= 10


@pytest.mark.parametrize(("devices", "given", "most"), [
    # Two messages and their sum, before the backward that has only the sum.
    ((0, 1, 2, 2), 0, 30),
    # The share of a reader on the same device, the message, their sum.
    ((0, 0, 1, 1), 0, 30),
    # One message is the gradient.
    ((0, 1, 1, 1), 0, 10),
    # What the backward itself has alive comes later.
    ((0, 1, 2, 2), 15, 30),
    ((0, 1, 2, 2), 50, 60),
])  # fmt: skip
def test_gradients_from_other_devices_are_added_before_the_backward_that_needs_them(devices, given, most):
    """Of a, which b and c read."""
    seconds = {name: np.ones((4, 3)) for name in ("forward_s", "backward_s")}
    seconds |= {name: np.zeros((4, 3)) for name in ("update_s", "host_s")}
    peaks = np.array([given, 0, 0, 0])
    problem = residual(devices=links_of(3), backward_peak_bytes=peaks, **seconds)
    simulated = simulate_placement(problem, Placement.in_order(devices, 3))
    last = next(e for e in simulated.events if e.words == "backward a")
    running = [kinds for at, kinds in simulated.memory(0) if at <= last.start_s]
    assert sum(running[-1]) == most


def test_a_view_takes_nothing_more_where_it_is_made():
    """b is a view of a, which both their readers' backwards keep."""
    a, b, s = (replace(t, gradient=False) for t in residual().tensors)
    view = replace(b, lies_in=0, kept_by=(2,))
    assert alive(residual(tensors=(a, view, s)))["c"] == 10
    assert alive(residual(tensors=(a, replace(b, kept_by=(2,)), s)))["c"] == 10
    both = (replace(a, kept_by=(2,)), view, s)
    assert alive(residual(tensors=both))["c"] == 10
    assert alive(residual(tensors=(both[0], replace(view, lies_in=None), s)))["c"] == 20
    # Elsewhere each is a copy, and a view of a parameter takes nothing.
    assert alive(residual(tensors=both), (0, 0, 1, 1))["c"] == 20
    of_parameter = replace(view, lies_in=None, extent=0)
    assert alive(residual(tensors=(a, of_parameter, s)))["c"] == 0


def test_the_optimizer_waits_for_what_its_device_has_sent():
    update_s = np.array([[0.5, 0.5], [0, 0], [0.5, 0.5], [0, 0]])
    simulated = simulate_placement(diamond(update_s=update_s), Placement.in_order([0, 0, 1, 0], 2))
    steps = {e.lanes[0]: e.start_s for e in simulated.events if e.phase == "optimizer"}
    # c is back at 14, and its gradient of a is gone at 15; see test_a_branch_elsewhere_by_hand.
    assert steps == {"device 0": 17, "device 1": 15}


def test_the_optimizers_temporaries_are_there_at_its_step():
    place = Placement.in_order([0, 0, 0, 0], 2)
    for size in (70.0, 90.0):  # beside 75 bytes in backward
        simulated = simulate_placement(diamond(update_peak_bytes=np.array([size, 0, 0, 0])), place)
        assert simulated.memory_bytes == 400 + max(size, 75)


def test_a_tensor_is_sent_once_per_device_and_its_gradients_are_added_there():
    simulated = simulate_placement(diamond(), Placement.in_order([0, 1, 1, 1], 2))
    assert [t for t in simulated.transfers if t[0] == 0] == [(0, 0, 1, False), (0, 1, 0, True)]


def test_without_order_what_is_ready_goes_first():
    late = Placement((0, 0, 1, 0), ((0, 1, 3), (2,)))
    free = simulate_placement(diamond(), late, enforced=False)
    assert free.time_s <= simulate_placement(diamond(), late).time_s


@pytest.mark.parametrize(("change", "device", "orders", "words"), [
    ({}, (0, 0, 0, 0), ((0, 1, 2), ()), "every operator once"),
    ({}, (0, 0, 0, 1), ((0, 1, 2, 3), ()), "every operator once"),
    ({}, (0, 0, 0, 0), ((3, 2, 1, 0), ()), "wait for each other"),
    ({"together": ((1, 2),)}, (0, 0, 1, 0), ((0, 1, 3), (2,)), r"must share a device.*: b, c"),
    ({"pinned": ((0, (1,)),)}, (0, 0, 1, 0), ((0, 1, 3), (2,)), "allowed only on 1"),
])  # fmt: skip
def test_impossible_placements_are_refused(change, device, orders, words):
    with pytest.raises(PlanError, match=words):
        simulate_placement(diamond(**change), Placement(device, orders))


@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_what_holds_for_every_placement(seed, mixed, training):
    problem = random_problem(seed, 14, 3, mixed=mixed, training=training)
    rng = np.random.default_rng(seed)
    device = rng.integers(0, 3, size=14)
    simulated = simulate_placement(problem, Placement.in_order(device, 3))
    for d in range(3):
        curve = simulated.memory(d)
        at_end = sum(curve[-1][1])
        assert at_end == pytest.approx(float(problem.stored_bytes[device == d].sum()))
        assert all(size >= 0 for _, now in curve for size in now)
    work = sum(
        float(a[o, device[o]])
        for a in (problem.forward_s, problem.backward_s, problem.update_s)
        for o in range(14)
    )
    sent = sum(e.duration_s for e in simulated.events if e.ends)
    assert sum(simulated.busy_s) == pytest.approx(work)
    assert max(simulated.busy_s) <= simulated.time_s <= work + sent + 1e-9


def test_ends_of_messages_by_hand():
    """The maker issues what it sends; the first reader takes it in, and adds a gradient to what is there."""
    # Of either device: an end, a byte received, a sum and a byte of it; its host's end and sum.
    ends = np.array([[0.25, 0.0, 8.0, 0.1, 1.0, 30.0], [0.5, 0.02, 0.0, 0.0, 2.0, 0.0]])
    problem = diamond(devices=replace(diamond().devices, ends=ends))
    simulated = simulate_placement(problem, Placement.in_order([0, 0, 1, 0], 2))
    # a 1.25, b 1, d 1.25; backward d 2.25, b 2, a 2.25 and the addition of 10 bytes 9; c 2.2 and 3.6.
    assert simulated.busy_s == pytest.approx((3.5 + 6.5 + 9 + 0.5, 5.8))
    assert simulated.ends.max() == pytest.approx(30.3)
    assert simulated.host_s == (34.0, 8.0)
    assert simulated.time_s == 34.0
    # A share that comes alone becomes the gradient as it is.
    alone = simulate_placement(problem, Placement.in_order([0, 1, 1, 1], 2))
    assert alone.host_s == (2.0, 4.0)


# -- several micro-batches ------------------------------------------------------------------------


def chain() -> PlacementProblem:
    """a -> b; every operator takes 1 s forward and 2 s backward, a message 1 s; a has parameters."""
    return by_hand(
        names=("a", "b"), kept_bytes=np.array([5.0, 7.0]),
        tensors=(PlacedTensor(name="a", bytes=10, producer=0, readers=(1,), kept_by=(1,)),),
    )  # fmt: skip


def in_two() -> PlacementProblem:
    return replace(chain(), micro_batches=2)


APART = Placement.in_order([0, 1], 2)


def test_devices_work_at_once_by_hand():
    # a 0-1, 1-2; sent 1-2, 2-3; b 2-3, 3-4.
    # b back 4-6, 6-8; gradients sent 6-7, 8-9; a back 7-9, 9-11, update.
    simulated = simulate_placement(in_two(), APART)
    assert simulated.time_s == pytest.approx(11.5)
    assert simulated.busy_s == pytest.approx((6.5, 6.0))
    assert simulated.transfers == ((0, 0, 1, False), (0, 1, 0, True))  # of one micro-batch
    sent = [e.name for e in simulated.events if e.phase == "send"]
    assert sent == ["a of micro-batch 0", "a of micro-batch 1"]
    # One after another they would take 2 * 8 + 0.5.
    assert simulate_placement(chain(), APART).time_s == pytest.approx(8.5)


def test_memory_of_micro_batches_in_flight_by_hand():
    simulated = simulate_placement(in_two(), APART)
    # Device 0 at 1-2 s: a of both (10 + 10), what both keep (5 + 5), and at 8-9 s two gradients instead of a.
    assert simulated.peak_bytes[0] == 400 + 20 + 10
    # Device 1 at 4-6 s: two copies of a and what b keeps, both for backward, and the first gradient of a.
    assert simulated.peak_bytes[1] == 2 * (10 + 7) + 10
    assert simulate_placement(chain(), APART).peak_bytes[1] == 10 + 7 + 10
    for device in (0, 1):
        assert sum(simulated.memory(device)[-1][1]) == (400, 0)[device]


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_one_device_does_everything_so_often(seed, count):
    problem = random_problem(seed)
    home = Placement.in_order([0] * problem.size, problem.devices.count)
    computed = float((problem.forward_s + problem.backward_s)[:, 0].sum())
    problem = replace(problem, together=(), pinned=(), micro_batches=count)
    simulated = simulate_placement(problem, home)
    assert simulated.time_s == pytest.approx(count * computed + float(problem.update_s[:, 0].sum()))


def test_an_operator_stays_where_it_may_lie_in_every_micro_batch():
    problem = replace(in_two(), pinned=((1, (1,)),)).repeated
    assert problem.pinned == ((1, (1,)), (3, (1,)))
    repeat_placement(APART, 2).check(problem)


def test_what_is_kept_of_all_micro_batches_counts_for_a_step():
    assert chain().step_bytes(0) == 400 + 5 + 10
    assert in_two().step_bytes(0) == 400 + 2 * (5 + 10)
