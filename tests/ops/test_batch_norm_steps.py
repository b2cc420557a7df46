"""A batch norm in steps gives what PyTorch's gives, whatever the pieces of its batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.ops.families.batch_norm_steps import (
    batch_norm_by_statistics,
    batch_norm_statistics,
    batch_norm_steps,
    batch_norm_sums,
    steps_before,
)
from tensoropt.ops.kernels import SingleDevice
from tensoropt.placement.graph import placed_graph
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tests.models import Call
from tests.sharding.graph_check import check_graph

MOMENTUM, EPS = 0.2, 1e-3
HERE = SingleDevice()
SHAPES = [(8, 6), (8, 6, 5), (8, 6, 3, 5), (8, 6, 2, 3, 4)]


def steps_of(pieces, running, weight, bias):
    """The normalised pieces and the new running statistics."""
    count = sum(x.numel() // x.shape[1] for x in pieces)
    total = sum(batch_norm_sums(HERE, "", x, True) for x in pieces)
    statistics, *moved = batch_norm_statistics(HERE, "", total, *running, MOMENTUM, count, True)
    return [batch_norm_by_statistics(HERE, "", x, statistics, weight, bias, EPS) for x in pieces], moved


def both(shape, sizes, dtype, offset=0.0, affine=True, master=None):
    """(PyTorch's in float64, ours): results, gradients of input and parameters, new running statistics."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, of=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(of)

    x, upstream = random(*shape) + offset, random(*shape)
    parameters = [random(6, of=master or dtype) for _ in range(2 * affine)]
    running = random(6, of=master or dtype), random(6, of=master or dtype).abs()
    found = []
    for as_dtype in (torch.float64, None):
        leaves = [t.detach().to(as_dtype or t.dtype).clone().requires_grad_() for t in (x, *parameters)]
        moving = [t.to(as_dtype or t.dtype).clone() for t in running]
        if as_dtype is None:
            pieces, moving = steps_of(leaves[0].split(sizes), moving, *(leaves[1:] or (None, None)))
            y = torch.cat(pieces)
        else:
            of_channels = leaves[1:] or (None, None)
            y = nn.functional.batch_norm(leaves[0], *moving, *of_channels, True, MOMENTUM, EPS)
        y.backward(upstream.to(y.dtype))
        found.append([y.detach(), *(leaf.grad for leaf in leaves), *moving])
    return found


def furthest(wanted, found) -> float:
    return max(
        float((a - b.double()).abs().max() / a.abs().max()) for a, b in zip(wanted, found, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [[8], [4, 4], [1, 2, 5]])
@pytest.mark.parametrize("affine", [True, False])
def test_results_gradients_and_running_statistics(shape, sizes, affine) -> None:
    assert furthest(*both(shape, sizes, torch.float64, affine=affine)) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "master", "offset", "near"),
    [
        (torch.float32, None, 0.0, 1e-6),
        # PyTorch's own are 7e-5 off here: the values themselves have lost three digits.
        (torch.float32, None, 1000.0, 5e-4),
        (torch.bfloat16, torch.float32, 0.0, 1e-2),
        (torch.bfloat16, torch.bfloat16, 3.0, 1e-2),
    ],
)
def test_in_narrow_types(dtype, master, offset, near) -> None:
    wanted, found = both((16, 6, 8, 8), [4, 12], dtype, offset, master=master)
    assert furthest(wanted, found) < near
    assert [t.dtype for t in found] == [dtype, dtype, *[master or dtype] * 4]


def test_constant_channels_far_from_zero() -> None:
    """The variance is 0, and not what rounding leaves of the difference of two large numbers."""
    x = torch.full((8, 2, 4), 1e7)
    (y,), (_, var) = steps_of([x], (torch.zeros(2), torch.ones(2)), None, None)
    # PyTorch's own are up to 16 off: 1e7 / sqrt(eps) is rounded to multiples of 32.
    assert float(y.abs().max()) < 16
    assert torch.equal(var, torch.full((2,), 1 - MOMENTUM))


def test_evaluation_uses_the_running_statistics_and_no_sums() -> None:
    x, running = torch.randn(4, 3), (torch.randn(3), torch.rand(3))
    sums = batch_norm_sums(HERE, "", x, False)
    assert torch.equal(sums, torch.zeros(2, 3, dtype=torch.float64))
    statistics, *same = batch_norm_statistics(HERE, "", sums, *running, MOMENTUM, 4, False)
    assert [a is b for a, b in zip(same, running, strict=True)] == [True, True]
    y = batch_norm_by_statistics(HERE, "", x, statistics, None, None, EPS)
    assert torch.allclose(y, nn.functional.batch_norm(x, *running, eps=EPS))


def graph_of(norm: nn.Module, x: torch.Tensor) -> GroupGraph:
    model = Call(lambda m, x: m.norm(x * m.s), norm=norm, s=(x.shape[-1],))
    found = capture(model, (x,), loss=lambda y: y.square().sum(), mode="train").graph
    return group_operators(refine_graph(found))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 4, 6), (8, 4, 6, 2)])
def test_the_rules_hold(shape, affine) -> None:
    """Whole and in pieces of batch and channels; pieces of the batch give terms of the sums."""
    kind = nn.BatchNorm1d if len(shape) == 3 else nn.BatchNorm2d
    groups = graph_of(kind(4, affine=affine), torch.randn(shape))
    (norm,) = (op for op in groups.atoms.graph.operators if "batch_norm" in op.target)
    atoms = placed_graph(groups, {norm.name: ("batch", 2)}).groups.atoms
    report = check_graph(atoms)
    assert not report.mismatches, str(report)
    steps = batch_norm_steps(norm, groups.atoms.graph.tensors)
    assert steps is not None
    assert [op.name for op in atoms.graph.operators if op in steps] == [op.name for op in steps[:3]]
    assert steps_before(atoms.graph.by_name[norm.name], atoms.graph.producer) == steps[:2]
    for op in steps[:3]:
        loops = {dim.name for dim in atoms.spaces[op.name].dims if dim.splittable}
        assert loops == ({"channels"} if op is steps.statistics else {"batch", "channels"})


def test_no_other_operator_has_steps() -> None:
    groups = graph_of(nn.BatchNorm1d(4), torch.randn(8, 4, 6))
    tensors = groups.atoms.graph.tensors
    (norm,) = (op for op in groups.atoms.graph.operators if "batch_norm" in op.target)
    for op in groups.atoms.graph.operators:
        assert (batch_norm_steps(op, tensors) is not None) == (op is norm)
    frozen = replace(norm, args=(*norm.args[:5], False, *norm.args[6:]))
    assert batch_norm_steps(frozen, tensors) is None
