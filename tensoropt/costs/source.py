"""The cost model of a cluster, from timings, fits or data sheets, and the cost tables built with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from tensoropt.cluster import DeviceKind, Mesh, reached_by
from tensoropt.costs.builder import TableBuilder
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.compute import (
    NO_EFFICIENCIES,
    MeasuredCompute,
    RooflineCompute,
    SlowestCompute,
    failed_otherwise,
)
from tensoropt.costs.edges import TableArrays
from tensoropt.costs.prices import ComputeCosts, Prices, runs_beside
from tensoropt.costs.process_memory import ProcessMemory, process_memory
from tensoropt.costs.residuals import NO_RESIDUALS, REST, Residuals, load_residuals
from tensoropt.costs.restrictions import FREE, Restriction
from tensoropt.costs.tables import CostTables, Template, group_keys, outline_templates, with_facts
from tensoropt.costs.timings import CostContext, Timings, WorkloadFacts
from tensoropt.graph import OperatorGraph
from tensoropt.profiling.overheads import Overheads, data_sheet_overheads
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload import Workload
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.groups import AxisStrategy, GroupGraph
from tensoropt.sharding.regions import Region
from tensoropt.types import DATA_SHEET, MEASURED


@dataclass
class CostSource(CostContext):
    """The cost model of a cluster, from facts (memory, FLOP) and timings of workloads, or from data sheets.

    Args:
        keep: the code version under which the store keeps tables; None to keep none.
        fused: whether GPUs run neighbouring element-wise operators and norms as one kernel, where not timed.
        dated: the month, such as ``2024-03``, from which the GPUs' kernels are; by default the newest.
        residuals: corrections from real steps; by default the store's.
    """

    keep: str | None = None
    fused: bool = False
    dated: str = ""
    residuals: Residuals | None = None
    facts: WorkloadFacts = field(init=False, repr=False)
    timings: Timings = field(init=False, repr=False)
    _parts: dict[tuple[str, ...], CostSource] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # Notes are asked for when the store is closed.
        if self.residuals is None:
            self.residuals = load_residuals(self.store, self.prefix)
        self.facts = WorkloadFacts(self)
        self.timings = Timings(self, self.facts)

    def with_residuals(self, residuals: Residuals) -> CostSource:
        source = copy(self)
        source.residuals, source._parts = residuals, {}
        return source

    @property
    def in_step(self) -> Residuals:
        assert self.residuals is not None
        return self.residuals

    def on(self, kinds: Sequence[DeviceKind]) -> CostSource:
        """Return the cost model for some device kinds on the same links; ``self`` for all, or with a pool."""
        names = {kind.name for kind in kinds}
        ordered = [kind for kind in self.cluster.device_kinds if kind.name in names]
        if self.pool is not None or len(ordered) == len(self.cluster.device_kinds):
            return self
        key = tuple(kind.name for kind in ordered)
        if key not in self._parts:
            devices = tuple(ordered[rank % len(ordered)] for rank in range(self.cluster.device_count))
            # Facts and timings depend on the device kind, but are stored by workload alone.
            part = replace(self, cluster=replace(self.cluster, devices=devices))
            part.timings = Timings(part, part.facts, self.timings)
            self._parts[key] = part
        return self._parts[key]

    def reopened(self, store: ProfileStore, pool: RankPool | None) -> CostSource:
        """Return a copy with the same facts and timings that uses another store and rank pool."""
        source = replace(self, store=store, pool=pool)
        source.facts = WorkloadFacts(source, self.facts)
        source.timings = Timings(source, source.facts, self.timings)
        source.timings.records, source.timings.peaks = self.timings.records, self.timings.peaks
        return source

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on the sources of predicted figures."""
        return (*self.facts.notes(), *self._kind_notes(), *self.timings.notes())

    def _kind_notes(self) -> Iterator[str]:
        kinds, sampled = self.cluster.device_kinds, self.timings.sampled
        names = ", ".join(kind.name for kind in kinds)
        if len(self.cluster.device_types) > 1:
            yield (
                f"{names}: in placed plans each operator's time is that of its own device; saved tensors and "
                "process memory are counted on CPU ranks as on GPUs"
            )
        elif len(kinds) > 1:
            yield (
                f"{names}: a sharded plan runs each operator at the pace of the slowest of them and must fit "
                "the smallest memory; in placed plans each operator's time is that of its own device"
            )
        if sampled is not None and sampled.words:
            yield f"fitted efficiencies: {sampled.words}"
        for kind in kinds if self.pool is None else ():
            reached = reached_by(kind, self.dated, compiled=self.fused)
            if reached.classes:
                yield f"{kind.name}: kernels are assumed to reach {reached.words}"

    def compute(self) -> ComputeCosts:
        kinds = self.cluster.kinds_of_type
        # The ranks of a pool time a workload together, and the slower rank counts: the record is already the
        # slowest kind's.
        if self.pool is not None or len(kinds) == 1:
            return self.compute_on(self.cluster.device)
        return SlowestCompute([self._compute_on(kind, NO_RESIDUALS) for kind in kinds])

    def compute_on(self, kind: DeviceKind) -> ComputeCosts:
        return self._compute_on(kind, self.in_step)

    def _compute_on(self, kind: DeviceKind, residuals: Residuals) -> MeasuredCompute:
        rest: RooflineCompute | None = None
        records = self.timings.records
        per_element = timed = None if self.pool is None else self.timings.optimizer_s_per_element
        # Without failures everything has a record, and a missing one must be an error, not a silent estimate.
        if per_element is None or any(map(failed_otherwise, records.values())):
            rest = self._roofline(kind)
            per_element = rest.optimizer_s_per_element if per_element is None else per_element
        return MeasuredCompute(
            # Records of one kind, that of cluster.device, were looked up; they say nothing about the others.
            records if self.pool is not None or kind == self.cluster.device else {},
            per_element * residuals.of(REST),
            rest,
            source=DATA_SHEET if timed is None else MEASURED,
            factors=residuals.factors,
            peaks={**kind.flops, **self.timings.peaks} if kind.type == "cpu" else {},
        )

    def _roofline(self, kind: DeviceKind) -> RooflineCompute:
        return RooflineCompute(
            kind,
            self.settings.optimizer,
            # Fitted to timings of the cluster's type: they say nothing of CPU ranks beside GPUs.
            self.timings.efficiencies if kind.type == self.cluster.device_type else NO_EFFICIENCIES,
            self.kernels,
            fused=self.fused,
            dated=self.dated,
        )

    def overheads(self) -> Overheads:
        # Ranks of several kinds wait for each other: the slowest memory counts, as their hosts are alike.
        return self.overheads_on(min(self.cluster.kinds_of_type, key=lambda kind: kind.memory_bandwidth))

    def overheads_on(self, kind: DeviceKind) -> Overheads:
        return self.in_step.overheads(data_sheet_overheads(kind))

    @property
    def optimizer(self) -> str:
        return self.settings.optimizer

    @property
    def beside(self) -> bool:
        return runs_beside(self.cluster.device_type, self.settings.overlap)

    def process_memory(self, graph: OperatorGraph) -> ProcessMemory:
        return process_memory(self.cluster, graph, counted=self.settings.process_memory)

    def communication(self, mesh: Mesh, *, pairs: bool = False) -> CommunicationModel:
        fits = self.in_step.links(self.timings.links(mesh, pairs=pairs))
        return CommunicationModel(self.cluster, mesh, fits)


def real_shape(mesh: Mesh) -> tuple[int, ...]:
    return tuple(size for size in mesh.shape if size > 1)


def build_tables(
    graph: GroupGraph,
    micro: Mapping[str, AxisStrategy],
    costs: CostSource,
    meshes: Sequence[Mesh],
    counts: Sequence[int],
    regions: Sequence[Region] = (),
    restrictions: Mapping[tuple[str, int], Restriction] | None = None,
) -> list[tuple[Mesh, CostTables, CommunicationModel]]:
    """Return the cost tables of every mesh and micro-batch count, after timing all their workloads.

    Args:
        regions: blocks that may be recomputed.
        restrictions: (mesh label, count) -> allowed configurations; a missing pair is left out.
    """
    pairs = [(mesh, count) for mesh in meshes for count in counts]
    if restrictions is not None:
        pairs = [(mesh, count) for mesh, count in pairs if (mesh.label, count) in restrictions]
    shapes = [(mesh, (count, *real_shape(mesh))) for mesh, count in pairs]
    limits = [restrictions[mesh.label, count] if restrictions else FREE for mesh, count in pairs]
    outlines: list[dict[str, Template]] = []
    works: dict[str, Workload] = {}
    keys = group_keys(graph, micro)
    for index, ((_, shape), limit) in enumerate(zip(shapes, limits, strict=True)):
        costs.progress("configurations", index, len(shapes), "x".join(map(str, shape[1:])) or "1")
        made = outline_templates(graph, shape, micro, limit, keys)
        works.update({work.key: work for t in made.values() for work in t.works})
        outlines.append(made)
    costs.progress("configurations", len(shapes), len(shapes), f"{len(works)} distinct workloads")
    # For all spaces together, because processes that find facts learn from the first ones.
    costs.facts.find(works.values())
    templates = [with_facts(made, costs.facts.of) for made in outlines]
    # Tables are priced only after the last mesh's workloads were measured: fits use all timings.
    costs.timings.measure(works)
    # Links depend on the mesh, not on the number of micro-batches, so they are measured once per mesh.
    models = {mesh.label: costs.communication(mesh) for mesh in dict.fromkeys(mesh for mesh, _ in pairs)}
    result = []
    for index, ((mesh, shape), made, limit) in enumerate(zip(shapes, templates, limits, strict=True)):
        costs.progress("tables", index, len(shapes), f"mesh {mesh.label}, {shape[0]} micro-batches")
        prices = Prices.of(costs, graph, shape, models[mesh.label])
        decided_by = repr((costs.keep, costs.training, prices.described))
        arrays = TableArrays(costs.store if costs.keep is not None else None, decided_by)
        tables = TableBuilder(graph, micro, made, prices, regions, limit, arrays).build()
        arrays.save()
        result.append((mesh, tables, models[mesh.label]))
    costs.progress("tables", len(shapes), len(shapes), "priced")
    return result
