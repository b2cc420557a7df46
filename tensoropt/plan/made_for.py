"""What cluster a plan or an exploration was made for, as far as that says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.errors import ClusterError


def made_for(cluster: Mapping[str, Any]) -> Cluster | None:
    """The cluster whose data a plan or an exploration keeps; None where it does not say, or not readably."""
    try:
        return Cluster.from_dict(cluster)
    except ClusterError:
        return None


def for_gpus(cluster: Mapping[str, Any]) -> bool:
    """Whether that cluster is known to be one of GPUs."""
    found = made_for(cluster)
    return found is not None and found.device_type == "cuda"


def device_words(cluster: Cluster) -> str:
    """``2 x H100-80GB (cuda)``: how many devices, of which kinds and type."""
    kinds = " or ".join(dict.fromkeys(kind.name for kind in cluster.devices))
    return f"{cluster.device_count} x {kinds} ({cluster.device_type})"
