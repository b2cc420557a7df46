"""The order in which collectives are issued, against orders made by hand on two layers without biases.

Whether ranks issue them in this order is tested in ``tests/verify/test_recorder.py``.
"""

from __future__ import annotations

import pytest

from tensoropt.sharding.storage import Gather, Reduce, Storage
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.issue_order import collectives_in_order
from tests.costs.models import three, two_layers
from tests.simulate.test_collectives import FIRST, SECOND, W1, W2, written

BATCH = [["d0"], ["d0"], ["d0"]]
LOSS = Collective("all_reduce", (0,), 4)
"""A sum of the ranks' shares."""


def ordered(*args, **more) -> list[Collective]:
    return list(collectives_in_order(*written(*args, **more)))


@pytest.mark.parametrize("micro", [1, 2])
def test_a_bucket_is_reduced_behind_its_last_gradient_in_the_last_micro_batch(micro: int) -> None:
    stored = {FIRST: ["R/P"], SECOND: ["R/P"]}
    bucket = Collective("all_reduce", (0,), W1 + W2)
    assert ordered(two_layers, BATCH, stored, mesh=(micro, 2)) == [LOSS] * micro + [bucket]


@pytest.mark.parametrize("micro", [1, 2])
def test_backward_goes_back_and_gathers_before_it_scatters(micro: int) -> None:
    each = [
        Collective("all_gather", (0,), W1),
        Collective("all_gather", (0,), W2),
        LOSS,
        Collective("all_gather", (0,), W2),  # the first layer's weight is needed for no gradient
        Collective("reduce_scatter", (0,), W2),
        Collective("reduce_scatter", (0,), W1),
    ]
    assert ordered(two_layers, BATCH, {FIRST: ["S(0)"], SECOND: ["S(0)"]}, mesh=(micro, 2)) == each * micro


def test_unsharded_copies_are_gathered_first_and_reduced_last() -> None:
    once = [Collective("all_gather", (0,), W1), Collective("all_gather", (0,), W2)]
    last = [Collective("reduce_scatter", (0,), W2), Collective("reduce_scatter", (0,), W1)]
    strategy, facts = written(two_layers, BATCH, {FIRST: ["S(0)"], SECOND: ["S(0)"]}, mesh=(2, 2))
    for name in (FIRST, SECOND):
        strategy.stored[name] = Storage(strategy.stored[name], Gather.ONCE, Reduce.LAST_MICRO_BATCH).stored
    assert list(collectives_in_order(strategy, facts)) == [*once, LOSS, LOSS, *last]


def test_a_gradient_comes_back_behind_its_operator() -> None:
    """Megatron's pair of layers behind another one."""
    found = ordered(
        three,
        [["none"], ["out_features"], ["in_features"], ["none"]],
        {"p_model_enter_weight": ["R"], FIRST: ["S(0)"], SECOND: ["S(1)"]},
    )
    assert found == [Collective("all_reduce", (0,), 16 * 8 * 4), Collective("all_reduce", (0,), 16 * 24 * 4)]


def test_inference_only_goes_forward() -> None:
    found = ordered(
        two_layers, BATCH, {"p_first_weight": ["S(0)"], "p_second_weight": ["S(0)"]}, mode="inference"
    )
    assert found == [Collective("all_gather", (0,), W1), Collective("all_gather", (0,), W2), LOSS]
