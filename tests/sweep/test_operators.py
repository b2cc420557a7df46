"""Some of the samples that ``python -m tests.sweep`` goes through, and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensoropt.ops import registry
from tensoropt.ops.index_space import Builder
from tensoropt.profiling import fact_finding
from tests.sweep.operators import Found, Seen, check_sample, name_of, operators, samples

QUICK, PARTS = 200, 20
TENTH = 10
OF_EACH = 8


@pytest.fixture(scope="module")
def table() -> list[Any]:
    return [info for info in operators() if torch.float32 in info.dtypes]


def found_in(drawn: list[tuple[Any, int]]) -> Iterator[Found]:
    """What is found of samples by operator and place."""
    seen = Seen()
    for info, place in drawn:
        some = list(samples(info, torch.float32, OF_EACH).items())
        number, sample = some[place % len(some)]
        yield check_sample(info, sample, number, seen, compare=False)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_fixed_choice_splits_right(part: int, table: list[Any]) -> None:
    rng = random.Random(0)
    drawn = [(info, rng.randrange(OF_EACH)) for info in rng.sample(table, QUICK)][part::PARTS]
    found = list(found_in(drawn))
    assert [line for one in found for line in one.incorrect] == []
    assert sum(bool(one.targets) for one in found) > len(found) / 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_tenth_splits_right(part: int, table: list[Any]) -> None:
    rng = random.Random(1)
    every = [(info, place) for info in table for place in range(OF_EACH)]
    drawn = rng.sample(every, len(every) // TENTH)[part::PARTS]
    assert [line for one in found_in(drawn) for line in one.incorrect] == []


def of(name: str, table: list[Any], number: int = 0) -> Found:
    (info,) = (info for info in table if name_of(info) == name)
    return check_sample(info, samples(info, torch.float32, 400)[number], number)


def test_a_rule_that_splits_too_much_is_found(monkeypatch: pytest.MonkeyPatch, table: list[Any]) -> None:
    def every_dim(b: Builder) -> None:
        loops = b.loops(b.output().shape)
        b.arg(1)
        b.read(b.arg(0), loops)
        b.write(loops)

    assert of("softmax", table).incorrect == []
    changed = dataclasses.replace(registry.BY_TARGET["aten.softmax.int"], rule=every_dim)
    monkeypatch.setitem(registry.BY_TARGET, "aten.softmax.int", changed)
    assert any("aten.softmax.int" in line for line in of("softmax", table).incorrect)


def test_a_storage_that_fake_kernels_do_not_show_is_found(
    monkeypatch: pytest.MonkeyPatch, table: list[Any]
) -> None:
    assert of("nn.functional.mse_loss", table, 5).incorrect == []
    monkeypatch.setattr(fact_finding, "_ELEMENTS", {})
    assert any("peak_bytes" in line for line in of("nn.functional.mse_loss", table, 5).incorrect)
