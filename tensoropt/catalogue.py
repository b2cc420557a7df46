"""What there is by name: models of the zoo, clusters, planners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensoropt.cluster import list_clusters as cluster_names
from tensoropt.cluster import load_cluster
from tensoropt.planners import PLANNERS

if TYPE_CHECKING:
    from tensoropt.zoo.figures import Figures


@dataclass(frozen=True)
class ListedModel:
    """A model of the zoo.

    Attributes:
        name: as ``tensoropt explore`` takes it, ``zoo:NAME``.
        batch: samples of one training step by default.
        requires: the package of the extra ``zoo`` that it needs, if any.
        figures: of one training step at that batch, where they are known.
    """

    name: str
    size: str
    batch: int
    description: str
    paper: str
    requires: str | None
    figures: Figures | None


@dataclass(frozen=True)
class ListedCluster:
    """A cluster by name.

    Attributes:
        devices: how many; None where the name leaves it open.
        memory_bytes: of each; None where that depends on how many there are.
        source: where its figures come from.
    """

    name: str
    devices: int | None
    device: str
    memory_bytes: float | None
    source: str


@dataclass(frozen=True)
class ListedPlanner:
    """A planner by name, and what it does."""

    name: str
    description: str


def list_models() -> tuple[ListedModel, ...]:
    """Every model of the zoo, in the order of its name."""
    # With PyTorch, which no other list needs.
    from tensoropt.zoo import list_models as zoo_entries
    from tensoropt.zoo.figures import figures

    known = figures()
    return tuple(
        ListedModel(f"zoo:{e.name}", e.size, e.batch, e.description, e.paper, e.requires, known.get(e.name))
        for e in zoo_entries()
    )


def list_clusters() -> tuple[ListedCluster, ...]:
    """This machine's clusters, then the presets; ``NAMExN`` stands for any number of nodes."""
    return tuple(_listed(name) for name in ("local", "local:N", "cpu:N", *cluster_names()))


def _listed(name: str) -> ListedCluster:
    # A family is described by one of its members: all GPUs or cores here, two CPU ranks, one node.
    members = {"local:N": "local", "cpu:N": "cpu:2"}
    one = load_cluster(members.get(name, name.removesuffix("xN")))
    families = {
        "local:N": "N of this machine's GPUs, or N CPU ranks where it has none",
        "cpu:N": "N CPU ranks of this machine",
    }
    return ListedCluster(
        name,
        None if name.endswith("N") else one.device_count,
        one.device.name,
        None if name in families else one.memory_bytes,
        families.get(name, one.source),
    )


def list_planners() -> tuple[ListedPlanner, ...]:
    """The frontier's own search, then the published methods."""
    return tuple(ListedPlanner(name, about) for name, about in PLANNERS.items())
