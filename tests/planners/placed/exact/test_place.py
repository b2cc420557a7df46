"""The exact planners against exhaustive search: the simulator as oracle, or the published equations."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from tensoropt.errors import InfeasibleError, MissingExtraError
from tensoropt.placement import PlacedTensor, Placement, PlacementProblem, simulate_placement
from tensoropt.planners.compare import requested_planners
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed import dpos, netsplit, netsplit_shared, pesto, pesto_extended
from tensoropt.planners.placed.common.bound import lower_bound_s
from tensoropt.planners.placed.common.contraction import share_devices
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.exact import solver as solver_module
from tensoropt.planners.placed.exact.place import Solving, contracted
from tensoropt.planners.placed.exact.program import Grid, PlacementProgram
from tensoropt.planners.placed.exact.rules import Rules, lasting_units, most_units, unit_bytes
from tensoropt.planners.placed.exact.solver import solve
from tests.planners.placed.exhaustive import best_play
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import all_bytes, random_problem, with_capacity

ROUNDED = 1 + 2e-3
NetSplit = partial(replace, netsplit.DEFAULTS)
Pesto = partial(replace, pesto.DEFAULTS)


def some(*seeds: int, rest: Iterable[int] = ()) -> pytest.MarkDecorator:
    """Seeds of small problems that differ in all that decides; the rest are slow tests."""
    return pytest.mark.parametrize("seed", [*seeds, *(pytest.param(s, marks=pytest.mark.slow) for s in rest)])


def small(seed: int, share: float | None = None) -> PlacementProblem:
    """Four operators on three devices or five on two; with a share, devices of so much of all memory."""
    operators, devices = (5, 2) if seed % 3 else (4, 3)
    how = {"training": seed % 4 != 0, "mixed": seed % 2 == 1, "transfer": (0.1, 0.5, 1.5)[seed % 3]}
    problem = random_problem(seed, operators, devices, **how)
    return problem if share is None else with_capacity(problem, share * all_bytes(problem))


def outcome_of(problem: PlacementProblem, rules: Rules, *, effort: float = 1.0, hint=None):
    most = 10 * simulate_placement(problem, alone(problem)).time_s
    grid = Grid.of(problem, lower_bound_s(problem))
    program = PlacementProgram(problem, rules, grid, most, problem.devices.capacity_bytes.tolist())
    return solve(program, seed=0, effort=effort, seconds=200, hint=hint)


def alone(problem: PlacementProblem) -> Placement:
    return Placement.in_order([0] * problem.size, problem.devices.count)


@some(1, 3, 4, rest=(0, 2, 5, 6, 7, 8, 9))
def test_the_optimum_is_that_of_exhaustive_search(seed):
    """With seed 2 nothing is left in the end, where OR-tools ended the process while it had a hint."""
    problem = small(seed)
    answer = netsplit.place(problem, None, 0, NetSplit(seconds=200))
    best = best_play(problem)
    assert simulate_placement(problem, answer.placement).time_s <= best.time_s * ROUNDED
    assert lower_bound_s(problem) <= best.time_s * (1 + 1e-9)
    assert outcome_of(problem, Rules()).bound_s <= best.time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_memory_that_fits_keeps_the_rule(seed):
    """What is stored and kept is never more than the simulated peak."""
    problem, count = small(seed), small(seed).devices.count
    device = [o % count for o in range(problem.size)]
    simulated = simulate_placement(problem, Placement.in_order(device, count))
    peaks = np.array(simulated.peak_bytes)
    held = lasting_units(problem, simulated.placement.device) * unit_bytes(problem)
    assert (held <= peaks * (1 + 1e-9)).all()


def test_bounds_hold_where_memory_is_tight():
    problem = small(3, 0.8)
    best = best_play(problem)
    assert best is not None
    assert outcome_of(problem, Rules(), effort=0.1).bound_s <= best.time_s * (1 + 1e-9)


def test_a_hint_is_a_solution_of_the_program():
    problem = random_problem(2, 9, 3, mixed=True)
    simulated = simulate_placement(problem, dpos.place(problem, None, 0).placement)
    whole = with_capacity(problem, simulated.memory_bytes)
    found = outcome_of(whole, Rules(), effort=0.02, hint=simulated)
    assert found.time_s <= simulated.time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_out_of_time_the_warm_start_stands_with_its_gap(seed):
    problem = random_problem(seed, 30, 3, mixed=bool(seed % 2))
    answer = netsplit.place(problem, None, 0, NetSplit(seconds=1e-3))
    best = min(simulate_placement(problem, p).time_s for p in heuristics(problem, 0))
    assert simulate_placement(problem, answer.placement).time_s <= best
    assert any("was not improved" in note for note in answer.notes)
    assert any(note.startswith("gap ") for note in answer.notes)


def test_one_seed_gives_one_answer(monkeypatch):
    monkeypatch.setattr(solver_module, "_EFFORT_PER_SECOND", 1e-3)
    first, second = (netsplit.place(small(3), None, 7, NetSplit(seconds=200)) for _ in range(2))
    assert first == second
    problem = random_problem(5, 12, 3, mixed=True)
    first, second = (outcome_of(problem, Rules(), effort=0.05) for _ in range(2))  # cut short
    assert first == second


def test_nothing_runs_after_a_cancel(monkeypatch):
    """An interrupt in the middle of a search ends it at once, and its thread with it."""
    problem = random_problem(1, 16, 3)
    wait, waits = solver_module.wait, []

    def interrupted(runs, timeout=None):
        wait(runs, timeout)
        if not waits:
            waits.extend(thread for thread in threading.enumerate() if thread.name.startswith("solver"))
            raise KeyboardInterrupt

    monkeypatch.setattr(solver_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        netsplit.place(problem, None, 0, NetSplit(seconds=120))
    assert waits
    assert not any(thread.is_alive() for thread in waits)


def test_a_missing_solver_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)  # whoever imported it before
    remedy = r"netsplit needs the package ortools.*pip install 'tensoropt\[solvers\]'"
    with pytest.raises(MissingExtraError, match=remedy):
        netsplit.place(small(0), None, 0, netsplit.DEFAULTS)
    with pytest.raises(MissingExtraError, match=remedy):
        requested_planners("optcnn,netsplit")  # before anything is computed
    assert "netsplit" in {entry.name for entry in requested_planners("all")}


def test_large_graphs_are_contracted_and_it_is_said():
    problem = random_problem(2, 80, 3)
    assert len(contracted(problem, 12).groups) <= 12
    notes = netsplit.place(problem, None, 0, Solving(seconds=0.5, most_blocks=12)).notes
    assert any("80 operators contracted to" in note for note in notes)


def share_of_the_fullest(problem: PlacementProblem, device, state=None) -> float:
    """Of all that is stored and kept, counted in the simplest way."""
    state = problem.optimizer_bytes if state is None else state
    own = problem.parameter_bytes + problem.gradient_bytes + state + problem.kept_bytes
    held = [float(sum(own[o] for o, d in enumerate(device) if d == k)) for k in range(2)]
    kept = [t for t in problem.tensors if problem.training and t.kept_by]
    for tensor in kept:
        for d in {device[o] for o in tensor.kept_by}:
            held[d] += tensor.bytes
    return max(held) / (own.sum() + sum(t.bytes for t in kept))


@some(1, 4, rest=(3, 6, 8, 9))
def test_pesto_is_the_best_of_all_that_are_balanced(seed):
    """In all of them a placement that is not balanced is faster, mostly everything on one device."""
    transfer, mixed = (0.1, 0.5, 1.5, 6)[seed % 4], bool(seed % 2)
    problem = random_problem(seed, 5, 2, training=seed % 3 != 0, mixed=mixed, transfer=transfer)
    answer = pesto.place(problem, None, 0, Pesto(seconds=200))
    simulated = simulate_placement(problem, answer.placement)
    assert share_of_the_fullest(problem, simulated.placement.device) <= 0.6
    best = best_play(problem, lambda device: share_of_the_fullest(problem, device) <= 0.6)
    assert simulated.time_s <= best.time_s * ROUNDED
    assert best_play(problem).time_s < best.time_s
    (gap,) = [note for note in answer.notes if note.startswith("gap ")]
    assert gap.startswith("gap 0.00% proven, up to rounding: nothing with at most 60% of all stored")


def test_a_balance_counts_what_is_smaller_than_a_kilobyte():
    """All operators are alike; at 1,024 bytes a unit any placement would be balanced."""
    problem = random_problem(1, 6, 2)
    same, none = np.full(6, 100.0), np.zeros(6)
    state = {"parameter_bytes": same, "gradient_bytes": none, "optimizer_bytes": none, "kept_bytes": none}
    tensors = tuple(replace(tensor, kept_by=()) for tensor in problem.tensors)
    problem = replace(problem, tensors=tensors, **state)
    answer = pesto.place(problem, None, 0, Pesto(seconds=20))
    assert sorted(answer.placement.device) == [0, 0, 0, 1, 1, 1]


def test_pesto_refuses_where_one_operator_outweighs_its_balance():
    problem = random_problem(1, 5, 2)
    heavy = problem.parameter_bytes.copy()
    heavy[2] = 50 * heavy.sum()
    with pytest.raises(InfeasibleError) as refusal:
        pesto.place(replace(problem, parameter_bytes=heavy), None, 0, Pesto(seconds=5))
    text = str(refusal.value)
    assert "pesto finds no plan with at most 60% of all stored and saved bytes on one device" in text
    assert "and its program has no solution" in text
    assert "use netsplit or dpos" in text


def test_pesto_refuses_what_it_cannot_treat():
    with pytest.raises(UnsuitableError, match="places on 2 devices; this cluster has 3"):
        pesto.place(random_problem(0, 6, 3), None, 0, Pesto())
    tensors = tuple(PlacedTensor(name=f"t{o}", bytes=1, producer=o, readers=(o + 1,)) for o in range(249))
    apart = tuple((o, (o % 2,)) for o in range(250))
    zigzag = replace(random_problem(0, 250, 2), tensors=tensors, pinned=apart)
    with pytest.raises(UnsuitableError, match="contracted to 250 blocks; pesto takes at most 200"):
        pesto.place(zigzag, None, 0, Pesto())


def makespan(problem: PlacementProblem, device: Sequence[int], *, backward: bool) -> float:
    """The step if every device could do any number of things at a time: (6-2) to (6-7), and backward."""
    seconds = problem.devices.transfer_s
    ahead = [0.0] * problem.size
    for o in range(problem.size):
        reads = [problem.tensors[t] for t in problem.read[o]]
        arrive = [ahead[t.producer] + seconds(t.bytes, device[t.producer], device[o]) for t in reads]
        ahead[o] = max(arrive, default=0.0) + problem.forward_s[o, device[o]]
    if not (backward and problem.training):
        return max(ahead)
    back = [0.0] * problem.size
    for o in reversed(range(problem.size)):
        made = [problem.tensors[t] for t in problem.made[o] if problem.tensors[t].gradient]
        return_ = [back[r] + seconds(t.bytes, device[r], device[o]) for t in made for r in t.readers]
        back[o] = max([ahead[o], *return_]) + problem.backward_s[o, device[o]]
    return max(back)


def choices(problem: PlacementProblem, groups: Sequence[Sequence[int]]):
    for devices in product(range(problem.devices.count), repeat=len(groups)):
        found = [0] * problem.size
        for group, device in zip(groups, devices, strict=True):
            for operator in group:
                found[operator] = device
        yield found


@some(0, 1, rest=(2, 3))
def test_pesto_extended_is_the_optimum_of_its_equations(seed):
    problem = random_problem(seed, 6, 3, training=seed != 2, mixed=True, transfer=(0.1, 0.5)[seed % 2])
    device = pesto_extended.place(problem, None, 0, Solving(most_blocks=200, seconds=200)).placement.device
    alone = [[o] for o in range(problem.size)]
    best = min(makespan(problem, each, backward=False) for each in choices(problem, alone))
    assert makespan(problem, device, backward=False) <= best * ROUNDED


@some(1, rest=(0, 2, 3))
def test_netsplit_as_published_is_the_optimum_over_its_groups_and_memory_rule(seed):
    problem = random_problem(seed, 12, 2, training=seed != 3, mixed=True)
    tight = with_capacity(problem, 0.95 * all_bytes(problem))
    groups = share_devices(tight, 4)
    assert 1 < len(groups) <= 4
    limits = most_units(tight, Rules(), tight.devices.capacity_bytes.tolist())
    allowed = [d for d in choices(tight, groups) if (lasting_units(tight, d) <= limits).all()]
    best = min(makespan(tight, each, backward=True) for each in allowed)
    # Capacity of the simulator is another matter, with rounds of its own.
    answer = netsplit_shared.place(problem, None, 0, Solving(seconds=200))
    free = min(makespan(problem, each, backward=True) for each in choices(problem, groups))
    assert makespan(problem, answer.placement.device, backward=True) <= free * ROUNDED
    assert all(len({answer.placement.device[o] for o in group}) == 1 for group in groups)
    within = netsplit_shared.place(tight, None, 0, Solving(seconds=200))
    assert simulate_placement(tight, within.placement).fits()
    if not any("less room" in note for note in within.notes):
        assert makespan(tight, within.placement.device, backward=True) <= best * ROUNDED


def test_pesto_extended_leaves_one_device_only_for_memory():
    chain = problem_of(
        [1.0] * 6, [(i, i + 1) for i in range(5)], devices=3, message_s=0.1, stored=1e7, training=True
    )
    roomy = pesto_extended.place(chain, None, 0, Solving(most_blocks=200, seconds=20))
    assert len(set(roomy.placement.device)) == 1
    parts = pesto_extended.place(chain, 3.5e7, 0, Solving(most_blocks=200, seconds=20))
    assert len(set(parts.placement.device)) > 1
    assert simulate_placement(chain, parts.placement).memory_bytes <= 3.5e7
    assert any("did not fit when simulated" in note for note in parts.notes)
