"""Kernels whose shard is more than a smaller call, against PyTorch's own operators."""

from __future__ import annotations

import pytest
import torch

from tensoropt.ops.families.generators import dropout_kernel, keep_mask
from tensoropt.ops.kernels import SingleDevice
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


def test_dropout_scales_and_differentiates():
    pieces = ((1000, 1, 1000, ()),)
    x = torch.ones(1000, requires_grad=True)
    y = dropout_kernel(SingleDevice(), "layer", pieces, x, 0.25)
    kept = mask(SingleDevice(), (1000,), pieces, 0.25)
    assert torch.allclose(y, kept / 0.75)
    y.sum().backward()
    assert torch.allclose(x.grad, kept / 0.75)


def test_dropout_of_everything():
    x = torch.ones(8, requires_grad=True)
    dropout_kernel(SingleDevice(), "layer", ((8, 1, 8, ()),), x, 1.0).sum().backward()
    assert torch.equal(x.grad, torch.zeros(8))


@pytest.mark.distributed
def test_split_losses_and_norms(ranks):
    for found in ranks.run(part_jobs.kernels_on_ranks):
        assert all(value < 2e-6 for value in found.values()), found
