"""Clusters: their devices and links, their views as meshes of ranks, and the sources of descriptions."""

from tensoropt.cluster.catalog import (
    ASSUMED,
    host_seconds,
    job_spread,
    list_clusters,
    list_devices,
    named_kind,
    reached_by,
    slower_beside,
)
from tensoropt.cluster.files import load_cluster
from tensoropt.cluster.hardware import Cluster, DeviceKind, Link, Mesh
from tensoropt.cluster.local import available_cores, pin_rank, rank_cores

__all__ = [
    "ASSUMED",
    "Cluster",
    "DeviceKind",
    "Link",
    "Mesh",
    "available_cores",
    "host_seconds",
    "job_spread",
    "list_clusters",
    "list_devices",
    "load_cluster",
    "named_kind",
    "pin_rank",
    "rank_cores",
    "reached_by",
    "slower_beside",
]
