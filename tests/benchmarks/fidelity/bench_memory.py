"""How far predicted peaks of memory are from what trackers see, without a job. Not a test.

    python -m tests.benchmarks.fidelity.bench_memory [--quick] [model ...]

Random strategies, a third of their blocks recomputed, of models at test size on fake ranks of jobs of 2, 4, 8
and 64: the judge's prediction, this project's tracker and PyTorch's
(``torch.distributed._tools.mem_tracker``, without its tracker of modules; tests/verify/torch_tracker.py says
why). Nothing is timed, so load does not matter. Results are dated files in tests/benchmarks/results/fidelity.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.fake_ranks import step_on, tracked_memory
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.benchmarks.machine import Taking, dated, described, write
from tests.benchmarks.program import arguments, page, table
from tests.simulate.strategies import memory_curve
from tests.verify.torch_tracker import torch_peak_bytes

MODELS = (
    "mlp",
    "gpt2-tiny",
    "llama-tiny",
    "bert-tiny",
    "transformer-tiny",
    "rnn-lm-tiny",
    "resnet-tiny",
    "wide-resnet-tiny",
)
MESHES = ((1, 2), (2, 2), (1, 8), (1, 2, 4), (1, 8, 8))
OPTIMIZER, RECOMPUTE = "adam", 0.3
PLANS = 2
"""Per mesh."""
QUICK_MODELS = ("mlp", "gpt2-tiny")


class Row(NamedTuple):
    """One plan: bytes predicted, tracked by this project and by PyTorch, and where the prediction peaks."""

    model: str
    mesh: str
    predicted_bytes: int
    tracked_bytes: int
    torch_bytes: int
    peaks_in: str

    @property
    def error(self) -> float:
        """Of the prediction, relative to what this project's tracker saw."""
        return self.predicted_bytes / self.tracked_bytes - 1


def drawn(loaded: CapturedModel, plans: int) -> Iterator[Strategy]:
    """Random strategies on every mesh; where micro-batches would change the result, without."""
    rng = random.Random(0)
    for mesh in MESHES:
        try:
            micro = micro_strategies(loaded.graph, mesh[0])
        except MicroBatchRefused:
            mesh = (1, *mesh[1:])
            micro = micro_strategies(loaded.graph, 1)
        for _ in range(plans):
            yield random_strategy(loaded.graph, mesh, micro, rng, RECOMPUTE)


def measure(name: str, plans: int) -> Iterator[Row]:
    loaded = load_model(ModelSpec(f"zoo:{name}", 0))
    known: dict[str, Facts] = {}
    for strategy in drawn(loaded, plans):
        works = {n: workload(loaded.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
        known.update({w.key: find_facts(w) for w in works.values() if w.key not in known})
        peak = memory_curve(strategy, {n: known[w.key] for n, w in works.items()}, OPTIMIZER).peak
        tracked = watched = 0
        for rank in sorted({0, math.prod(strategy.mesh[1:]) - 1}):  # only others than the first hold zeros
            with step_on(rank, loaded, strategy, OPTIMIZER) as step:
                step()
                tracked = max(tracked, tracked_memory(step)["peak"])
                watched = max(watched, torch_peak_bytes(step))
        yield Row(name, "x".join(map(str, strategy.mesh)), int(peak.total), tracked, watched, peak.moment)


def summaries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Median and worst error of every model, and of all plans together under the name ``all``."""
    found = []
    for name in (*dict.fromkeys(row.model for row in rows), "all"):
        own = [row for row in rows if name in (row.model, "all")]
        errors = [abs(row.error) for row in own]
        apart = [abs(row.torch_bytes / row.tracked_bytes - 1) for row in own]
        found.append(
            {
                "model": name,
                "plans": len(own),
                "error": statistics.median(errors),
                "worst": max(errors),
                "torch_apart": statistics.median(apart),
                "torch_apart_most": max(apart),
            }
        )
    return found


def markdown(data: Mapping[str, Any]) -> str:
    """Errors by model, then every plan."""
    return page(
        f"# Predicted peaks of memory on fake ranks, {data['date']}",
        f"Taken from {described(data)}.",
        (
            "Random strategies; error: prediction against this project's tracker. PyTorch's is run without",
            "hooks on modules: they hold the gradient of every parameter until all are there, and make",
            "autograd copy each, up to 16.7 % more, which a step that nobody watches does not",
            "(test_torch_tracker.py).",
        ),
        table(
            ["model", "plans", "median error", "worst", "PyTorch's tracker from ours, median", "most"],
            (
                [one["model"], one["plans"], f"{one['error']:.3%}", f"{one['worst']:.2%}",
                 f"{one['torch_apart']:.3%}", f"{one['torch_apart_most']:.2%}"]
                for one in data["results"]
            ),
        ),
        table(
            ["model", "micro-batches x mesh", "predicted", "tracked", "error", "PyTorch's", "peaks in"],
            ([*row[:4], f"{row.error:+.2%}", *row[4:]] for row in (Row(**one) for one in data["rows"])),
        ),
    )  # fmt: skip


def main() -> None:
    options = arguments(__doc__, "two models, a plan per mesh, into out/fidelity", MODELS).parse_args()
    rows: list[Row] = []
    taking = Taking()
    stem = dated("fidelity", "memory", quick=options.quick)
    for name in options.names or (QUICK_MODELS if options.quick else MODELS):
        for row in measure(name, 1 if options.quick else PLANS):
            rows.append(row)
            print(f"{row.model} {row.mesh}: {row.error:+.2%}", file=sys.stderr, flush=True)
        data = {**taking.about, "results": summaries(rows), "rows": [row._asdict() for row in rows]}
        write(stem, data, markdown(data))  # after every model: a run that is interrupted keeps what it has
    print(markdown(data))


if __name__ == "__main__":
    main()
