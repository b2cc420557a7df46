"""Hardware: devices, links, the meshes that a cluster can be viewed as, and the sources of cluster
descriptions."""

from tensoropt.cluster.catalog import ASSUMED as ASSUMED
from tensoropt.cluster.catalog import Reached as Reached
from tensoropt.cluster.catalog import device_kind as device_kind
from tensoropt.cluster.catalog import host_seconds as host_seconds
from tensoropt.cluster.catalog import job_spread as job_spread
from tensoropt.cluster.catalog import link as link
from tensoropt.cluster.catalog import list_clusters as list_clusters
from tensoropt.cluster.catalog import list_devices as list_devices
from tensoropt.cluster.catalog import list_links as list_links
from tensoropt.cluster.catalog import named_kind as named_kind
from tensoropt.cluster.catalog import reached_by as reached_by
from tensoropt.cluster.catalog import slower_beside as slower_beside
from tensoropt.cluster.files import load_cluster as load_cluster
from tensoropt.cluster.hardware import Cluster as Cluster
from tensoropt.cluster.hardware import DeviceKind as DeviceKind
from tensoropt.cluster.hardware import Level as Level
from tensoropt.cluster.hardware import Link as Link
from tensoropt.cluster.hardware import Mesh as Mesh
from tensoropt.cluster.local import available_cores as available_cores
from tensoropt.cluster.local import pin_rank as pin_rank
from tensoropt.cluster.local import rank_cores as rank_cores
