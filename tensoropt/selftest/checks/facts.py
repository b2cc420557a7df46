"""The tensors that operators keep for backward, according to fake tensors and to the device's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, open_model
from tensoropt.profiling.fact_finding import find_facts, find_facts_on_rank
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.ranks.pool import RankPool
from tensoropt.selftest.models import short_name, small_models
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome

_BOUND = 0.01
"""The relative bound: the goal for memory as a whole."""
_MOST_NAMED = 5
_DTYPES = ("float32", "bfloat16")


def run(context: CheckContext) -> Outcome:
    """Compare the bytes that the groups of small models keep and need, for fake tensors and for real ones."""
    capability = torch.cuda.get_device_capability(0) if context.on_gpu else None
    specs = [replace(spec, compute_dtype=dtype) for spec in small_models(context) for dtype in _DTYPES]
    figures: list[Bounded] = []
    other: list[str] = []
    with RankPool(1, backend=context.backend) as pool:
        for spec in specs:
            works = _workloads_of(spec)
            fake = [find_facts(work, True, capability) for work in works]
            real = []
            for work in works:
                record = pool.run(find_facts_on_rank, work, True)[0]
                if "error" in record:
                    return Outcome.failed(
                        f"{short_name(spec)}: {work.describe()} cannot run: {record['error']}"
                    )
                real.append(Facts.from_record(record))
            figures += compared(f"{short_name(spec)}, {spec.compute_dtype}", fake, real)
            other += [
                f"{short_name(spec)}, {spec.compute_dtype}, {work.describe()}: {faked.kept_bytes} kept, "
                f"{observed.kept_bytes} by the device"
                for work, faked, observed in zip(works, fake, real, strict=True)
                if faked.kept_bytes != observed.kept_bytes
            ]
    return Outcome.of(figures, unlike=other[:_MOST_NAMED], unlike_count=len(other))


def _workloads_of(spec: ModelSpec) -> list[Workload]:
    """Return what one rank runs for each group of the unsplit model, without duplicates."""
    graph = open_model(replace(spec, device="cpu")).graph
    strategy = unsplit_strategy(graph)
    works = (workload(graph, c, strategy.mesh) for c in strategy.configurations.values())
    return list({work.key: work for work in works}.values())


def compared(name: str, fake: Iterable[Facts], real: Iterable[Facts]) -> list[Bounded]:
    """Return the sums over all workloads of what is kept, and of what backward needs beside it."""
    kinds: dict[str, Callable[[Facts], int]] = {
        "kept for backward": lambda facts: facts.kept_bytes,
        "most in forward": lambda facts: facts.kept_bytes + facts.forward_peak_bytes,
        "most in backward": lambda facts: facts.kept_bytes + facts.backward_peak_bytes,
    }
    fake, real = list(fake), list(real)
    return [
        Bounded.share(f"{name}: {kind}", off(sum(map(size, fake)), sum(map(size, real))), _BOUND)
        for kind, size in kinds.items()
    ]


def off(predicted: float, true: float) -> float:
    """Return how far a prediction is from the truth, relative."""
    return abs(predicted / true - 1) if true else float(predicted != 0)
