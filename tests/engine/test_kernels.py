"""Kernels whose shard is more than a smaller call, against PyTorch's own operators.

Parameters as DTensors: each rank's part is the one that PyTorch derives from shape and placements.
"""

from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensoropt.engine.parameters import _as_dtensor
from tensoropt.ops.families.generators import dropout_kernel, keep_mask
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.layouts import local_shape
from tensoropt.verify.fake_ranks import fake_job
from tests.execute import part_jobs


class At(SingleDevice):
    """A context at a fixed coordinate on every axis."""

    def __init__(self, index: int, seed: int = 0, step: int = 0):
        super().__init__(seed, step)
        self.index = index

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return self.index


def mask(context: SingleDevice, shape: tuple[int, ...], pieces: tuple, p: float = 0.3) -> torch.Tensor:
    return keep_mask(context, "layer", p, shape, pieces, torch.device("cpu"))


def test_keep_rate():
    whole = ((400, 500, 400, ()), (500, 1, 500, ()))
    for p in (0.1, 0.5, 0.9):
        kept = mask(SingleDevice(), (400, 500), whole, p).double()
        spread = (p * (1 - p) / kept.numel()) ** 0.5
        assert abs(float(kept.mean()) - (1 - p)) < 5 * spread
        # Neighbours in a row, in a column and in time are as good as independent.
        later = mask(SingleDevice(step=1), (400, 500), whole, p).double()
        for a, b in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1]), (kept, later)):
            correlation = float(((a - a.mean()) * (b - b.mean())).mean()) / (p * (1 - p))
            assert abs(correlation) < 5 / kept.numel() ** 0.5


def test_shards_are_slices_of_the_whole_mask():
    whole = mask(SingleDevice(), (8, 6), ((8, 6, 8, ()), (6, 1, 6, ())))
    rows = [mask(At(i), (4, 6), ((4, 6, 4, (1,)), (6, 1, 6, ()))) for i in range(2)]
    columns = [mask(At(i), (8, 3), ((8, 6, 8, ()), (3, 1, 3, (1,)))) for i in range(2)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(torch.cat(columns, 1), whole)
    assert not torch.equal(rows[0], rows[1])


def test_mask_depends_on_seed_step_and_name():
    pieces = ((64, 1, 64, ()),)
    masks = [mask(c, (64,), pieces) for c in (SingleDevice(), SingleDevice(1), SingleDevice(0, 1))]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    other = keep_mask(SingleDevice(), "other", 0.3, (64,), pieces, torch.device("cpu"))
    assert not torch.equal(masks[0], other)
    assert torch.equal(masks[0], mask(SingleDevice(), (64,), pieces))


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_dropout_scales_and_differentiates(p):
    pieces = ((1000, 1, 1000, ()),)
    x = torch.ones(1000, requires_grad=True)
    y = dropout_kernel(SingleDevice(), "layer", pieces, x, p)
    kept = mask(SingleDevice(), (1000,), pieces, p) / (1 - p or 1)
    assert torch.allclose(y, kept)
    y.sum().backward()
    assert torch.allclose(x.grad, kept)


def test_split_losses_and_norms(ranks):
    for found in ranks.run(part_jobs.kernels_on_ranks):
        assert all(value < 2e-6 for value in found.values()), found


@pytest.mark.parametrize(("atoms", "layout"), [
    (((25, 4), (8,)), (-1, 0)),  # heads of a query projection, 7, 7, 7 and 4 of 25
    (((8,), (25, 4)), (-1, 1)),  # of the projection behind attention
    (((3, 5, 4), (8,)), (-1, 1)),  # of a fused one
    (((24, 4), (8,)), (-1, 0)),
    (((50,), (8,)), (-1, 0)),
])  # fmt: skip
def test_every_rank_holds_the_part_that_a_dtensor_has_there(atoms, layout):
    for rank in range(4):
        runtime = SimpleNamespace(mesh=(1, 4), place=(0, rank))
        with fake_job(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            local = torch.zeros(local_shape(atoms, layout, runtime.mesh, runtime.place))
            found = _as_dtensor(local, atoms, layout, mesh, runtime)
            shape, _ = compute_local_shape_and_global_offset(found.shape, mesh, found.placements)
        assert prod(found.shape) == prod(map(prod, atoms))
        assert tuple(found.to_local().shape) == tuple(shape)


CASES = [((3, 4, 4),), ((4, 4, 2),), ((2, 4), (4, 2)), ((4,), (3, 4))]


def test_pytorch_puts_shards_together(ranks):
    assert ranks.run(part_jobs.put_together, (1, 2, 1), CASES) == [[], []]


@pytest.mark.slow
def test_pytorch_puts_shards_of_two_axes_together(four_ranks):
    """Axes may cut the same dim, inside it too, in any order."""
    assert four_ranks.run(part_jobs.put_together, (1, 2, 2), CASES) == [[]] * 4
