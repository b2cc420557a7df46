"""Parameters between steps: what each optimizer keeps, and what a frozen one lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensoropt.costs.effects import STEP, MoveEffects, additive
from tensoropt.costs.parameter_effects import ParameterEffects, Use
from tensoropt.costs.prices import free_prices
from tensoropt.ops.layouts import GATHERED_ONCE
from tests.costs.models import problem, two_layers

WEIGHT = "p_model_second_weight"


def effects(optimizer: str = "sgd", **changes) -> ParameterEffects:
    graph = problem(two_layers).graph
    made = ParameterEffects(MoveEffects(free_prices(graph, (1, 2), optimizer)))
    tensors = made.moves.tensors
    made.moves.tensors = {**tensors, WEIGHT: replace(tensors[WEIGHT], **changes)}
    return made


@pytest.mark.parametrize(
    ("optimizer", "values", "temporary"), [("sgd", 2, 0), ("momentum", 3, 0), ("adam", 4, 1)]
)
def test_bytes_between_steps(optimizer, values, temporary):
    """Parameter, gradient, and what the optimizer keeps; Adam's denominators while it steps."""
    whole, half, size = (-1, -1), (-1, 0), 8 * 32 * 4
    for layout, share in ((whole, 1), (half, 2)):
        stored = effects(optimizer).stored(WEIGHT, layout)
        assert additive(stored, effects(optimizer).prices).memory == values * size / share
        (step,) = (effect for effect in stored.effects if effect.when == STEP)
        assert step.workspace_bytes == temporary * size / share


def test_a_frozen_parameter_has_neither_gradient_nor_state():
    frozen = effects("adam", requires_grad=False)
    stored = frozen.stored(WEIGHT, (-1, -1))
    assert (stored.parameters, stored.gradients, stored.optimizer) == (8 * 32 * 4, 0, 0)
    assert stored.effects == ()


def test_master_weights_are_stored_in_their_own_type():
    narrow = effects("adam", dtype="bfloat16", master_dtype="float32")
    assert additive(narrow.stored(WEIGHT, (-1, -1)), narrow.prices).memory == 4 * 8 * 32 * 4


def test_a_shard_that_is_cast_lies_beside_the_copy_that_is_gathered_of_it():
    for made, narrow in ((effects(), 0), (effects(dtype="bfloat16", master_dtype="float32"), 8 * 32)):
        (gather,) = made.unsharded(made.stored_use(WEIGHT, (GATHERED_ONCE, 0), Use((-1, -1), 1))).effects
        assert gather.workspace_bytes == narrow
