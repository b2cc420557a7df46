"""Hardware: devices, links, the meshes that a cluster can be viewed as, and the sources of cluster
descriptions."""

from tensoropt.cluster.catalog import device_kind, link, list_clusters, list_devices, list_links, named_kind
from tensoropt.cluster.devices import DeviceKind, Link
from tensoropt.cluster.files import load_cluster
from tensoropt.cluster.hardware import Cluster, Level
from tensoropt.cluster.host import HostSeconds, host_seconds
from tensoropt.cluster.local import available_cores, gpu_rank_cores, pin_rank, rank_cores, stolen_s
from tensoropt.cluster.mesh import Mesh
from tensoropt.cluster.reached import ASSUMED, Reached, reached_by, slower_beside

__all__ = [
    "ASSUMED",
    "Cluster",
    "DeviceKind",
    "HostSeconds",
    "Level",
    "Link",
    "Mesh",
    "Reached",
    "available_cores",
    "device_kind",
    "gpu_rank_cores",
    "host_seconds",
    "link",
    "list_clusters",
    "list_devices",
    "list_links",
    "load_cluster",
    "named_kind",
    "pin_rank",
    "rank_cores",
    "reached_by",
    "slower_beside",
    "stolen_s",
]
