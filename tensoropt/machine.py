"""Functions on this machine: measuring its links, detecting it as a cluster, serving the dashboard."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.cluster.local import hosts_alike
from tensoropt.console import shows_progress
from tensoropt.errors import TensorOptError, import_extra
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.links import measure_links as measure_links_of_mesh
from tensoropt.profiling.store import ProfileStore
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
    """Return fits of collectives and point-to-point messages of this machine, by mesh label.

    Args:
        cluster: ``local``, ``local:N`` or ``cpu:N``.
        refresh: repeat measurements already in the store.
        store: the store for fits; by default the user's.
        progress: as in :func:`tensoropt.explore`.

    Raises:
        TensorOptError: the cluster is not this machine, or has a single device.
    """
    where = load_cluster(cluster)
    if (ranks := local_pool(where)) is None:
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


def detect(hosts: int = 1, network: str = "") -> Cluster:
    """Return this host as a cluster, or several that are assumed to be like it, which the cluster's
    ``source`` states.

    Args:
        hosts: the number of hosts.
        network: the catalogue's link between them, with the number of cards of each host before it if there
            are several: ``IB-400G``, ``8xIB-400G``.

    Raises:
        ClusterError: the number of hosts is below 1, or their network is unknown.
    """
    local = load_cluster("local")
    return local if hosts == 1 else hosts_alike(local, hosts, network)


def dashboard(
    folder: str | os.PathLike[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    say: Callable[[str], Any] = print,
) -> str:
    """Serve the dashboard until interrupted; return its address.

    The dashboard is a layer above this package, so it is imported by name.

    Args:
        folder: the folder of one or several explorations; None for only the ready-made ones.
        port: 0 for any free port.
        say: called with the address once known.

    Raises:
        MissingExtraError: the extra ``app`` is not installed.
        TensorOptError: the folder holds no exploration, or the address cannot be bound.
    """
    server = import_extra("tensoropt_app.server", "app", "the dashboard")
    address: str = server.serve(Path(folder) if folder else None, host=host, port=port, say=say)
    return address
