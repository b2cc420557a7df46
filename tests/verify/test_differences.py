"""The one comparison of results says what numbers do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.verify.differences import (
    difference,
    largest,
    largest_of,
    named_difference,
    not_finite,
    outputs_difference,
    worst,
)
from tests import naive

NAN, INF = math.nan, math.inf
VALUES = st.lists(st.sampled_from([0.0, 1.0, -2.0, 0.5, NAN, INF, -INF]), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("got", "want", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([-1.0, 4.0], [1.0, 4.0], 0.5),
        ([NAN, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([NAN, 2.0], [2.0, NAN], INF),
        ([NAN, 3.0], [NAN, 4.0], 0.25),
        ([INF, 3.0], [INF, 4.0], 0.25),
        ([INF, 3.0], [-INF, 4.0], INF),
        ([INF, 3.0], [NAN, 4.0], INF),
        ([INF, 4.0], [1.0, 4.0], INF),
        ([NAN], [NAN], 0.0),
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([1.0], [1.0, 1.0], INF),
    ],
)
def test_a_difference_is_relative_and_strict(got, want, apart):
    assert difference(torch.tensor(got), torch.tensor(want)) == apart
    assert outputs_difference([torch.tensor(got)], [torch.tensor(want)]) == apart
    assert named_difference({"a": torch.tensor(got)}, {"a": torch.tensor(want)}) == apart


@given(VALUES, VALUES)
def test_it_equals_its_twin(got, want):
    want = (want * len(got))[: len(got)]
    assert difference(torch.tensor(got), torch.tensor(want)) == naive.difference(got, want)


def test_the_scale_is_the_whole_tensors_or_the_floor():
    got, want = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    assert difference(got, want, torch.tensor([1.0, -8.0, NAN, INF])) == 1 / 8
    assert difference(got, want, floor=4.0) == 1 / 4
    assert difference(got, want, torch.tensor([8.0]), floor=4.0) == 1 / 8
    assert difference(torch.tensor([1e-40]), torch.tensor([0.0])) == pytest.approx(1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_every_type_is_compared(dtype):
    one, other = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert difference(one, one) == 0.0
    assert difference(one, other) == 1.0


def test_the_imaginary_part_counts():
    assert difference(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])) == 0.5
    assert difference(torch.tensor([1 + 1j]), torch.tensor([complex(1, NAN)])) == INF


def test_one_of_many_is_enough():
    right, wrong = torch.ones(3), torch.tensor([1.0, NAN, 1.0])
    for outputs in ([right, wrong, right], [wrong, right, right], [right, right, wrong]):
        assert outputs_difference(outputs, [right] * 3) == INF
        named = {str(i): value for i, value in enumerate(outputs)}
        assert named_difference(named, dict.fromkeys(named, right)) == INF
    assert worst({"a": 0.5, "b": INF, "c": 2.0}) == (INF, "b")
    assert worst({}) == (0.0, "")
    with pytest.raises(AssertionError):
        outputs_difference([right], [])


def test_sizes_are_of_what_is_finite():
    assert largest(torch.tensor([NAN, -3.0, INF])) == 3.0
    assert largest(torch.tensor([])) == largest(torch.tensor([NAN])) == largest_of([]) == 0.0
    assert largest_of([torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([NAN])]) == 2.0
    named = {"a": torch.tensor([NAN, 1.0, -INF]), "b": torch.ones(2), "c": torch.tensor([1, 2])}
    assert not_finite(named) == {"a": 2}
