"""The facts of workloads on a cluster, and whose kernels these describe; found once, kept in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import torch

from tensoropt.costs.context import CostContext
from tensoropt.costs.tables import FACTS_S
from tensoropt.profiling.cuda_kernels import has_attention, has_recurrent
from tensoropt.profiling.fact_finding import find_facts, find_facts_of_all, find_facts_on_rank
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.ranks.worker_process import RankError

FACTS = "facts-10"
"""The version of fact records; facts with another version are determined anew."""
_FACTS_AT_ONCE = 512
"""The number of workloads whose facts are determined between saves: about three seconds; an assumption."""

_Kernels = Literal["gpu", "attention", "recurrent", "cpu"]
"""Whose kernels facts describe: a GPU's own; those that such a GPU would choose for attention, which were
queried with fake tensors; an estimate of its recurrent layers, which cannot be queried; CPU kernels."""


class WorkloadFacts:
    """The facts of workloads on one cluster, by the workload's key.

    Attributes:
        found: those that were needed in this process.
    """

    def __init__(self, context: CostContext):
        self.context = context
        self.found: dict[str, Facts] = {}
        self._kernels: dict[str, _Kernels] = {}

    def of(self, work: Workload) -> Facts:
        """Return a workload's facts, from this process or the store, or determine them now.

        The facts describe a GPU's own kernels if this machine has or had such a GPU; otherwise attention is
        that of the kernels that such a GPU would run, and the rest that of CPU kernels, which :meth:`notes`
        counts.
        """
        if work.key not in self.found:
            facts = self._on_gpu(work) if self.context.cluster.device_type == "cuda" else None
            self._kernels[work.key] = self._kernels_of(work) if facts is None else "gpu"
            self.found[work.key] = facts or self._on_fake(work)
        return self.found[work.key]

    def find(self, works: Iterable[Workload]) -> None:
        """Determine the facts of many workloads, so that they are available when needed."""
        if self.context.cluster.device_type == "cuda" and self.context.pool is not None:
            return  # a GPU is queried for them one by one
        keys = {self._key(work): work for work in works if work.key not in self.found}
        known = self.context.store.get_many(keys, kind="saved")
        new = {key: work for key, work in keys.items() if key not in known}
        if self.context.cluster.device_type == "cuda":
            # What a GPU of this kind has answered once is not determined on the CPU.
            names = {self._on_this_gpu(key): key for key in new}
            for key in self.context.store.get_many(names, kind="saved"):
                del new[names[key]]
        if not new:
            return
        # In parts, so that an interruption loses little.
        for done in range(0, len(new), _FACTS_AT_ONCE):
            self.context.expect("facts", FACTS_S * (len(new) - done))
            self.context.progress("facts", done, len(new), "what operators keep and need while they run")
            part = dict(list(new.items())[done : done + _FACTS_AT_ONCE])
            found = find_facts_of_all(list(part.values()), self.context.training, self.context.capability)
            records = {key: facts.to_record() for key, facts in zip(part, found, strict=True)}
            self.context.store.put_many(records, kind="saved")
        self.context.expect("facts", 0.0)
        self.context.progress("facts", len(new), len(new), "found")

    def _on_fake(self, work: Workload) -> Facts:
        key = self._key(work)
        record = self.context.store.get(key, kind="saved")
        if record:
            return Facts.from_record(record)
        facts = find_facts(work, self.context.training, self.context.capability)
        self.context.store.put(key, facts.to_record(), kind="saved")
        return facts

    def _kernels_of(self, work: Workload) -> _Kernels:
        """Whose kernels the facts of a workload describe that no GPU was queried for."""
        if self.context.capability is None:
            return "cpu"
        return "recurrent" if has_recurrent(work) else "attention" if has_attention(work) else "cpu"

    def _on_gpu(self, work: Workload) -> Facts | None:
        """The facts on a GPU; None if no such GPU was ever available, or if it could not run the workload."""
        key = self._on_this_gpu(self._key(work))
        record = self.context.store.get(key, kind="saved")
        if record is None and self.context.pool is not None:
            try:
                record = self.context.pool.run(find_facts_on_rank, work, self.context.training)[0]
            except RankError as error:
                # The failure is stored as well; otherwise a workload that kills a rank would kill one in
                # every exploration.
                record = {"error": str(error).splitlines()[0]}
            self.context.store.put(key, record, kind="saved")
        return None if record is None or "error" in record else Facts.from_record(record)

    def _on_this_gpu(self, key: str) -> str:
        """The key of facts that a GPU of this kind was queried for under these settings."""
        device, settings = self.context.cluster.device.name, self.context.kernels.words
        return "/".join(part for part in (device, settings, key) if part)

    def _key(self, work: Workload) -> str:
        # Only attention is queried by compute capability, and only recurrent layers are estimated: other
        # facts are shared with those of CPU ranks.
        capability = self.context.capability if has_attention(work) else None
        kernels = f"cuda-{capability[0]}.{capability[1]}-2/" if capability is not None else ""
        if self.context.capability is not None and has_recurrent(work):
            kernels += "cuda-recurrent/"
        mode = "train" if self.context.training else "inference"
        return f"{FACTS}/torch-{torch.__version__}/{mode}/{kernels}{work.key}"

    def notes(self) -> tuple[str, ...]:
        """Notes on which kernels' saved tensors a GPU cluster's memory counts."""
        if self.context.cluster.device_type != "cuda":
            return ()
        whose, kernels = [], Counter(self._kernels.values())
        if kernels["attention"] and self.context.capability is not None:
            major, minor = self.context.capability
            assumed = "" if self.context.cluster.device.capability else ", which is assumed,"
            whose.append(
                f"attention keeps what its kernels for compute capability {major}.{minor}{assumed} keep, as "
                f"PyTorch {torch.__version__.partition('+')[0]} chooses them"
            )
        if estimated := kernels["recurrent"]:
            whose.append(
                f"what recurrent layers keep on GPUs is an estimate for {estimated} of "
                f"{len(self.found)} pieces of work: cuDNN's reserve by sizes that were published once"
            )
        if others := kernels["cpu"]:
            all_others = others == len(self.found)
            share = "all pieces of work" if all_others else f"{others} of {len(self.found)} pieces of work"
            whose.append(
                f"saved tensors are those of CPU kernels for {share}; kernels of GPUs keep some others"
            )
        return tuple(whose)
