"""Some of the samples that ``python -m tests.sweep`` goes through, and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from tensoropt.ops import registry
from tensoropt.ops.index_space import Builder
from tensoropt.profiling import fact_finding
from tests.sweep import operators as swept
from tests.sweep.__main__ import CHOSEN
from tests.sweep.operators import (
    MOST_SAMPLES,
    Around,
    Found,
    Seen,
    check_sample,
    name_of,
    operators,
    sample_of,
)

PARTS = 10
TENTH, TENTH_PARTS = 10, 20
ONCE_WRONG = [
    [name, "float32", number]
    for name, number in {
        "nn.functional.embedding_bag": 13, "chalf": 0, "nn.functional.pixel_shuffle": 3,
        "nn.functional.smooth_l1_loss": 6, "linalg.eigvals": 0, "histogram": 33, "native_layer_norm": 7,
        "_native_batch_norm_legit": 7,
    }.items()
]  # fmt: skip
"""Their kinds: a row counted from the end, numbers that PyTorch cannot compare, a dim of size 0, an argument
after those that are read, a library that ends the process on NaN, bounds that random operands are not, a
result that a rule leaves out, a mode that a kernel does not have."""


@pytest.fixture(scope="module")
def table() -> list[Any]:
    return [info for info in operators() if torch.float32 in info.dtypes]


@pytest.mark.parametrize("part", range(PARTS))
def test_the_chosen_samples_split_right(part: int) -> None:
    """Those with most operators between them; a few are captured together."""
    infos = {name_of(info): info for info in operators()}
    together = defaultdict[Any, list[Around]](list)
    for name, dtype, number in [*json.loads(CHOSEN.read_text()), *ONCE_WRONG][part::PARTS]:
        model = swept.model_of(infos[name], sample_of(infos[name], getattr(torch, dtype), number), number)
        assert isinstance(model, Around), f"{name}: {model}"
        together[model.like].append(model)
    found = [swept.check_models(models, part, compare=False) for models in together.values()]
    assert [one.refused or one.incorrect for one in found] == [[]] * len(found)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("part", range(TENTH_PARTS))
def test_a_tenth_splits_right(part: int, table: list[Any]) -> None:
    rng, seen, incorrect = random.Random(part), Seen(), list[str]()
    for info in table[part::TENTH_PARTS]:
        for number, sample in swept.samples(info, torch.float32, MOST_SAMPLES).items():
            if rng.random() < 1 / TENTH:
                incorrect += check_sample(info, sample, number, seen, compare=False).incorrect
    assert incorrect == []


def of(name: str, table: list[Any], number: int = 0) -> Found:
    (info,) = (info for info in table if name_of(info) == name)
    return check_sample(info, sample_of(info, torch.float32, number), number)


def test_a_rule_that_splits_too_much_is_found(monkeypatch: pytest.MonkeyPatch, table: list[Any]) -> None:
    def every_dim(b: Builder) -> None:
        loops = b.loops(b.output().shape)
        b.arg(1)
        b.read(b.arg(0), loops)
        b.write(loops)

    assert of("softmax", table).incorrect == []
    changed = dataclasses.replace(registry._BY_TARGET["aten.softmax.int"], rule=every_dim)
    monkeypatch.setitem(registry._BY_TARGET, "aten.softmax.int", changed)
    assert any("aten.softmax.int" in line for line in of("softmax", table).incorrect)


def test_a_storage_that_fake_kernels_do_not_show_is_found(
    monkeypatch: pytest.MonkeyPatch, table: list[Any]
) -> None:
    assert of("nn.functional.mse_loss", table, 5).incorrect == []
    monkeypatch.setattr(fact_finding, "_ELEMENTS", {})
    assert any("peak_bytes" in line for line in of("nn.functional.mse_loss", table, 5).incorrect)
