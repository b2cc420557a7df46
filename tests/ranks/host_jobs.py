"""Jobs of several hosts that tests start with torchrun, by name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from tensoropt.cluster import load_cluster
from tensoropt.cluster.hosts import network, together
from tensoropt.errors import MeasurementError
from tensoropt.profiling.links import measure_links
from tensoropt.ranks.hosts import job_hosts, run_in_job
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError

SIZES = (256 * 1024, 512 * 1024, 1024**2)


def where(rank: int, world_size: int) -> tuple[int, float, int, int]:
    summed = torch.full((2,), float(rank))
    dist.all_reduce(summed)
    return rank, float(summed[0]), os.getppid(), os.getpid()


def dies(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        time.sleep(600)


def fails(rank: int, world_size: int, failing: int) -> None:
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


def lose(how: str) -> int:
    """Use ranks of both hosts, lose some of them in one way, and say what was found."""
    hosts = job_hosts()
    assert hosts is not None
    found: dict[str, object] = {"hosts": len(hosts), "own": os.getpid()}
    with RankPool(4, timeout_s=60.0, hosts=hosts) as pool:
        found["first"] = pool.run(where)
        function, timeout_s = {"fails": (fails, 60.0), "dies": (dies, 60.0), "hangs": (hangs, 4.0)}[how]
        try:
            pool.run(function, 3, timeout_s=timeout_s)
        except RankError as error:
            found["lost"] = {"rank": error.rank, "kind": error.kind, "text": str(error)}
        found["after"] = [one[1] for one in pool.run(where)]
        found["ranks"] = [one[3] for one in pool.run(where)]
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_in_job(measure if sys.argv[1] == "measure" else partial(lose, sys.argv[1])))
