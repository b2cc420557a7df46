"""Estimates are within a tenth of what the simulator finds of the same strategy."""

from __future__ import annotations

import pytest

from tensoropt import zoo
from tensoropt.estimate.known import figures, known_model
from tensoropt.estimate.strategies import (
    CORE,
    FULL,
    NOTHING,
    RECOMPUTE,
    AskedStep,
    SimulatedLines,
    UsualStrategy,
)
from tensoropt.sharding import recipes
from tests.estimate.beside_simulator import DEVICES, USUAL, beside
from tests.estimate.test_sizes import SEQUENCE, tiny

MOST_OFF = 0.1
FEW = [
    UsualStrategy(data=DEVICES),
    UsualStrategy(data=DEVICES, stage=2),
    UsualStrategy(data=DEVICES, stage=3, recompute=FULL),
    UsualStrategy(tensor=2),
]


def check(name: str, step: AskedStep, wanted: list[UsualStrategy] = USUAL, least: int = 4) -> None:
    known = known_model(name)
    found = list(beside(known, zoo.build(name, batch=step.batch, device="meta"), step, wanted))
    assert len(found) >= least
    assert not [row for row in found if abs(row.off) > MOST_OFF]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_tiny_models_with_every_usual_strategy(name: str, dtype: str) -> None:
    check(name, AskedStep(batch=8, sequence=SEQUENCE, dtype=dtype), least=len(USUAL) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "mixtral-tiny"])
def test_other_families_of_the_zoo(name: str) -> None:
    check(name, AskedStep(batch=8, sequence=SEQUENCE), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam_fused"])
def test_gradients_of_several_micro_batches_and_other_optimizers(optimizer: str) -> None:
    stages = [UsualStrategy(data=DEVICES, stage=stage) for stage in range(4)]
    check("gpt2-tiny", AskedStep(batch=16, sequence=32, micro_batches=2, optimizer=optimizer), stages)


@pytest.mark.slow
@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("name", ["qwen3", "gemma", "gemma3_text", "qwen2_moe", "phi3"])
def test_families_that_the_zoo_does_not_have(name: str) -> None:
    config, built = tiny(name)
    found = list(beside(known_model(config), built, AskedStep(batch=8, sequence=SEQUENCE), FEW))
    assert len(found) >= 3
    assert not [row for row in found if abs(row.off) > MOST_OFF]


@pytest.mark.slow
def test_a_model_without_a_config_is_on_the_line_of_its_figures() -> None:
    # Neither batch is one of those that were simulated for the figures.
    for name, batch in (("vgg11-tiny", 24), ("mlp", 48)):
        assert isinstance(known_model(name).model, SimulatedLines)
        wanted = [UsualStrategy(data=DEVICES, stage=stage) for stage in (0, 2, 3)]
        check(name, AskedStep(batch=batch, sequence=0), wanted, least=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n for n, row in figures()["models"].items() if "tiny" not in n and ("config" in row or row["lines"])],
)
def test_the_whole_zoo(name: str) -> None:
    known = known_model(name)
    batch = max(DEVICES, known.batch)
    check(name, AskedStep(batch=batch, sequence=known.sequence), FEW if known.sequence else FEW[:2], least=2)


def test_recipes_have_the_names_of_the_search() -> None:
    assert (NOTHING, FULL) == (recipes.NOTHING, recipes.FULL)
    assert {CORE, FULL} <= set(recipes.RECIPES)
    assert set(RECOMPUTE) == {NOTHING, CORE, FULL}
