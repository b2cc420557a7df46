"""Some of the strategies that ``python -m tests.verify.sweep`` draws, which takes as many as one likes."""

import pytest

from tests.verify.sweep import ALIKE, NAMES, WITHIN, Case, cases, sweeping
from tests.verify.sweep_models import DECODERS


def faults(drawn: list[Case], *, real: bool, within: float = WITHIN) -> list[str]:
    with sweeping(real=real) as sweep:
        checked = map(sweep.check, drawn)
        return [case.line() for case in checked if case.faults or abs(case.memory) > within]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 268])
def test_ranks_send_and_keep_what_was_predicted(seed):
    """On fake ranks: zig-zag order, shared heads, unequal parts, pipelines, parts of blocks made again."""
    assert not faults(cases(range(seed, seed + ALIKE), list(DECODERS), (2, 3)), real=False)


FOUND = {
    30: "parameters of a block, gathered together in backward",
    259: "a weight of experts that a second forward gathered is released before the other's gradient is made",
    286: "the copy that brings gathered experts into order is gone as their gradient is made",
    287: "what experts kept is released before the last of their gradients waits for its shard",
    304: "products with transposed parameters",
}
"""What was predicted wrongly once."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND, ids=FOUND.get)
def test_memory_that_was_predicted_wrongly_once(seed):
    assert not faults(cases([seed], NAMES, (2, 3, 4, 5)), real=False, within=0.01)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "seeds", [range(16, 16 + ALIKE), pytest.param(range(1000, 1040), marks=pytest.mark.slow)], ids=str
)
def test_loss_and_gradients_are_those_of_the_unsplit_model(seeds):
    names = list(NAMES if len(seeds) > ALIKE else DECODERS)
    assert not faults(cases(seeds, names, (2, 3, 4, 5) if len(seeds) > ALIKE else (2,)), real=True)
