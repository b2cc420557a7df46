"""What the search counts of parameters that are gathered ahead."""

from __future__ import annotations

import pytest

from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import Prices
from tensoropt.ops.layouts import GATHERED_AHEAD, PARTIAL_GRAD
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.storage import Storage
from tests.costs.models import facts_of, four, problem, tables_of
from tests.simulate.test_simulator import Hand, PerByte

W = 24 * 24 * 4
NAMES = [f"p_model_layers_{i}_weight" for i in range(4)]


def effects_and_choice(number: int, each_s: float, *, again: bool = False) -> tuple[GroupEffects, Choice]:
    """A product split along the batch of two ranks, its weight stored ahead; a gather takes ``each_s``."""
    graph = problem(four).graph
    effects = GroupEffects(Prices(graph, (1, 2), Hand(), PerByte(each_s / W), "sgd", beside=True))
    group = graph.groups[number]
    along = next(s for s in group.strategies if str(s.label) == "d0")
    configuration = Configuration(group, (group.unsplit, along))
    work = workload(graph, configuration, (1, 2))
    stored = {NAMES[number]: (GATHERED_AHEAD, 0)}
    return effects, Choice(configuration, work, facts_of(work), stored, again)


def hidden(effects: GroupEffects, choice: Choice) -> float:
    parameters, sent = effects.parameters, []
    for use in effects.stored_uses(choice):
        sent += effects.sent_beside(use, parameters.used(use))
        sent += effects.sent_beside(use, parameters.unsharded(use))
    return effects.hidden_s(effects.computed(choice), sent)


@pytest.mark.parametrize(("each_s", "hidden_s"), [(0.4, 1.2), (0.8, 2.4), (1.5, 3.0)])
def test_as_much_is_hidden_as_the_group_computes(each_s: float, hidden_s: float) -> None:
    """A gather beside 1 s of forward; another and the scatter of the gradient beside 2 s of backward."""
    effects, choice = effects_and_choice(1, each_s)
    assert hidden(effects, choice) == pytest.approx(hidden_s)
    # Every micro-batch hides as much, and computing takes a quarter longer beside it.
    effects.moves.mesh, effects.prices.slower_beside = (2, 2), 0.25
    assert hidden(effects, choice) == pytest.approx(2 * hidden_s / 1.25)


def test_a_recomputed_group_computes_more_in_backward() -> None:
    effects, choice = effects_and_choice(1, 1.5, again=True)
    assert hidden(effects, choice) == pytest.approx(1.0 + 3.0)


@pytest.mark.parametrize(("number", "hidden_s"), [(0, 0.0), (3, 0.8)])
def test_less_is_hidden_of_the_first_and_the_last_block(number: int, hidden_s: float) -> None:
    """Of the first nothing: its gradient is scattered when backward is over, and nobody asks for that of the
    input; of the last the gather for forward, and the scatter."""
    effects, choice = effects_and_choice(number, 0.4)
    assert hidden(effects, choice) == pytest.approx(hidden_s)


def test_two_average_blocks_are_counted_of_weights_and_of_gradients() -> None:
    effects, choice = effects_and_choice(1, 0.4)
    use, parameters = effects.uses(choice)[NAMES[1]], effects.parameters
    # There are four.
    for stored, expected in (((GATHERED_AHEAD, 0), 2 * 2 * W / 4), ((-1, 0), 0.0)):
        assert parameters.ahead_bytes(parameters.stored_use(NAMES[1], stored, use)) == expected
    table = tables_of(problem(four), (1, 2), beside=True).of["linear_1"]
    bytes_of = dict(zip(table.options[1], table.memory[1], strict=True))  # along the batch
    assert bytes_of[((GATHERED_AHEAD, 0),)] - bytes_of[((PARTIAL_GRAD, 0),)] == 2 * 2 * W / 4


def test_it_is_offered_where_anything_runs_beside() -> None:
    prepared = problem(four)
    offered = [
        {
            group.name
            for group in prepared.graph.groups
            for ways in tables_of(prepared, (1, 2), beside=beside).of[group.name].options
            if any(Storage.of(layout).gathered_ahead for way in ways for layout in way)
        }
        for beside in (False, True)
    ]
    assert offered == [set(), {group.name for group in prepared.graph.groups if group.parameters}]
