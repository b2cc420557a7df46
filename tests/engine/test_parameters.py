"""Parameters as DTensors: each rank's part is the one that PyTorch derives from shape and placements."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensoropt.engine.parameters import _as_dtensor
from tensoropt.ops.layouts import local_shape
from tensoropt.verify.fake_ranks import fake_job
from tests.execute import part_jobs


@pytest.mark.parametrize(
    ("atoms", "layout"),
    [
        (((25, 4), (8,)), (-1, 0)),  # heads of a query projection, 7, 7, 7 and 4 of 25
        (((8,), (25, 4)), (-1, 1)),  # of the projection behind attention
        (((3, 5, 4), (8,)), (-1, 1)),  # of a fused one
        (((24, 4), (8,)), (-1, 0)),
        (((50,), (8,)), (-1, 0)),
    ],
)
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


@pytest.mark.distributed
def test_pytorch_puts_shards_together(ranks):
    assert ranks.run(part_jobs.put_together, (1, 2, 1), CASES) == [[], []]


@pytest.mark.slow
@pytest.mark.distributed
def test_pytorch_puts_shards_of_two_axes_together(four_ranks):
    """Axes may cut the same dim, inside it too, in any order."""
    assert four_ranks.run(part_jobs.put_together, (1, 2, 2), CASES) == [[]] * 4
