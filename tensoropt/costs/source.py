"""The sources of costs on a cluster, and the tables built from them.

CPU ranks and GPUs of this machine are measured; other hardware is priced from its data sheet. The links of a
cluster file have the figures in the file. Everything that the search can choose is measured before anything
is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from tensoropt.cluster import Cluster, DeviceKind, Mesh, host_seconds, reached_by, slower_beside
from tensoropt.costs.builder import TableBuilder
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.compute import (
    MOST_SAMPLES,
    Efficiencies,
    MeasuredCompute,
    RooflineCompute,
    SlowestCompute,
    description,
    fit_efficiencies,
    measurement_prefix,
    samples_of,
)
from tensoropt.costs.kept_tables import TableArrays
from tensoropt.costs.prices import ComputeCosts, Prices, runs_beside
from tensoropt.costs.process_memory import ProcessMemory, process_memory
from tensoropt.costs.restrictions import FREE, Restriction
from tensoropt.costs.tables import (
    FACTS_S,
    CostTables,
    Template,
    group_keys,
    guessed_search_s,
    outline_templates,
    tables_s,
    with_facts,
)
from tensoropt.graph import OperatorGraph
from tensoropt.profiling.cuda_kernels import Capability, capability_of, has_attention, has_recurrent
from tensoropt.profiling.fact_finding import find_facts, find_facts_of_all, find_facts_on_rank
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.links import load_links, measure_links
from tensoropt.profiling.measure import measure_workloads
from tensoropt.profiling.optimizer_timing import measure_optimizer
from tensoropt.profiling.overheads import (
    Overheads,
    data_sheet_overheads,
    known_overheads,
    measure_overheads,
    slowest_overheads,
)
from tensoropt.profiling.store import ProfileStore, RecordSample
from tensoropt.profiling.workload import Workload
from tensoropt.profiling.workload_timing import OUT_OF_MEMORY, WAITS
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.ranks.local_hardware import has_local_cores, has_local_links
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError
from tensoropt.sharding.groups import AxisStrategy, GroupGraph
from tensoropt.sharding.regions import Region
from tensoropt.types import MEASURED, Progress, silent

FACTS = "facts-10"
"""The version of fact records; facts with another version are determined anew."""
_FACTS_AT_ONCE = 512
"""The number of workloads whose facts are determined between saves: about three seconds; an assumption."""
_MOST_FAILURES = 5
"""The most failures that a report names."""


class _CostSettings(Protocol):
    """The settings that costs depend on, in addition to model and cluster."""

    @property
    def mode(self) -> str: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def measure(self) -> str:
        """``all`` or ``never``."""
        ...

    @property
    def process_memory(self) -> bool:
        """Whether the memory that a process uses in addition to tensors is counted."""
        ...

    @property
    def overlap(self) -> str:
        """``default``, or ``none``: nothing overlaps with computation."""
        ...


@dataclass
class CostSource:
    """The sources of costs on this cluster: ranks to measure on, earlier measurements, a fit to those, data
    sheets; facts by workload.

    Args:
        pool: ranks of this cluster if it is this machine and may be measured, otherwise None.
        on_gpu: keys of the facts that describe the GPU's own kernels.
        on_meta: keys of the facts for which GPUs' attention kernels were queried with fake tensors.
        estimated: keys of facts with recurrent layers whose GPU kernels cannot be queried.
        fitted_to: the records that efficiencies were fitted to, once they have been.
        failed: what could not be timed, and why.
        lost: workloads, by key, that must run although they could not be timed; see :meth:`run_one_of`.
        dtypes: the dtypes in which the workloads compute.
        expect: called with a part of the work and its remaining seconds.
        keep: identifies the code that builds tables, which the store then keeps; None to keep none.
        timing: the progress of timing, which estimates its own duration; by default like all other progress.
        fused: price GPUs that are not on this machine as if neighbouring element-wise operators were one
            kernel (:class:`~tensoropt.costs.compute.RooflineCompute`).
        dated: the month whose kernels are assumed for GPUs that are not on this machine, for past runs; by
            default the newest.
    """

    cluster: Cluster
    store: ProfileStore
    settings: _CostSettings
    pool: RankPool | None = None
    progress: Progress = silent
    facts: dict[str, Facts] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    on_gpu: set[str] = field(default_factory=set)
    on_meta: set[str] = field(default_factory=set)
    estimated: set[str] = field(default_factory=set)
    fitted_to: RecordSample | None = None
    failed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, Workload] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    expect: Callable[[str, float], None] = lambda part, seconds: None
    keep: str | None = None
    timing: Progress | None = None
    fused: bool = False
    dated: str = ""
    _parts: dict[tuple[str, ...], CostSource] = field(default_factory=dict, init=False, repr=False)

    def on(self, kinds: Sequence[DeviceKind]) -> CostSource:
        """The costs among devices of some of the cluster's kinds, over the same links; built once.

        Returns this source itself if these are all of the kinds, or if ranks are measured, because those work
        together.
        """
        names = {kind.name for kind in kinds}
        ordered = [kind for kind in self.cluster.device_kinds if kind.name in names]
        if self.pool is not None or len(ordered) == len(self.cluster.device_kinds):
            return self
        key = tuple(kind.name for kind in ordered)
        if key not in self._parts:
            devices = tuple(ordered[rank % len(ordered)] for rank in range(self.cluster.device_count))
            # Facts and measurements depend on the device kind, but are stored here by workload alone.
            self._parts[key] = replace(
                self,
                cluster=replace(self.cluster, devices=devices),
                facts={},
                measured={},
                on_gpu=set(),
                on_meta=set(),
                estimated=set(),
            )
        return self._parts[key]

    @property
    def training(self) -> bool:
        """Whether training steps are priced, as opposed to inference calls."""
        return self.settings.mode == "train"

    @property
    def capability(self) -> Capability | None:
        """The compute capability whose attention kernels are asked what they keep; None for CPU ranks."""
        device = self.cluster.device
        return capability_of(device.capability) if self.cluster.device_type == "cuda" else None

    @cached_property
    def kernels(self) -> KernelSettings:
        """The settings of this process that decide which kernels run on this cluster."""
        return KernelSettings.now().of(self.cluster.device_type)

    @property
    def prefix(self) -> str:
        """The head of the store's keys for workloads that are timed on this cluster."""
        device = None if has_local_cores(self.cluster) else self.cluster.device.name
        # CPU ranks share caches and memory bandwidth, so their number is part of the key; a GPU has its own.
        ranks = self.cluster.device_count if device is None else 1
        return measurement_prefix(ranks, 1, self.training, device, self.kernels)

    def facts_of(self, work: Workload) -> Facts:
        """Return a workload's facts, from this process or the store, or determine them now.

        The facts describe a GPU's own kernels if this machine has or had such a GPU; otherwise attention is
        that of the kernels that such a GPU would run, and the rest that of CPU kernels, which
        :meth:`saved_notes` counts.
        """
        if work.key not in self.facts:
            facts = self._facts_on_gpu(work) if self.cluster.device_type == "cuda" else None
            if facts is not None:
                self.on_gpu.add(work.key)
            elif self.capability is not None and has_recurrent(work):
                self.estimated.add(work.key)
            elif self.capability is not None and has_attention(work):
                self.on_meta.add(work.key)
            self.facts[work.key] = facts or self._facts_on_fake(work)
        return self.facts[work.key]

    def find_facts_of(self, works: Iterable[Workload]) -> None:
        """Determine the facts of many workloads, so that they are available when needed."""
        if self.cluster.device_type == "cuda" and self.pool is not None:
            return  # a GPU is queried for them one by one
        keys = {self._facts_key(work): work for work in works if work.key not in self.facts}
        known = self.store.get_many(keys, kind="saved")
        new = {key: work for key, work in keys.items() if key not in known}
        if self.cluster.device_type == "cuda":
            # What a GPU of this kind has answered once is not determined on the CPU.
            names = {self._on_this_gpu(key): key for key in new}
            for key in self.store.get_many(names, kind="saved"):
                del new[names[key]]
        if not new:
            return
        # In parts, so that an interruption loses little.
        for done in range(0, len(new), _FACTS_AT_ONCE):
            self.expect("facts", FACTS_S * (len(new) - done))
            self.progress("facts", done, len(new), "what operators keep and need while they run")
            part = dict(list(new.items())[done : done + _FACTS_AT_ONCE])
            found = find_facts_of_all(list(part.values()), self.training, self.capability)
            records = {key: facts.to_record() for key, facts in zip(part, found, strict=True)}
            self.store.put_many(records, kind="saved")
        self.expect("facts", 0.0)
        self.progress("facts", len(new), len(new), "found")

    def _facts_on_fake(self, work: Workload) -> Facts:
        key = self._facts_key(work)
        record = self.store.get(key, kind="saved")
        facts = Facts.from_record(record) if record else find_facts(work, self.training, self.capability)
        if record is None:
            self.store.put(key, facts.to_record(), kind="saved")
        return facts

    def _facts_on_gpu(self, work: Workload) -> Facts | None:
        """The facts on a GPU; None if no such GPU was ever available, or if it could not run the workload."""
        key = self._on_this_gpu(self._facts_key(work))
        record = self.store.get(key, kind="saved")
        if record is None and self.pool is not None:
            try:
                record = self.pool.run(find_facts_on_rank, work, self.training)[0]
            except RankError as error:
                # The failure is stored as well; otherwise a workload that kills a rank would kill one in
                # every exploration.
                record = {"error": str(error).splitlines()[0]}
            self.store.put(key, record, kind="saved")
        return None if record is None or "error" in record else Facts.from_record(record)

    def _on_this_gpu(self, key: str) -> str:
        """The key of facts that a GPU of this kind was queried for under these settings."""
        return "/".join(part for part in (self.cluster.device.name, self.kernels.words, key) if part)

    def _facts_key(self, work: Workload) -> str:
        # Only attention is queried by compute capability, and only recurrent layers are estimated: other
        # facts are shared with those of CPU ranks.
        capability = self.capability if has_attention(work) else None
        kernels = f"cuda-{capability[0]}.{capability[1]}-2/" if capability is not None else ""
        if self.capability is not None and has_recurrent(work):
            kernels += "cuda-recurrent/"
        mode = "train" if self.training else "inference"
        return f"{FACTS}/torch-{torch.__version__}/{mode}/{kernels}{work.key}"

    def saved_notes(self) -> tuple[str, ...]:
        """Notes on which kernels' saved tensors a GPU cluster's memory counts."""
        if self.cluster.device_type != "cuda":
            return ()
        whose = []
        if self.on_meta and self.capability is not None:
            major, minor = self.capability
            assumed = "" if self.cluster.device.capability else ", which is assumed,"
            whose.append(
                f"attention keeps what its kernels for compute capability {major}.{minor}{assumed} keep, as "
                f"PyTorch {torch.__version__.partition('+')[0]} chooses them"
            )
        if self.estimated:
            whose.append(
                f"what recurrent layers keep on GPUs is an estimate for {len(self.estimated)} of "
                f"{len(self.facts)} pieces of work: cuDNN's reserve by sizes that were published once"
            )
        others = len(self.facts.keys() - self.on_gpu - self.on_meta - self.estimated)
        if others:
            known = self.on_gpu or self.on_meta or self.estimated
            share = f"{others} of {len(self.facts)} pieces of work" if known else "all pieces of work"
            whose.append(
                f"saved tensors are those of CPU kernels for {share}; kernels of GPUs keep some others"
            )
        return tuple(whose)

    def notes(self) -> tuple[str, ...]:
        """Notes that a reader of the figures should know about their sources."""
        kinds = [kind.name for kind in self.cluster.device_kinds]
        mixed = (
            f"{', '.join(kinds)}: a sharded plan runs each operator at the pace of the slowest of them and "
            "fits the smallest memory; placed plans have each device's own times"
        )
        sampled = self.fitted_to.words if self.fitted_to is not None else ""
        return (
            *self.saved_notes(),
            *((mixed,) if len(kinds) > 1 else ()),
            *((f"fitted efficiencies: {sampled}",) if sampled else ()),
            *self._reached_notes(),
            *self._host_notes(),
            *self._kernel_notes(),
            *self.failure_notes(),
            *self._lost_notes(),
        )

    def _reached_notes(self) -> tuple[str, ...]:
        if self.pool is not None:
            return ()
        found = ((kind.name, reached_by(kind, self.dated)) for kind in self.cluster.device_kinds)
        return tuple(f"{name}: kernels are taken to reach {r.words}" for name, r in found if r.classes)

    def _host_notes(self) -> tuple[str, ...]:
        """Notes on the source of the host seconds for issuing work to GPUs, and on workloads for which they
        could not be separated from the device's."""
        host = host_seconds(self.cluster.device_type)
        if host is None:
            return ()
        if self.pool is None:
            return (
                f"what issuing takes the host is estimated: {1e6 * host.forward_call_s:.0f} us an operator "
                f"forward and {1e6 * host.backward_call_s:.0f} us backward "
                "(tensoropt/cluster/presets/host.yaml)",
            )
        waits = sum(WAITS in record for record in self.measured.values())
        words = (
            f"{waits} of {len(self.measured)} pieces of work wait for the device: what they take may contain "
            "seconds in which it waited for the host"
        )
        return (words,) if waits else ()

    def _kernel_notes(self) -> tuple[str, ...]:
        """Notes on how GPUs compute with float32 numbers, if the model has any."""
        if self.cluster.device_type != "cuda" or "float32" not in self.dtypes:
            return ()
        words = (
            f"float32 numbers are computed in {self.kernels.matmul} by products and in "
            f"{self.kernels.convolution} by convolutions, as PyTorch is set here "
            "(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)"
        )
        return (words,)

    def failure_notes(self) -> tuple[str, ...]:
        """Notes on what could not be timed and why; of many failures, the first few."""
        lines = [f"could not be timed: {what}: {why}" for what, why in self.failed.items()]
        more = len(lines) - _MOST_FAILURES
        return (*lines[:_MOST_FAILURES], *((f"could not be timed: {more} others",) if more > 0 else ()))

    def _lost_notes(self) -> tuple[str, ...]:
        names = dict.fromkeys(call.function for work in self.lost.values() for call, _ in work.calls[:1])
        rule = "in none of its configurations could be timed, priced as hardware that is not here"
        return (f"{', '.join(names)}: {rule}",) if names else ()

    def run_one_of(self, works: Sequence[Workload]) -> None:
        """Require that one of these workloads can run. A failed workload counts as impossible as long as
        another can be chosen; if all failed, those that failed for reasons other than lack of memory are
        priced in another way."""
        errors = [self.measured.get(work.key, {}).get("error") for work in works]
        # ``all`` of an empty list is true and adds nothing, so a group without configurations needs no
        # special case.
        if all(errors):
            self.lost |= {
                work.key: work
                for work, error in zip(works, errors, strict=True)
                if not str(error).startswith(OUT_OF_MEMORY)
            }

    def measure(self, works: Mapping[str, Workload]) -> None:
        """Time on the ranks what is not known yet; without ranks, look up what is known."""
        self.dtypes |= {work.dtype for work in works.values()}
        if self.pool is None:
            known = self.store.get_many([f"{self.prefix}/{key}" for key in works])
            # The workload's hash is the last part of the key; the prefix may contain slashes.
            self.measured.update({key.rsplit("/", 1)[1]: record for key, record in known.items()})
            return
        # Not self.efficiencies, which is cached: the store contains more once this has measured.
        estimate = RooflineCompute(self.cluster.device, self.settings.optimizer, self._fit()[1], self.kernels)
        found = measure_workloads(
            works.values(),
            self.pool,
            self.store,
            self.prefix,
            training=self.training,
            describe=lambda work: description(work, self.facts_of(work), self.cluster.device),
            expected_s=lambda work: sum(estimate.seconds(work, self.facts_of(work))),
            progress=self.timing or self.progress,
        )
        self.measured.update(found)
        self.failed.update(
            (works[key].describe(), record["error"]) for key, record in found.items() if "error" in record
        )

    def compute(self) -> ComputeCosts:
        """The seconds of workloads that all devices run at once, at the pace of the slowest."""
        kinds = self.cluster.device_kinds
        # The ranks of a pool time a workload together, and the slower rank counts: the record is already the
        # slowest kind's.
        if self.pool is not None or len(kinds) == 1:
            return self.compute_on(self.cluster.device)
        return SlowestCompute([self.compute_on(kind) for kind in kinds])

    def compute_on(self, kind: DeviceKind) -> MeasuredCompute:
        """The seconds of workloads on one device kind; a cluster has measurements of one kind."""
        if self.pool is not None:
            try:
                per_element = (
                    measure_optimizer(self.pool, self.store, self.prefix, self.settings.optimizer)
                    if self.training
                    else 0.0
                )
            except RankError as error:
                self.failed[f"a step of {self.settings.optimizer}"] = error.summary
                rest = RooflineCompute(kind, self.settings.optimizer, kernels=self.kernels)
                return MeasuredCompute(self.measured, rest.optimizer_s_per_element, rest, lost=self.lost)
            # Without lost workloads everything has a record, and a missing one must be an error, not a silent
            # estimate.
            instead = self._roofline(kind) if self.lost else None
            return MeasuredCompute(self.measured, per_element, instead, lost=self.lost, source=MEASURED)
        rest = self._roofline(kind)
        # measure() looked up the records of one kind, that of cluster.device; they say nothing about the
        # others.
        records = self.measured if kind == self.cluster.device else {}
        return MeasuredCompute(records, rest.optimizer_s_per_element, rest, lost=self.lost)

    def _roofline(self, kind: DeviceKind) -> RooflineCompute:
        return RooflineCompute(
            kind,
            self.settings.optimizer,
            self.efficiencies,
            self.kernels,
            fused=self.fused,
            dated=self.dated,
        )

    @cached_property
    def efficiencies(self) -> Efficiencies:
        """Efficiencies fitted to the workloads in the store (a sample if there are many) that were timed on
        this device type, in this mode."""
        self.fitted_to, found = self._fit()
        return found

    def _fit(self) -> tuple[RecordSample, Efficiencies]:
        kind, mode = self.cluster.device_type, "train" if self.training else "inference"
        drawn = self.store.sample(MOST_SAMPLES)
        records = [
            (key, record)
            for key, record in drawn.records
            if record.get("device_type") == kind and f"/{mode}/" in key
        ]
        return drawn, fit_efficiencies(samples_of(records))

    def overheads(self) -> Overheads:
        """The overheads of a step, besides operators and collectives, on the slowest rank or device kind."""
        if self.pool is None:
            known = known_overheads(self.store, self.prefix, self.settings.optimizer)
            return known or slowest_overheads(
                data_sheet_overheads(kind) for kind in self.cluster.device_kinds
            )
        try:
            return measure_overheads(self.pool, self.store, self.prefix, self.settings.optimizer)
        except RankError as error:
            self.failed["overheads"] = error.summary
            return data_sheet_overheads(self.cluster.device)

    @property
    def beside(self) -> bool:
        """Whether communication that nothing waits for overlaps with computation."""
        return runs_beside(self.cluster.device_type, self.settings.overlap)

    def process_memory(self, graph: OperatorGraph) -> ProcessMemory:
        """The memory that a process uses in addition to tensors, if the settings count it, and constants."""
        return process_memory(self.cluster, graph, counted=self.settings.process_memory)

    def communication(self, mesh: Mesh, *, pairs: bool = False) -> CommunicationModel:
        """The figures of a mesh's links; with ``pairs``, also those between two ranks."""
        fits = None
        # The links of a cluster file have the file's figures, even if its devices are this machine's.
        if mesh.size == 1 or not has_local_links(self.cluster):
            return CommunicationModel(self.cluster, mesh)
        if self.pool is None and has_local_cores(self.cluster):
            fits = load_links(self.cluster, mesh, self.store)
        if self.pool is not None:
            fits = measure_links(
                self.cluster,
                mesh,
                self.pool,
                self.store,
                pairs=pairs,
                progress=self.timing or self.progress,
            )
            self.failed.update(fits.failed)
        return CommunicationModel(self.cluster, mesh, fits)


def real_shape(mesh: Mesh) -> tuple[int, ...]:
    """The axis sizes; a single device has no axes."""
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
    """The cost tables of every mesh and micro-batch count; everything is measured before anything is priced.

    Args:
        regions: blocks that may be recomputed.
        restrictions: what constraints allow, per (mesh label, count); a pair that is missing is left out.
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
    expected_s = [tables_s(graph, made) for made in outlines]
    costs.expect("tables", sum(expected_s))
    costs.expect("searches", sum(guessed_search_s(graph, made, bool(regions)) for made in outlines))
    # For all spaces together, because processes that find facts learn from the first ones.
    costs.find_facts_of(works.values())
    templates = [with_facts(made, costs.facts_of) for made in outlines]
    # Tables are priced only after the last mesh's workloads were measured: fits use all timings, and the lost
    # workloads of every group are known.
    costs.measure(works)
    for made in templates:
        for template in made.values():
            # Per template, because the search has to choose one configuration of each group.
            costs.run_one_of(template.works)
    compute, overheads = costs.compute(), costs.overheads()
    # Links depend on the mesh, not on the number of micro-batches, so they are measured once per mesh.
    models = {mesh.label: costs.communication(mesh) for mesh in dict.fromkeys(mesh for mesh, _ in pairs)}
    process = costs.process_memory(graph.atoms.graph)
    result = []
    for index, ((mesh, shape), made, limit) in enumerate(zip(shapes, templates, limits, strict=True)):
        costs.expect("tables", sum(expected_s[index:]))
        costs.progress("tables", index, len(shapes), f"mesh {mesh.label}, {shape[0]} micro-batches")
        prices = Prices(
            graph,
            shape,
            compute,
            models[mesh.label],
            costs.settings.optimizer,
            overheads,
            process,
            beside=costs.beside,
            slower_beside=slower_beside(costs.cluster),
            packs=costs.cluster.device_type == "cpu",
        )
        decided_by = repr((costs.keep, costs.training, prices.described))
        arrays = TableArrays(costs.store if costs.keep is not None else None, decided_by)
        tables = TableBuilder(graph, micro, made, prices, regions, limit, arrays).build()
        arrays.save()
        result.append((mesh, tables, models[mesh.label]))
    costs.expect("tables", 0.0)
    costs.progress("tables", len(shapes), len(shapes), "priced")
    return result
