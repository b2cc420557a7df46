"""Published programs: their optimum beside enumeration, and their own answer whatever is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.planners.placed import netsplit_shared, pesto_extended
from tensoropt.planners.placed.common.contraction import share_devices
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.exact.rules import Rules, lasting_units, most_units
from tensoropt.planners.placed.netsplit_shared import NetSplitShared
from tensoropt.planners.placed.pesto_extended import PestoExtended
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem

ROUNDED = 1 + 2e-3
LONG, SHORT = 200.0, 20.0


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


@pytest.mark.parametrize("seed", range(4))
def test_pesto_extended_is_the_optimum_of_its_equations(seed):
    problem = random_problem(seed, 6, 3, training=seed != 2, mixed=True, transfer=(0.1, 0.5)[seed % 2])
    device = pesto_extended.place(problem, None, 0, PestoExtended(seconds=LONG)).placement.device
    alone = [[o] for o in range(problem.size)]
    best = min(makespan(problem, each, backward=False) for each in choices(problem, alone))
    assert makespan(problem, device, backward=False) <= best * ROUNDED


@pytest.mark.parametrize("seed", range(4))
def test_netsplit_as_published_is_the_optimum_over_its_groups_and_memory_rule(seed):
    problem = random_problem(seed, 12, 2, training=seed != 3, mixed=True)
    total = sum(problem.step_bytes(o) for o in range(problem.size))
    tight = replace(problem, devices=replace(problem.devices, capacity_bytes=np.full(2, 0.95 * total)))
    groups = share_devices(tight, 4)
    assert 1 < len(groups) <= 4
    limits = most_units(tight, Rules(), tight.devices.capacity_bytes.tolist())
    allowed = [d for d in choices(tight, groups) if (lasting_units(tight, d) <= limits).all()]
    best = min(makespan(tight, each, backward=True) for each in allowed)
    # Capacity of the simulator is another matter, with rounds of its own.
    answer = netsplit_shared.place(problem, None, 0, NetSplitShared(seconds=LONG))
    free = min(makespan(problem, each, backward=True) for each in choices(problem, groups))
    assert makespan(problem, answer.placement.device, backward=True) <= free * ROUNDED
    assert all(len({answer.placement.device[o] for o in group}) == 1 for group in groups)
    within = netsplit_shared.place(tight, None, 0, NetSplitShared(seconds=LONG))
    assert simulate_placement(tight, within.placement).fits()
    if not any("less room" in note for note in within.notes):
        assert makespan(tight, within.placement.device, backward=True) <= best * ROUNDED


@pytest.mark.parametrize("name", ["pesto_extended", "netsplit_shared"])
def test_an_answer_stands_where_a_heuristic_is_faster(name):
    """Six operators side by side: the programs see no gain in a second device."""
    problem = problem_of([1.0] * 6, [], training=True)
    module = {"pesto_extended": pesto_extended, "netsplit_shared": netsplit_shared}[name]
    answer = module.place(problem, None, 0, replace(module.DEFAULTS, seconds=SHORT))
    mine = simulate_placement(problem, answer.placement).time_s
    known = {source: simulate_placement(problem, p).time_s for source, p in heuristics(problem, 0)}
    fastest = min(known.values())
    said = [note.partition(" is faster: ")[0] for note in answer.notes if " is faster: " in note]
    assert [known[name] for name in said] == [fastest] * (fastest < mine)
    assert any(note.startswith("the program says ") for note in answer.notes)
    assert "its program is solved: nothing is faster by its own rules" in answer.notes


def test_pesto_extended_leaves_one_device_only_for_memory():
    chain = problem_of(
        [1.0] * 6, [(i, i + 1) for i in range(5)], devices=3, message_s=0.1, stored=1e7, training=True
    )
    roomy = pesto_extended.place(chain, None, 0, PestoExtended(seconds=SHORT))
    assert len(set(roomy.placement.device)) == 1
    parts = pesto_extended.place(chain, 3.5e7, 0, PestoExtended(seconds=SHORT))
    assert len(set(parts.placement.device)) > 1
    assert simulate_placement(chain, parts.placement).memory_bytes <= 3.5e7
    assert any("did not fit when simulated; solved" in note for note in parts.notes)


@pytest.mark.parametrize("name", ["pesto_extended", "netsplit_shared"])
def test_what_cannot_fit_is_refused(name):
    module = {"pesto_extended": pesto_extended, "netsplit_shared": netsplit_shared}[name]
    with pytest.raises(InfeasibleError, match=rf"{name} finds no plan within 1 B on 2 devices"):
        module.place(random_problem(0, 9, 2), 1.0, 0, replace(module.DEFAULTS, seconds=SHORT))


def test_large_graphs_are_coarsened_and_it_is_said():
    problem = random_problem(5, 40, 3)
    answer = pesto_extended.place(problem, None, 0, PestoExtended(seconds=SHORT, most_blocks=10))
    assert "40 operators coarsened to 10 blocks" in answer.notes
