"""The facts of many workloads, derived from runs of a few of each kind on fake tensors (probes).

Workloads of one kind differ only in sizes. Every storage size, transfer and FLOP count of a probe is a
product of powers of these sizes, so that probes of a few workloads determine it for all workloads of the
kind, in whole numbers. Memory peaks are not such products, but maxima of sums of them. For the peaks, one
workload is probed once more with an array in place of every number, which has an element for each workload of
the kind. More probes check the result: one for every pattern of sizes that are 1, as such dims broadcast and
have any stride.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tensoropt.processes import cores, in_forks
from tensoropt.profiling.cuda_kernels import Capability, has_attention, has_recurrent
from tensoropt.profiling.fact_finding import UnlikeError, find_facts, probe
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload

_LEAST_PER_PROCESS = 16
"""The fewest probes worth a process; an assumption: a probe takes 8 ms, a fork about 50 ms."""
_PER_KIND = 8
"""The usual largest number of probes of a kind."""
_SIZE = re.compile(r"(?<![\w.-])[1-9]\d*(?![\w.])")
_NO_SIZE = 1e-6
"""The difference below which two logarithms are equal, and an exponent counts as a whole number."""
_LARGE = 1 << 60
"""The bound on all sizes and FLOP counts, so that sums of several fit into 64 bits."""
_FEW = 3
"""The most workloads of a kind that are all probed, because deriving their facts takes as many probes."""


def kind_of(work: Workload) -> str:
    """Return a text that workloads have in common if they differ only in sizes. With attention or recurrent
    layers the text has the sizes, too, as they decide which kernels run."""
    alone = has_attention(work) or has_recurrent(work)
    return work.content if alone else _SIZE.sub("#", work.content)


def find_facts_of_all(
    works: Sequence[Workload], training: bool = True, capability: Capability | None = None
) -> list[Facts]:
    """Return the facts of many workloads, in order, computed in forked processes if this process allows it.

    ``capability``: the compute capability of the GPU whose kernels run; None for CPU kernels.
    """
    kinds: dict[str, list[int]] = {}
    for i, work in enumerate(works):
        kinds.setdefault(kind_of(work), []).append(i)
    # Large kinds first, dealt to processes in turn, so that all have about as much to do.
    members = sorted(kinds.values(), key=len, reverse=True)
    probes = sum(min(len(kind), _PER_KIND) for kind in members)
    processes = max(1, min(cores(), probes // _LEAST_PER_PROCESS))

    def find(first: int) -> list[tuple[int, Facts]]:
        found = []
        for kind in members[first::processes]:
            derived = _derive_facts([works[i] for i in kind], training)
            found += [
                (i, derived.get(n) or find_facts(works[i], training, capability)) for n, i in enumerate(kind)
            ]
        return found

    facts_of = dict(one for part in in_forks(find, range(processes)) for one in part)
    return [facts_of[i] for i in range(len(works))]


def _derive_facts(works: Sequence[Workload], training: bool) -> dict[int, Facts]:
    """Return index -> facts of workloads of one kind, except of those that have to be probed one by one."""
    kind = _Kind(works, training)
    found = kind.derive(range(len(works)))
    if len(found) < len(works):
        for pattern in set(kind.patterns):
            found |= kind.derive(
                [i for i, own in enumerate(kind.patterns) if own == pattern and i not in found]
            )
    return found | {i: facts for i, (facts, _) in kind.probed.items()}


class _Kind:
    """Workloads that differ only in sizes.

    Attributes:
        sizes: the sizes that differ, ``[workloads, sizes]``.
        patterns: for each workload, which of these sizes are 1.
        probed: by workload, its facts and the numbers recorded by its probe.
    """

    def __init__(self, works: Sequence[Workload], training: bool):
        self.works, self.training = works, training
        sizes = np.array([[int(n) for n in _SIZE.findall(work.content)] for work in works], dtype=np.int64)
        self.sizes = np.unique(sizes[:, (sizes != sizes[0]).any(axis=0)], axis=1)
        self.patterns = [tuple(row) for row in (self.sizes == 1).tolist()]
        self.probed: dict[int, tuple[Facts, tuple[int, ...]]] = {}

    def derive(self, members: Sequence[int]) -> dict[int, Facts]:
        """Return index -> facts of those ``members`` whose facts follow from probes of a few."""
        if len(members) <= _FEW:
            return {}
        logs = np.log(self.sizes)
        first = max(members, key=lambda i: logs[i].sum())
        apart = logs - logs[first]
        far = sorted(members, key=lambda i: -np.linalg.norm(apart[i]))
        chosen = [first, *_independent(apart, far)]
        checks: list[int] = []
        for i in (i for i in far if i not in chosen):
            if not checks or self.patterns[i] not in {self.patterns[n] for n in (*chosen, *checks)}:
                checks.append(i)
        if len(chosen) + len(checks) + 1 >= len(members):
            return {}
        met = [self._probe(i)[1] for i in chosen]
        # Narrow ranges first: sizes by themselves, not their products.
        columns = _independent(apart[chosen].T, np.argsort(np.linalg.norm(apart[chosen], axis=0)).tolist())
        of_kind = _products(self.sizes[:, columns], chosen, met)
        if of_kind is None:
            return {}
        try:
            found = probe(self.works[first], self.training, of_kind)[0].to_record()
        except UnlikeError:
            return {}

        def at(i: int) -> Facts:
            return Facts.from_record(_at(found, i))

        unlike = {
            self.patterns[i]
            for i in (*chosen, *checks)
            if self._probe(i) != (at(i), tuple(int(numbers[i]) for numbers in of_kind))
        }
        if any(self.patterns[i] in unlike for i in (*chosen, checks[0])):
            return {}
        return {i: at(i) for i in members if self.patterns[i] not in unlike}

    def _probe(self, i: int) -> tuple[Facts, tuple[int, ...]]:
        if i not in self.probed:
            self.probed[i] = probe(self.works[i], self.training)
        return self.probed[i]


def _independent(vectors: np.ndarray, order: Iterable[int]) -> list[int]:
    """Return the indices of vectors that are linearly independent of all vectors before them in ``order``."""
    left, found = vectors.copy(), []
    for i in order:
        length = np.linalg.norm(left[i])
        if length > _NO_SIZE:
            unit = left[i] / length
            left -= np.outer(left @ unit, unit)
            found.append(int(i))
    return found


def _products(
    sizes: np.ndarray, chosen: Sequence[int], met: Sequence[Sequence[int]]
) -> list[np.ndarray] | None:
    """Return each recorded number for all workloads, as a product of powers of sizes; None if one is not.

    Args:
        sizes: ``[workloads, sizes]``; the sizes differ independently of each other.
        chosen: the probed workloads, one more than sizes.
        met: the recorded numbers of each probed workload.
    """
    if len({len(numbers) for numbers in met}) > 1:
        return None
    whole, logs = sizes.astype(object), np.log(sizes[chosen])  # Python's whole numbers have no largest
    inverse = np.linalg.inv(logs[1:] - logs[0])
    found: dict[tuple[int, ...], np.ndarray] = {}
    for seen in set(zip(*met, strict=True)):
        if 0 in seen:
            if any(seen):
                return None
            found[seen] = np.zeros(len(sizes), dtype=np.int64)
            continue
        seen_logs = np.log(np.array(seen, dtype=float))
        exponents = inverse @ (seen_logs[1:] - seen_logs[0])
        powers = np.rint(exponents).astype(int)
        above, below = np.full(len(sizes), seen[0], dtype=object), 1
        for column, power in enumerate(powers.tolist()):
            each, first = whole[:, column], whole[chosen[0], column]
            above = above * (each**power if power > 0 else first**-power)
            below = below * (first**power if power > 0 else each**-power)
        numbers = above // below
        exact = np.all(numbers * below == above) and tuple(numbers[chosen]) == seen and max(numbers) < _LARGE
        if np.abs(exponents - powers).max(initial=0.0) > _NO_SIZE or not exact:
            return None
        found[seen] = numbers.astype(np.int64)
    return [found[seen] for seen in zip(*met, strict=True)]


def _at(record: Any, position: int) -> Any:
    if isinstance(record, np.ndarray):
        return record[position].item()
    if isinstance(record, dict):
        return {key: _at(value, position) for key, value in record.items()}
    return [_at(value, position) for value in record] if isinstance(record, list | tuple) else record
