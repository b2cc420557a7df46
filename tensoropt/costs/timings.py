"""Facts (memory, FLOP) and timings of workloads on a cluster, found now or read from the store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from tensoropt.cluster import Cluster, Mesh, host_seconds
from tensoropt.cluster.hosts import detected_hosts
from tensoropt.cluster.local import most_ranks
from tensoropt.console import about
from tensoropt.costs import compute
from tensoropt.profiling.cuda_kernels import Capability, capability_of, has_attention, has_recurrent
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.facts_of_kinds import find_facts_of_all, kind_of
from tensoropt.profiling.links import LinkFits, load_links, measure_links
from tensoropt.profiling.measure import measure_workloads
from tensoropt.profiling.optimizer_timing import measure_optimizer
from tensoropt.profiling.peak import TIMED, known_peaks, measure_peaks
from tensoropt.profiling.store import ProfileStore, RecordSample
from tensoropt.profiling.workload import Workload
from tensoropt.profiling.workload_timing import OUT_OF_MEMORY, WAITS
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.ranks.local_hardware import has_local_cores, has_local_links
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError
from tensoropt.types import Progress, silent
from tensoropt.units import counted


class _CostSettings(Protocol):
    @property
    def mode(self) -> str: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def measure(self) -> str:
        """Whether to time workloads: ``all`` or ``never``."""

    @property
    def process_memory(self) -> bool:
        """Whether to count memory besides tensors."""

    @property
    def overlap(self) -> str:
        """Which communication overlaps with computation: ``default`` or ``none``."""


@dataclass
class CostContext:
    """A cluster, the store of earlier measurements, and how to measure more.

    Args:
        pool: this machine's ranks, if they are the cluster and may be measured.
        note: a function that is called with messages before long measurements.
    """

    cluster: Cluster
    store: ProfileStore
    settings: _CostSettings
    pool: RankPool | None = None
    progress: Progress = silent
    note: Callable[[str], None] = lambda words: None

    @property
    def training(self) -> bool:
        """Whether training steps are priced, not inference calls."""
        return self.settings.mode == "train"

    @property
    def capability(self) -> Capability | None:
        """The GPUs' compute capability, which decides what attention kernels save; None without GPUs."""
        device = self.cluster.device
        return capability_of(device.capability) if self.cluster.device_type == "cuda" else None

    @cached_property
    def kernels(self) -> KernelSettings:
        return KernelSettings.now().of(self.cluster.device_type)

    @property
    def prefix(self) -> str:
        """The beginning of the store's keys for workloads timed on this cluster."""
        device = None if has_local_cores(self.cluster) else self.cluster.device.name
        # CPU ranks of a host share caches and memory bandwidth, so their number is part of the key; a GPU has
        # its own.
        ranks = self.cluster.device_count // detected_hosts(self.cluster) if device is None else 1
        return compute.measurement_prefix(ranks, 1, self.training, device, self.kernels)


_FACTS = "facts-16"
"""The version of fact records; facts of other versions are determined anew."""
_FACTS_AT_ONCE = 256
"""The number of workloads whose facts are saved together, after one or two seconds; an assumption."""

_Kernels = Literal["attention", "recurrent", "cpu"]
"""The kernels whose saved tensors are known: a GPU's attention, its RNNs (estimated), or a CPU's."""


class WorkloadFacts:
    """The facts (memory, FLOP) of workloads on one cluster, by the workload's key.

    Args:
        earlier: an object with facts found before on the same cluster.

    Attributes:
        found: the facts used so far in this process.
    """

    def __init__(self, context: CostContext, earlier: WorkloadFacts | None = None):
        self.context = context
        self.found: dict[str, Facts] = {} if earlier is None else earlier.found
        self._kernels: dict[str, _Kernels] = {} if earlier is None else earlier._kernels

    def of(self, work: Workload) -> Facts:
        """Return a workload's facts (memory, FLOP) from this process or the store, or determine them."""
        if work.key not in self.found:
            self._kernels[work.key] = self._kernels_of(work)
            key, on = self._key(work), self.context
            if record := on.store.get(key, kind="saved"):
                self.found[work.key] = Facts.from_record(record)
            else:
                self.found[work.key] = facts = find_facts(work, on.training, on.capability)
                on.store.put(key, facts.to_record(), kind="saved")
        return self.found[work.key]

    def find(self, works: Iterable[Workload]) -> None:
        """Determine the facts (memory, FLOP) of many workloads and put them into the store for :meth:`of`."""
        keys = {self._key(work): work for work in works if work.key not in self.found}
        known = self.context.store.get_many(keys, kind="saved")
        # By kind, as workloads of one kind are found together.
        unknown = (item for item in keys.items() if item[0] not in known)
        new = dict(sorted(unknown, key=lambda item: kind_of(item[1])))
        # In parts, so that an interruption loses little.
        for done in range(0, len(new), _FACTS_AT_ONCE):
            self.context.progress(
                "facts", done, len(new), "memory that operators save, and use while running"
            )
            part = dict(list(new.items())[done : done + _FACTS_AT_ONCE])
            found = find_facts_of_all(list(part.values()), self.context.training, self.context.capability)
            records = {key: facts.to_record() for key, facts in zip(part, found, strict=True)}
            self.context.store.put_many(records, kind="saved")
        if new:
            self.context.progress("facts", len(new), len(new), "found")

    def _kernels_of(self, work: Workload) -> _Kernels:
        if self.context.capability is None:
            return "cpu"
        return "recurrent" if has_recurrent(work) else "attention" if has_attention(work) else "cpu"

    def _key(self, work: Workload) -> str:
        # Only attention is queried by compute capability, and only recurrent layers are estimated: other
        # facts are shared with those of CPU ranks.
        capability = self.context.capability if has_attention(work) else None
        kernels = f"cuda-{capability[0]}.{capability[1]}-2/" if capability is not None else ""
        if self.context.capability is not None and has_recurrent(work):
            kernels += "cuda-recurrent/"
        mode = "train" if self.context.training else "inference"
        return f"{_FACTS}/torch-{torch.__version__}/{mode}/{kernels}{work.key}"

    def notes(self) -> Iterator[str]:
        """Yield notes that say which kernels' saved tensors are counted as memory."""
        if self.context.cluster.device_type != "cuda":
            return
        kernels = Counter(self._kernels.values())
        if kernels["attention"] and self.context.capability is not None:
            major, minor = self.context.capability
            assumed = "" if self.context.cluster.device.capability else " (assumed)"
            yield (
                "the memory that attention saves for backward is that of the kernels for compute capability "
                f"{major}.{minor}{assumed}, as PyTorch {torch.__version__.partition('+')[0]} chooses them"
            )
        if estimated := kernels["recurrent"]:
            yield (
                f"the memory that recurrent layers save on GPUs is an estimate for {estimated} of "
                f"{len(self.found)} pieces of work, from published sizes of cuDNN's reserve space"
            )
        if others := kernels["cpu"]:
            all_others = others == len(self.found)
            share = "all pieces of work" if all_others else f"{others} of {len(self.found)} pieces of work"
            yield f"saved tensors are counted as CPU kernels save them, for {share}; GPU kernels may differ"


_MOST_FAILURES = 5
"""The most failures that a report names."""
_LONG_S = 20.0
"""The estimated seconds of timing from which a message says how to avoid it; an assumption."""


class Timings:
    """The timings of one cluster, from its ranks or from the store.

    Args:
        whole: the timings of the whole cluster, if this is a part of it; both collect failures together.

    Attributes:
        peaks: measured FLOP/s of CPU ranks by dtype.
        failed: description of what could not be timed -> the reason.
        sampled: the records that efficiencies were fitted to.
    """

    def __init__(self, context: CostContext, facts: WorkloadFacts, whole: Timings | None = None):
        self.context, self.facts = context, facts
        self.records: dict[str, dict[str, Any]] = {}
        self.peaks: dict[str, float] = {}
        self.sampled: RecordSample | None = None if whole is None else whole.sampled
        self.failed: dict[str, str] = {} if whole is None else whole.failed
        self.dtypes: set[str] = set() if whole is None else whole.dtypes
        self._hinted = self._began = False

    def measure(self, works: Mapping[str, Workload]) -> None:
        """Time new workloads on the ranks; without ranks, look up earlier timings in the store."""
        on = self.context
        self.dtypes |= {work.dtype for work in works.values()}
        self.peaks = known_peaks(on.store, on.prefix)
        if on.pool is None:
            known = on.store.get_many([f"{on.prefix}/{key}" for key in works])
            # The workload's hash is the last part of the key; the prefix may contain slashes.
            self.records.update((key.rsplit("/", 1)[1], record) for key, record in known.items())
            return
        device, facts_of = on.cluster.device, self.facts.of
        # Not self.efficiencies, which is cached: the store contains more once this has measured.
        estimate = compute.RooflineCompute(device, on.settings.optimizer, self._fit()[1], on.kernels)
        found = measure_workloads(
            works.values(),
            on.pool,
            on.store,
            on.prefix,
            training=on.training,
            describe=lambda work: compute.description(work, facts_of(work), device),
            expected_s=lambda work: sum(estimate.seconds(work, facts_of(work))),
            progress=on.progress,
            begins=self._begin,
        )
        if self._began:
            self._began = False
            self._measure_peaks()
        self.records.update(found)
        self.failed.update(
            (works[key].describe(), record["error"]) for key, record in found.items() if "error" in record
        )

    def _begin(self, count: int, seconds: float) -> None:
        self._began = True
        self._measure_peaks()
        if seconds >= _LONG_S and not self._hinted:
            self._hinted = True
            self.context.note(
                f"{counted(count, 'operator')} of this model, in the shapes that plans give them, must be "
                f"timed on this machine first, which takes about {about(seconds)}; the next exploration uses "
                'these timings again; --measure never, in Python measure="never", takes seconds, as it only '
                "uses earlier timings and a fit to them"
            )

    def _measure_peaks(self) -> None:
        on = self.context
        if on.pool is not None and on.cluster.device_type == "cpu":
            self.peaks = measure_peaks(on.pool, on.store, on.prefix, {"float32", *(self.dtypes & set(TIMED))})

    @cached_property
    def efficiencies(self) -> compute.Efficiencies:
        """Efficiencies (shares of peak speed), fitted to stored timings for this device type and mode."""
        self.sampled, found = self._fit()
        return found

    def _fit(self) -> tuple[RecordSample, compute.Efficiencies]:
        kind, mode = self.context.cluster.device_type, "train" if self.context.training else "inference"
        drawn = self.context.store.sample(compute.MOST_SAMPLES)
        records = [
            (key, record)
            for key, record in drawn.records
            if record.get("device_type") == kind and f"/{mode}/" in key
        ]
        return drawn, compute.fit_efficiencies(compute.samples_of(records))

    @cached_property
    def optimizer_s_per_element(self) -> float | None:
        """The optimizer's seconds per element on the ranks; None if not timed."""
        on = self.context
        assert on.pool is not None
        if not on.training:
            return 0.0
        try:
            return measure_optimizer(on.pool, on.store, on.prefix, on.settings.optimizer)
        except RankError as error:
            self.failed[f"a step of {on.settings.optimizer}"] = error.summary
            return None

    def links(self, mesh: Mesh, *, pairs: bool = False) -> LinkFits | None:
        """Return curves fitted to timings of a mesh's collectives, and with ``pairs`` of messages between two
        ranks; None if unknown."""
        on = self.context
        # The links of a cluster file have the file's figures, even if its devices are this machine's.
        hosts = detected_hosts(on.cluster)
        if mesh.size == 1 or not (has_local_links(on.cluster) or hosts > 1):
            return None
        if hosts > 1 and (on.pool is None or on.pool.hosts < hosts):
            # Links between hosts are timed from all hosts at once; until then the file's figures count.
            known = load_links(on.cluster, mesh, on.store)
            return known if known.collectives else None
        if on.pool is None:
            # Links of more ranks than run here were never timed, and their pairs are many.
            timed = has_local_cores(on.cluster) and mesh.size <= most_ranks()
            return load_links(on.cluster, mesh, on.store) if timed else None
        fits = measure_links(on.cluster, mesh, on.pool, on.store, pairs=pairs, progress=on.progress)
        self.failed.update(fits.failed)
        return fits

    # -- notes ------------------------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on launch times, GPUs' number formats, and failed timings."""
        return (*self._gpu_notes(), *self._failure_notes())

    def _gpu_notes(self) -> Iterator[str]:
        kernels, waits = self.context.kernels, sum(WAITS in record for record in self.records.values())
        host = host_seconds(self.context.cluster.device_type)
        if host is not None and self.context.pool is None:
            yield (
                f"the host's launch time is estimated: {1e6 * host.forward_call_s:.0f} us an operator "
                f"forward and {1e6 * host.backward_call_s:.0f} us backward "
                "(tensoropt/cluster/presets/host.yaml)"
            )
        elif waits:
            yield (
                f"{waits} of {len(self.records)} pieces of work make the host wait for the device: their "
                "times may include gaps in which the device waited for the host"
            )
        if self.context.cluster.device_type == "cuda" and "float32" in self.dtypes:
            yield (
                f"float32 numbers are computed in {kernels.matmul} by matrix products and in "
                f"{kernels.convolution} by convolutions, as PyTorch is set here "
                "(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)"
            )

    def _failure_notes(self) -> Iterator[str]:
        for what, why in itertools.islice(self.failed.items(), _MOST_FAILURES):
            instead = "" if why.startswith(OUT_OF_MEMORY) else ", estimated instead"
            yield f"could not be timed{instead}: {what}: {why}"
        if (more := len(self.failed) - _MOST_FAILURES) > 0:
            yield f"could not be timed: {more} others"
