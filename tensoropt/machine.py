"""Functions that measure this machine's links, describe it as a cluster, or serve the dashboard."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.cluster.hosts import detected_hosts, taken_alike, together
from tensoropt.cluster.hosts import network as network_between
from tensoropt.console import shows_progress
from tensoropt.errors import ClusterError, TensorOptError, import_extra
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.links import measure_links as measure_links_of_mesh
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.hosts import gathered_from_hosts, in_job, job_ranks
from tensoropt.ranks.local_hardware import local_pool
from tensoropt.session.refining import MAX_AXES
from tensoropt.types import ProgressChoice, heard


@shows_progress
def measure_links(
    cluster: str | Cluster = "local",
    *,
    refresh: bool = False,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
) -> dict[str, LinkFits]:
    """Time collectives and messages on this machine, or on a job's hosts; return fitted costs by mesh label.

    Args:
        cluster: ``local``, ``local:N`` or ``cpu:N``; in a job, the file that :func:`detect` wrote.
        refresh: whether to repeat measurements that are already in the store.
        store: the profile store for the fitted costs; by default the user's.
        progress: as in :func:`tensoropt.explore`.

    Raises:
        TensorOptError: the cluster is not this machine, or has a single device.
    """
    where = load_cluster(cluster)
    if (number := detected_hosts(where)) > 1 and job_ranks() is None:
        raise TensorOptError(
            f"links between {number} hosts are timed by all of them together; run on each: torchrun "
            f"--nnodes {number} --nproc-per-node {where.device_count // number} ... -m tensoropt measure "
            "links --cluster FILE"
        )
    if (ranks := local_pool(where, mixed=True)) is None:
        raise TensorOptError(
            f"{where.name} is neither this machine's CPU ranks nor its GPUs, so its links cannot be timed "
            "here; use local, local:N or cpu:N"
        )
    if where.device_count < 2:
        raise TensorOptError("a single device has no links; give at least local:2")
    fits = {}
    with nullcontext(store) if store is not None else ProfileStore() as profile, ranks as pool:
        # All meshes of up to MAX_AXES axes, even those that an exploration skips.
        for mesh in where.meshes(MAX_AXES):
            fits[mesh.label] = measure_links_of_mesh(
                where,
                mesh,
                pool,
                profile,
                refresh=refresh,
                progress=heard(progress),
                stage=f"links {mesh.label}",
            )
    return fits


def detect(hosts: int | None = None, network: str = "") -> Cluster:
    """Return this host, or all hosts of a torchrun job, as a cluster.

    In a torchrun job, one process per host reports its devices. Otherwise all hosts are assumed to be like
    this one, and the cluster's ``source`` says so.

    Args:
        hosts: the number of hosts; by default those of the job, or this one.
        network: the links between hosts, ``8xIB-400G`` or ``100Gbit/s``.

    Raises:
        ClusterError: the number of hosts is below 1, their network is unknown, or they differ.
    """
    local = load_cluster("local")
    if hosts is not None and hosts < 1:
        raise ClusterError(f"the number of hosts is {hosts}; give at least 1")
    if hosts is None and in_job():
        found = gathered_from_hosts(local.to_dict)
        return together([Cluster.from_dict(data) for data in found], network_between(network))
    if hosts is None or hosts == 1:
        return local
    return taken_alike(together([local] * hosts, network_between(network)), hosts)


def dashboard(
    folder: str | os.PathLike[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    say: Callable[[str], Any] = print,
) -> str:
    """Serve the dashboard until interrupted; return its web address.

    Args:
        folder: the folder of one or several explorations; None for only those that come with the package.
        port: the port; 0 for any free one.
        say: called with the address once it is known.

    Raises:
        MissingExtraError: the extra ``app`` is not installed.
        TensorOptError: the folder holds no exploration, or the address cannot be bound.
    """
    server = import_extra("tensoropt_app.server", "app", "the dashboard")
    address: str = server.serve(Path(folder) if folder else None, host=host, port=port, say=say)
    return address
