"""The cost model of a pipeline, whose device groups (places) are equal, consecutive parts of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from tensoropt.cluster import Cluster, DeviceKind, Mesh, slower_beside
from tensoropt.costs.prices import ClusterCosts, ComputeCosts, DevicePrices, LinkCosts, Prices, Queues
from tensoropt.costs.process_memory import NO_PROCESS, ProcessMemory
from tensoropt.errors import ClusterError
from tensoropt.graph import OperatorGraph
from tensoropt.plan.kinds import STAGE_AXIS
from tensoropt.profiling.cuda_kernels import Capability, capability_of
from tensoropt.profiling.overheads import Overheads
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.simulate.candidates import Overlap, overlap_of


def job_meshes(cluster: Cluster, places: int, most_axes: int) -> tuple[Mesh, ...]:
    """Return the meshes for pipelines on a cluster; the first axis, the pipeline, has the outermost links.

    Args:
        most_axes: the largest number of axes of a stage's mesh.

    Raises:
        ClusterError: the cluster has no ``places`` equal parts along the boundaries of its link levels.
    """
    meshes = []
    for inner in _place_of(cluster, places).meshes(most_axes):
        axes = [(size, name) for size, name in zip(inner.shape, inner.names, strict=True) if size > 1]
        meshes.append(
            Mesh(shape=(places, *(size for size, _ in axes)), names=(STAGE_AXIS, *(name for _, name in axes)))
        )
    return tuple(meshes)


def degrees_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of device groups into which a cluster can be divided for a pipeline."""
    degrees = []
    for places in range(2, cluster.device_count + 1):
        if cluster.device_count % places == 0:
            try:
                _place_of(cluster, places)
            except ClusterError:
                continue
            degrees.append(places)
    return tuple(degrees)


def kinds_at(cluster: Cluster, places: int) -> tuple[tuple[DeviceKind, ...], ...]:
    """Return the kinds of devices in each device group; groups consist of consecutive ranks."""
    size = cluster.device_count // places
    parts = (cluster.devices[place * size : (place + 1) * size] for place in range(places))
    return tuple(tuple({kind.name: kind for kind in part}.values()) for part in parts)


def _place_of(cluster: Cluster, places: int) -> Cluster:
    """Return the first of ``places`` equal parts of a cluster; ClusterError if there are no such parts."""
    devices = cluster.device_count
    if places < 2 or devices % places:
        raise ClusterError(
            f"{devices} devices cannot be divided into {places} equal parts of a pipeline; give a divisor "
            "of the number of devices that is at least 2"
        )
    part = cluster.subset(devices // places)
    # A level may not divide into parts of this size, such as 3 devices of a node of 4.
    if part.levels:
        level, within = part.levels[0], cluster.levels[-len(part.levels)]
        if within.size % level.size:
            raise ClusterError(
                f"{places} equal parts of cluster '{cluster.name}' would cut across its links: each has "
                f"{level.size} of the {within.size} members of a level ({level.name}); give a number "
                "of parts that divides them"
            )
    return part


class PlaceCommunication:
    """The costs of collectives within one device group, while all other groups run the same ones."""

    def __init__(self, job: LinkCosts):
        self.job = job

    @property
    def described(self) -> str:
        return f"a place of {self.job.described}"

    @staticmethod
    def _axes(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(axis + 1 for axis in axes)

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        """Return the duration in seconds of one collective over axes of the stage's mesh."""
        return self.job.time_s(kind, self._axes(axes), num_bytes)

    def source(self, kind: str, axes: Sequence[int]) -> str:
        return self.job.source(kind, self._axes(axes))


Source = TypeVar("Source", bound=ClusterCosts)


def sources_at(costs: Source, places: int) -> list[Source]:
    """Return, for each device group, the source of costs on the kinds of devices in that group."""
    return [costs.on(kinds) for kinds in kinds_at(costs.cluster, places)]


@dataclass(eq=False)
class PipelinePrices:
    """The cost model of a pipeline on one mesh of a cluster.

    Attributes:
        mesh: the whole job's mesh, whose first axis is the pipeline.
        compute, overheads: the durations of operators, and of small items such as copies, on the slowest kind
            of device while all ranks compute.
        beside: whether asynchronous communication overlaps computation.
        of_places: the cost model of each device group, if their kinds of devices differ.
        process_memory: graph -> the memory of a process besides tensors.
    """

    cluster: Cluster
    mesh: Mesh
    compute: ComputeCosts
    communication: LinkCosts
    overheads: Overheads
    optimizer: str
    beside: bool
    of_places: tuple[PipelinePrices, ...] = ()
    process_memory: Callable[[OperatorGraph], ProcessMemory] = lambda _: NO_PROCESS

    @classmethod
    def of(cls, costs: ClusterCosts, mesh: Mesh) -> PipelinePrices:
        """Return the cost model for a mesh, from a source whose measurements are complete."""
        communication = costs.communication(mesh, pairs=True)

        def made(source: ClusterCosts, of_places: tuple[PipelinePrices, ...] = ()) -> PipelinePrices:
            costs_of = source.compute(), communication, source.overheads(), source.optimizer
            return cls(source.cluster, mesh, *costs_of, source.beside, of_places, source.process_memory)

        sources = sources_at(costs, mesh.shape[0])
        if all(source is costs for source in sources):
            return made(costs)
        compute_of = {id(source): made(source) for source in sources}
        return made(costs, tuple(compute_of[id(source)] for source in sources))

    @cached_property
    def of_place(self) -> PlaceCommunication:
        return PlaceCommunication(self.communication)

    def at(self, place: int) -> PipelinePrices:
        """Return the cost model of one device group."""
        return self.of_places[place] if self.of_places else self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds of devices in each device group; empty if all groups have the same."""
        if not self.of_places:
            return ()
        places = (source.cluster.device_kinds for source in self.of_places)
        return tuple(" + ".join(kind.name for kind in kinds) for kinds in places)

    def room(self, place: int) -> float:
        """Return a group's smallest device memory in bytes; infinite (no limit) if all groups are equal."""
        return float(self.at(place).cluster.memory_bytes) if self.of_places else inf

    def of_stage(self, graph: GroupGraph, sizes: AxisSizes, in_flight: int = 1) -> Prices:
        """Return the cost model of a stage's graph.

        Args:
            sizes: the number of micro-batches, then the sizes of the axes of the stage's mesh.
            in_flight: the number of micro-batches whose tensors are in memory at once.
        """
        return Prices(
            graph,
            sizes,
            self.compute,
            self.of_place,
            self.optimizer,
            self.overheads,
            beside=self.beside,
            slower_beside=slower_beside(self.cluster),
            packs=self.cluster.device_type == "cpu",
            in_flight=in_flight,
        )

    @property
    def capability(self) -> Capability | None:
        """The GPUs' compute capability, on which the memory of attention kernels depends; CPUs have none."""
        on_gpu = self.cluster.device_type == "cuda"
        return capability_of(self.cluster.device.capability) if on_gpu else None

    @cached_property
    def overlap(self) -> Overlap:
        """How communication overlaps computation in a device group, and the links of each set of axes."""
        whole = overlap_of(self.cluster, self.mesh, beside=self.beside)
        of_place = {
            tuple(axis - 1 for axis in axes): links for axes, links in whole.by_axes.items() if 0 not in axes
        }
        return replace(whole, by_axes=of_place)

    @property
    def devices_per_place(self) -> int:
        return self.mesh.size // self.mesh.shape[0]

    def message_s(self, source: int, target: int, size: float) -> float:
        """Return the duration in seconds of a message between device groups, of ``size`` bytes per rank."""
        if source == target or not size:
            return 0.0
        first, second = source * self.devices_per_place, target * self.devices_per_place
        alone_s = self.communication.pair_time_s(first, second, size)
        # A message that takes no time alone takes none beside others.
        if not alone_s:
            return 0.0
        alone_s += 2 * self.message_end.device_s
        if self.communication.pair_source(first, second) != "data sheet":
            return alone_s
        rate = self.cluster.link(first, second).bandwidth_bytes_per_s
        return alone_s + size / rate * (self._sharing(first, second) - 1.0)

    @property
    def message_end(self) -> Queues:
        return DevicePrices(self.compute, self.overheads).message_end

    def _sharing(self, first: int, second: int) -> float:
        level = self.cluster.crossing_level(first, second)
        inner = 1
        for candidate in reversed(self.cluster.levels):
            if candidate.name == level.name:
                break
            inner *= candidate.size
        # The ranks of a device group that send through one child of the level at once, per link of that
        # child.
        return max(min(self.devices_per_place, inner) / level.link_count, 1.0)
