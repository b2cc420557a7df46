"""The names that a user can give: models of the zoo, clusters, planners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensoropt.cluster import list_clusters as cluster_names
from tensoropt.cluster import load_cluster
from tensoropt.planners import PLANNERS

if TYPE_CHECKING:
    from tensoropt.zoo.figures import Figures


@dataclass(frozen=True)
class ListedModel:
    """A model of the zoo.

    Attributes:
        name: its name for ``tensoropt explore zoo:NAME``.
        batch: the default number of samples of one training step.
        requires: the package of the extra ``zoo`` that it needs, if any.
        figures: the figures of one training step at that batch, if known.
        options: what can be written behind the name (``zoo:vgg16?image=64&dropout=0.5``), with its default.
    """

    name: str
    size: str
    batch: int
    description: str
    paper: str
    requires: str | None
    figures: Figures | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ListedCluster:
    """A cluster with a name.

    Attributes:
        devices: the number of devices; None if the name leaves it open.
        memory_bytes: bytes of each device; None if that depends on the number of devices.
        source: the source of its figures.
    """

    name: str
    devices: int | None
    device: str
    memory_bytes: float | None
    source: str


@dataclass(frozen=True)
class ListedPlanner:
    """A planner, and what it does."""

    name: str
    description: str


def list_models() -> tuple[ListedModel, ...]:
    """Return every model of the zoo, in the order of names."""
    # With PyTorch, which no other list needs.
    from tensoropt.zoo import list_models as zoo_entries
    from tensoropt.zoo.figures import figures

    counted = figures()
    return tuple(
        ListedModel(
            f"zoo:{e.name}", e.size, e.batch, e.description, e.paper, e.requires, counted.get(e.name),
            e.overrides,
        )
        for e in zoo_entries()
    )  # fmt: skip


def list_clusters() -> tuple[ListedCluster, ...]:
    """Return this machine's clusters, then the presets; ``NAMExN`` stands for any number of nodes."""
    return tuple(_listed(name) for name in ("local", "local:N", "cpu:N", *cluster_names()))


def _listed(name: str) -> ListedCluster:
    # A family is described by one of its members: all GPUs or cores here, two CPU ranks, one node.
    members = {"local:N": "local", "cpu:N": "cpu:2"}
    cluster = load_cluster(members.get(name, name.removesuffix("xN")))
    families = {
        "local:N": "N of this machine's GPUs, or N CPU ranks where it has none",
        "cpu:N": "N CPU ranks of this machine",
    }
    return ListedCluster(
        name,
        None if name.endswith("N") else cluster.device_count,
        cluster.device.name,
        None if name in families else cluster.memory_bytes,
        families.get(name, cluster.source),
    )


def list_planners() -> tuple[ListedPlanner, ...]:
    """Return the frontier's own search, then the published methods."""
    return tuple(ListedPlanner(name, about) for name, about in PLANNERS.items())
