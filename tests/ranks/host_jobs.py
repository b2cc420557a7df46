"""Jobs of several hosts that tests start with torchrun, by name."""

import json
import os
import sys

import torch
import torch.distributed as dist

from tensoropt import MeasurementError, load_cluster
from tensoropt.cluster.hosts import network, together
from tensoropt.profiling.links import measure_links
from tensoropt.ranks.hosts import job_ranks, run_in_job
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.worker import tell
from tensoropt.ranks.worker_process import RankError

SIZES = (256 * 1024, 512 * 1024, 1024**2)


def where(rank, world_size):
    summed = torch.full((2,), float(rank))
    dist.all_reduce(summed)
    tell("here")
    return rank, float(summed[0]), os.getppid()


def fails(rank, world_size, failing):
    if rank == failing:
        raise MeasurementError("refused")


def measure() -> int:
    """Time one collective between the first ranks of the hosts, and say what was found."""
    cluster = together([load_cluster("cpu:1")] * 2, network("1Gbit/s"))
    (mesh,) = cluster.meshes()
    pool = local_pool(cluster)
    assert pool is not None
    with pool:
        fits = measure_links(cluster, mesh, pool, sizes=SIZES, kinds=["broadcast"], pairs=False)
    print(json.dumps({str(size): s for size, s, *_ in fits.collectives["broadcast", (0,)][0].points}))
    return 0


def lose() -> int:
    """Use ranks of both hosts, let one of them fail, and say what was found."""
    pool, told = job_ranks(), []
    assert pool is not None
    found: dict[str, object] = {"hosts": pool.hosts, "told": told}
    found["first"] = pool.run(where, on_message=lambda rank, content: told.append((rank, content)))
    try:
        pool.run(fails, 3)
    except RankError as error:
        found["lost"] = {"rank": error.rank, "kind": error.kind, "text": str(error)}
    found["after"] = [one[1] for one in pool.run(where)]
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_in_job(measure if sys.argv[1] == "measure" else lose))
