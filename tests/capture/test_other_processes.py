"""Models that ask for other processes: refused if they would communicate, otherwise the graph of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import is_initialized  # a name that no patch of the module changes

from tensoropt import load_model
from tensoropt.capture import capture
from tensoropt.capture.other_processes import no_other_processes
from tensoropt.errors import CaptureError
from tensoropt.verify.fake_ranks import fake_job
from tests.models import Call


def centred(x: torch.Tensor) -> torch.Tensor:
    if is_initialized() and dist.get_world_size() > 1:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        x = x - mean
    return x


def added(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD) if dist.is_initialized() else x


def gathered(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(differentiable.all_gather(x)) if dist.is_initialized() else x


def together(x: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.barrier()
    return x


def logged(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if dist.is_initialized() and dist.get_rank() == 0 else 1)


def net(function):
    layers = {"linear": nn.Linear(4, 6), "norm": nn.SyncBatchNorm(6)}
    return Call(lambda m, x: function(m.norm(m.linear(x))).square().mean(), **layers)


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("function", [centred, added, gathered, together])
def test_a_model_that_communicates_if_it_can_is_refused(function, mode):
    with pytest.raises(CaptureError, match=rf"{__file__}:\d+ communicates with other processes if there are"):
        capture(net(function), (torch.randn(8, 4),), mode=mode)


BUILT = """
import torch
import torch.distributed as dist
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 6)
        self.group = dist.group.WORLD if dist.is_initialized() else None

    def forward(self, x):
        y = super().forward(x).square().mean()
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        return y

def build():
    return Net(), (torch.randn(8, 4),)

def wrapped():
    model = nn.Sequential(nn.Linear(4, 6), nn.Flatten(0))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    return model, (torch.randn(8, 4),), {}, torch.mean
"""


def test_a_model_that_takes_a_group_when_it_is_built_is_refused_if_its_step_uses_it(tmp_path):
    file = tmp_path / "grouped.py"
    file.write_text(BUILT)
    with pytest.raises(CaptureError, match=rf"{file}:14 communicates with other processes if there are"):
        load_model(f"{file}:build")
    assert type(load_model(f"{file}:wrapped").model.model) is nn.Sequential


def test_a_model_that_only_asks_has_the_graph_of_one_process():
    alone = capture(net(logged), (torch.randn(8, 4),)).graph
    assert any(
        note.endswith("finds no process group: the graph is that of one process") for note in alone.notes
    )
    with fake_job(0, 2):
        as_rank = capture(net(logged), (torch.randn(8, 4),)).graph
        assert dist.is_initialized()
        with no_other_processes() as asked:
            assert not dist.is_initialized()
        assert len(asked) == 1
    assert [op.target for op in as_rank.operators] == [op.target for op in alone.operators]


def test_layers_of_pytorchs_own_ask_for_nothing():
    graph = capture(net(nn.Identity()), (torch.randn(8, 4),)).graph
    assert any("batch_norm" in op.target for op in graph.operators)
    assert not graph.notes
