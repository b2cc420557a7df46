"""Storage options of parameters, by hand and by rule."""

from __future__ import annotations

import itertools

import pytest

from tensoropt.costs.parameters import ahead_options, sharded_layout, storage_options, unsharded_options
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import (
    GATHERED_AHEAD,
    GATHERED_ONCE,
    PARTIAL,
    PARTIAL_GRAD,
    REDUCED_LAST,
    REPLICATE,
)
from tensoropt.sharding.reshard.steps import forward_placements, resharding_steps

R, RP, PR = REPLICATE, PARTIAL_GRAD, PARTIAL
WEIGHT = Tensor("w", (8, 6), "float32", "parameter", True)
BIAS = Tensor("b", (8,), "float32", "parameter", True)
FROZEN = Tensor("f", (8, 6), "float32", "parameter", False)


def options(tensor, sizes, use, mesh):
    return [home for (home,) in storage_options((tensor,), (sizes,), (use,), mesh)]


def test_data_parallel_parameter_is_whole_or_sharded():
    assert options(WEIGHT, (8, 6), (R, RP), (1, 2)) == [(R, RP), (R, 0)]


def test_each_axis_and_both():
    assert options(WEIGHT, (8, 6), (R, RP, RP), (1, 2, 2)) == [(R, RP, RP), (R, 0, 0), (R, 0, RP), (R, RP, 0)]


def test_an_axis_that_splits_the_use_is_no_choice():
    """ZeRO goes inside the shard where one gather brings it back."""
    assert options(WEIGHT, (8, 6), (R, 0), (1, 2)) == [(R, 0)]
    assert options(WEIGHT, (8, 6), (R, 0, RP), (1, 2, 2)) == [(R, 0, RP), (R, 0, 0)]
    # [R, S(0)] -> the outer axis cannot shard the same atom and be gathered alone: it takes the next one.
    assert options(WEIGHT, (8, 6), (R, RP, 0), (1, 2, 2)) == [(R, RP, 0), (R, 1, 0)]


def test_what_does_not_divide_stays_whole():
    odd = Tensor("o", (7, 6), "float32", "parameter", True)
    assert options(odd, (7, 6), (R, RP), (1, 2)) == [(R, RP), (R, 1)]
    assert options(Tensor("t", (7, 5), "float32", "parameter", True), (7, 5), (R, RP), (1, 2)) == [(R, RP)]
    assert options(Tensor("s", (), "float32", "parameter", True), (), (R, RP), (1, 2)) == [(R, RP)]


def test_an_added_bias_is_stored_whole():
    assert options(BIAS, (8,), (R, PR), (1, 2)) == [(R, R), (R, 0)]


def test_without_a_gradient_there_is_no_partial_one():
    assert options(FROZEN, (8, 6), (R, RP), (1, 2)) == [(R, R), (R, 0)]


def test_parameters_of_a_group_choose_together():
    found = storage_options((WEIGHT, BIAS), ((8, 6), (8,)), ((R, RP), (R, RP)), (1, 2))
    assert found == (((R, RP), (R, RP)), ((R, 0), (R, 0)))


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 2, 2), (1, 2, 4), (1, 2, 2, 2)], ids=str)
def test_every_option_comes_back_by_one_gather(mesh):
    for sizes in [(8, 6), (4, 2, 6), (12,), (3, 16)]:
        for use in itertools.product((R, RP, 0), repeat=len(mesh) - 1):
            whole = (R, *use)
            found = options(Tensor("w", sizes, "float32", "parameter", True), sizes, whole, mesh)
            assert found[0] == whole
            assert len(found) == len(set(found))
            for home in found[1:]:
                assert all(h == w for h, w in zip(home, whole, strict=True) if w not in (R, RP))
                steps = resharding_steps(sizes, mesh, forward_placements(home), forward_placements(whole))
                assert [s.kind for s in steps] == ["all_gather"]
            axes = tuple(a for a in range(1, len(mesh)) if whole[a] != 0)
            if axes:
                home = sharded_layout(sizes, mesh, whole, axes)
                assert home is None or home in found


def unsharded(tensors, sizes, mesh):
    homes = storage_options(tensors, sizes, tuple((R, *(RP for _ in mesh[1:])) for _ in tensors), mesh)
    return unsharded_options(tensors, homes, mesh)


def test_gathered_copies_can_be_held():
    assert unsharded((WEIGHT,), ((8, 6),), (1, 2)) == (((GATHERED_ONCE, 0),),)
    every = unsharded((WEIGHT,), ((8, 6),), (1, 2, 2))
    assert every == (((GATHERED_ONCE, 0, 0),), ((GATHERED_ONCE, 0, RP),), ((GATHERED_ONCE, RP, 0),))


def test_what_is_sharded_can_be_gathered_ahead():
    every = storage_options((WEIGHT, BIAS), ((8, 6), (8,)), ((R, RP, RP), (R, RP, RP)), (1, 2, 2))
    assert ahead_options(every) == tuple(
        tuple((GATHERED_AHEAD, *layout[1:]) for layout in layouts) for layouts in every[1:]
    )
    assert ahead_options(every[:1]) == ()


def test_a_gradient_can_wait_for_the_last_of_several_micro_batches():
    assert unsharded((WEIGHT,), ((8, 6),), (2, 2)) == (((GATHERED_ONCE, 0),), ((REDUCED_LAST, 0),))


def test_only_what_is_trained_and_sharded_is_held():
    odd = Tensor("o", (7, 5), "float32", "parameter", True)
    assert unsharded((odd,), ((7, 5),), (2, 2)) == ()
    assert unsharded((FROZEN,), ((8, 6),), (2, 2)) == ()
    assert unsharded((WEIGHT, FROZEN), ((8, 6), (8, 6)), (1, 2)) == (((GATHERED_ONCE, 0), (R, 0)),)


def test_narrow_gradients_wait_as_well():
    """They add up in the type in which the parameter is stored."""
    mixed = Tensor("m", (8, 6), "bfloat16", "parameter", True, master_dtype="float32")
    assert unsharded((mixed,), ((8, 6),), (2, 2)) == unsharded((WEIGHT,), ((8, 6),), (2, 2))


@pytest.mark.parametrize(
    ("sizes", "mesh", "axes", "layout"),
    [
        ((47, 33), (1, 2), (1,), (REPLICATE, 0)),  # 24 rows and 23
        ((47, 32), (1, 2), (1,), (REPLICATE, 1)),  # an atom that divides goes first
        ((15,), (1, 2), (1,), None),  # the largest would be too much larger than the mean
        ((47, 33), (1, 2, 2), (1, 2), None),  # two axes would cut pieces of pieces
    ],
)
def test_what_no_atom_divides_is_cut_unevenly_by_one_axis(sizes, mesh, axes, layout):
    whole = (REPLICATE, *(PARTIAL_GRAD for _ in mesh[1:]))
    assert sharded_layout(sizes, mesh, whole, axes) == layout
