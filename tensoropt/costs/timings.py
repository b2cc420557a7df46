"""What is timed on a cluster: workloads, the optimizer, the overheads of a step and links; what could not be
timed, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tensoropt.cluster import Mesh, host_seconds
from tensoropt.costs.compute import (
    MOST_SAMPLES,
    Efficiencies,
    RooflineCompute,
    description,
    fit_efficiencies,
    samples_of,
)
from tensoropt.costs.context import CostContext
from tensoropt.costs.facts import WorkloadFacts
from tensoropt.profiling.links import LinkFits, load_links, measure_links
from tensoropt.profiling.measure import measure_workloads
from tensoropt.profiling.optimizer_timing import measure_optimizer
from tensoropt.profiling.overheads import Overheads, known_overheads, measure_overheads
from tensoropt.profiling.store import RecordSample
from tensoropt.profiling.workload import Workload
from tensoropt.profiling.workload_timing import OUT_OF_MEMORY, WAITS
from tensoropt.ranks.local_hardware import has_local_cores, has_local_links
from tensoropt.ranks.worker_process import RankError

_MOST_FAILURES = 5
"""The most failures that a report names."""


class Timings:
    """The timings of one cluster, from its ranks or, without ranks, from the store.

    Args:
        whole: the timings of the cluster that this one is a part of, which says what failed in any part.

    Attributes:
        records: of workloads, by key.
        lost: workloads, by key, that must run although they could not be timed; see :meth:`require_one`.
        failed: what could not be timed, and why.
        dtypes: the dtypes in which the workloads compute.
        sampled: the records that efficiencies were fitted to, once they have been.
    """

    def __init__(self, context: CostContext, facts: WorkloadFacts, whole: Timings | None = None):
        self.context, self.facts = context, facts
        self.records: dict[str, dict[str, Any]] = {}
        self.sampled: RecordSample | None = None if whole is None else whole.sampled
        self.lost: dict[str, Workload] = {} if whole is None else whole.lost
        self.failed: dict[str, str] = {} if whole is None else whole.failed
        self.dtypes: set[str] = set() if whole is None else whole.dtypes

    def measure(self, works: Mapping[str, Workload]) -> None:
        """Time on the ranks what is not known yet; without ranks, look up what is known."""
        on = self.context
        self.dtypes |= {work.dtype for work in works.values()}
        if on.pool is None:
            known = on.store.get_many([f"{on.prefix}/{key}" for key in works])
            # The workload's hash is the last part of the key; the prefix may contain slashes.
            self.records.update({key.rsplit("/", 1)[1]: record for key, record in known.items()})
            return
        device, facts_of = on.cluster.device, self.facts.of
        # Not self.efficiencies, which is cached: the store contains more once this has measured.
        estimate = RooflineCompute(device, on.settings.optimizer, self._fit()[1], on.kernels)
        found = measure_workloads(
            works.values(),
            on.pool,
            on.store,
            on.prefix,
            training=on.training,
            describe=lambda work: description(work, facts_of(work), device),
            expected_s=lambda work: sum(estimate.seconds(work, facts_of(work))),
            progress=on.timing or on.progress,
        )
        self.records.update(found)
        self.failed.update(
            (works[key].describe(), record["error"]) for key, record in found.items() if "error" in record
        )

    def require_one(self, works: Sequence[Workload]) -> None:
        """Require that one of these workloads can run. A failed workload counts as impossible as long as
        another can be chosen; if all failed, those that failed for reasons other than lack of memory are
        priced in another way."""
        errors = [self.records.get(work.key, {}).get("error") for work in works]
        # ``all`` of an empty list is true and adds nothing, so a group without configurations needs no
        # special case.
        if all(errors):
            self.lost |= {
                work.key: work
                for work, error in zip(works, errors, strict=True)
                if not str(error).startswith(OUT_OF_MEMORY)
            }

    @cached_property
    def efficiencies(self) -> Efficiencies:
        """Efficiencies fitted to the workloads in the store (a sample if there are many) that were timed on
        this device type, in this mode."""
        self.sampled, found = self._fit()
        return found

    def _fit(self) -> tuple[RecordSample, Efficiencies]:
        kind, mode = self.context.cluster.device_type, "train" if self.context.training else "inference"
        drawn = self.context.store.sample(MOST_SAMPLES)
        records = [
            (key, record)
            for key, record in drawn.records
            if record.get("device_type") == kind and f"/{mode}/" in key
        ]
        return drawn, fit_efficiencies(samples_of(records))

    def optimizer_s_per_element(self) -> float | None:
        """The seconds per element of the optimizer's step on the ranks; None if it could not be timed."""
        on = self.context
        assert on.pool is not None
        if not on.training:
            return 0.0
        try:
            return measure_optimizer(on.pool, on.store, on.prefix, on.settings.optimizer)
        except RankError as error:
            self.failed[f"a step of {on.settings.optimizer}"] = error.summary
            return None

    def overheads(self) -> Overheads | None:
        """The overheads of a step, besides operators and collectives; None if they are not known."""
        on = self.context
        if on.pool is None:
            return known_overheads(on.store, on.prefix, on.settings.optimizer)
        try:
            return measure_overheads(on.pool, on.store, on.prefix, on.settings.optimizer)
        except RankError as error:
            self.failed["overheads"] = error.summary
            return None

    def links(self, mesh: Mesh, *, pairs: bool = False) -> LinkFits | None:
        """The fits of a mesh's links, and with ``pairs`` of those between two ranks; None if none are
        known."""
        on = self.context
        # The links of a cluster file have the file's figures, even if its devices are this machine's.
        if mesh.size == 1 or not has_local_links(on.cluster):
            return None
        if on.pool is None:
            return load_links(on.cluster, mesh, on.store) if has_local_cores(on.cluster) else None
        report = on.timing or on.progress
        fits = measure_links(on.cluster, mesh, on.pool, on.store, pairs=pairs, progress=report)
        self.failed.update(fits.failed)
        return fits

    # -- notes ------------------------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        """Notes on the host's seconds, on the number formats of GPUs, and on what could not be timed."""
        return (*self._host_notes(), *self._kernel_notes(), *self.failure_notes(), *self._lost_notes())

    def _host_notes(self) -> tuple[str, ...]:
        """Notes on the source of the host seconds for issuing work to GPUs, and on workloads for which they
        could not be separated from the device's."""
        host = host_seconds(self.context.cluster.device_type)
        if host is None:
            return ()
        if self.context.pool is None:
            return (
                f"what issuing takes the host is estimated: {1e6 * host.forward_call_s:.0f} us an operator "
                f"forward and {1e6 * host.backward_call_s:.0f} us backward "
                "(tensoropt/cluster/presets/host.yaml)",
            )
        waits = sum(WAITS in record for record in self.records.values())
        words = (
            f"{waits} of {len(self.records)} pieces of work wait for the device: what they take may contain "
            "seconds in which it waited for the host"
        )
        return (words,) if waits else ()

    def _kernel_notes(self) -> tuple[str, ...]:
        """Notes on how GPUs compute with float32 numbers, if the model has any."""
        if self.context.cluster.device_type != "cuda" or "float32" not in self.dtypes:
            return ()
        words = (
            f"float32 numbers are computed in {self.context.kernels.matmul} by products and in "
            f"{self.context.kernels.convolution} by convolutions, as PyTorch is set here "
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
