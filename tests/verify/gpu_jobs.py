"""What ranks do of the checks that are made on GPUs, here on CPUs."""

import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tensoropt.engine import runtime
from tensoropt.engine.models import load_model
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.rank_checks import _replica_spread, check_plan
from tensoropt.verify.reference import Results, _of_first_rank
from tests.execute import jobs


def shared_results(rank, world):
    """Whether this rank ran the unsplit model, what it has of the results, and what is left of files."""
    ran = []

    def run() -> Results:
        ran.append(os.getpid())
        value = torch.full((3,), float(rank + 1))
        return Results((value,), {"w": value * 2}, {}, {}, 0.5, ran_on="cuda:0")

    found = _of_first_rank(run)
    dist.barrier()  # rank 0 takes the file away after the others have it
    left = [p.name for p in Path(tempfile.gettempdir()).glob("tensoropt-unsplit-*")]
    assert (found.floor, found.ran_on) == (0.5, "cuda:0")
    return bool(ran), {"out": found.outputs[0].clone(), "w": found.gradients["w"].clone()}, left


def spreads(rank, world, data, offset):
    """How far apart the replicas are where rank 1 adds something to one element of each parameter."""
    loaded = load_model(jobs.spec("mlp"))
    engine = ShardedEngine(Strategy.from_data(data, loaded.graph), loaded.values)
    values = {name: leaf.detach().clone() for name, leaf in engine.shards.leaves.items()}
    for value in values.values():
        value.view(-1)[0] = float("nan")  # alike on both
        value.view(-1)[-1] += offset * rank * value.nan_to_num().abs().max()
    return _replica_spread(engine, values)


def check_through_host(rank, world, *arguments):
    """:func:`check_plan` where messages lie in the host's memory on their way, as those from shared GPUs."""
    with mock.patch.object(runtime, "through_host", return_value=True):
        return check_plan(rank, world, *arguments)
