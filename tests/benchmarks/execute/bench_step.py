"""Executed step times: the fastest plan and data parallelism as a plan against DDP and FSDP2. Not a test.

    python -m tests.benchmarks.execute.bench_step [--quick] [--name NAME] [model ...]

Two CPU ranks of this machine over gloo, one thread each. All methods train the same weights on the same
global batch with the same optimizer, in the same processes, one step each in turn; a round's figure is its
slower rank's, a method's the median of its rounds. The lowered graph on one rank is compared with the plain
module in the same way. Results: tests/benchmarks/results/execute/DATE-step.{json,md}, of which READMEs show
the newest, so that one of some models is given another NAME; ``--quick``: two rounds, into out/execute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import tensoropt
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, _forget_models, load_model
from tensoropt.ranks.pool import RankPool
from tests.benchmarks.execute import rivals
from tests.benchmarks.machine import Results, described, rows_described
from tests.benchmarks.papers.authors import ITERATIONS
from tests.benchmarks.program import arguments, page, table

RANKS = 2
ROUNDS = 15
WARM_UP = 2
MODELS = {
    "gpt2": ("zoo:gpt2-demo", {}),
    "bert": ("zoo:bert-tiny", {"layers": 4, "hidden": 320, "heads": 8, "vocabulary": 8192, "sequence": 64,
                               "batch": 16}),
    "vgg16": ("zoo:vgg16", {"image": 32, "batch": 8}),
    "wide-resnet": ("zoo:wide-resnet-tiny", {"width": 4, "stem": 16, "image": 32, "batch": 16}),
    "rnn": ("zoo:rnn-lm-tiny", {"hidden": 512, "vocabulary": 1024, "steps": 8, "batch": 16}),
    "transformer": ("zoo:transformer-tiny", {"layers": 3, "hidden": 256, "heads": 4, "inner": 1024,
                                             "vocabulary": 4096, "source": 32, "target": 32, "batch": 16}),
}  # fmt: skip
RIVALS = ("ddp", "fsdp2")
OURS = "data parallel"


def explored(spec: ModelSpec, measure: str = "all") -> tuple[dict[str, Any], float, dict[str, str]]:
    """The strategies of the frontier's fastest point and of data parallelism, the first's predicted seconds,
    and why there is no data parallelism.

    Placed plans and pipelines, which have no strategy, are run by other executors than the one that is timed.
    """
    model, args, kwargs = spec.build()
    found = tensoropt.explore(
        model, args, kwargs, cluster=f"local:{RANKS}", micro_batches=(1,), max_points=20, dtype="float32",
        source=spec.source, placements="never", pipelines="never", measure=measure,
        planners=("data_parallel",),
    )  # fmt: skip
    chosen, planners = found.plan(len(found.points) - 1), found.all_points.planners
    strategies, refused = {"plan": chosen.strategy_data()}, {}
    if "data_parallel" in planners:
        strategies[OURS] = found.plan(planners.index("data_parallel")).strategy_data()
    else:
        (row,) = (row for row in found.comparison if row["planner"] == "data_parallel")
        refused[OURS] = "; ".join(row["notes"])
    return strategies, chosen.predicted.time_s, refused


def on_ranks(
    rank: int, world: int, spec: ModelSpec, strategies: Mapping[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Seconds per round of every method."""
    steps = {name: rivals.plan(spec, strategy) for name, strategy in strategies.items()}
    steps |= {"ddp": rivals.ddp(spec), "fsdp2": rivals.fsdp2(spec)}
    _forget_models()
    return in_turns(steps, rounds, slower)


def alone(rank: int, world: int, spec: ModelSpec, strategy: Any, rounds: int) -> dict[str, list[float]]:
    """One rank: the lowered graph against the plain module."""
    steps = {"lowered": rivals.plan(spec, strategy), "plain": rivals.plain(spec)}
    _forget_models()
    return in_turns(steps, rounds, lambda seconds: seconds)


def in_turns(steps: dict[str, rivals.Step], rounds: int, agreed: Any) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(WARM_UP + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            seconds = agreed(time.perf_counter() - start)
            if turn >= WARM_UP:
                times[name].append(seconds)
    return times


def slower(seconds: float) -> float:
    """The most seconds that a rank gives."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One row: medians in seconds, and the two ratios that count."""
    source, settings = MODELS[name]
    spec = ModelSpec(source, settings=tuple(settings.items()))
    strategies, predicted_s, refused = explored(spec)
    graph = load_model(spec).graph
    parameters = sum(t.elements for t in graph.atoms.graph.parameters)
    whole = unsplit_strategy(graph).to_data()
    _forget_models()
    with RankPool(RANKS, timeout_s=400.0) as pool:
        found = pool.run(on_ranks, spec, strategies, rounds)[0]
    with RankPool(1, timeout_s=400.0) as pool:
        single = pool.run(alone, spec, whole, rounds)[0]
    medians = {k: statistics.median(v) for k, v in found.items()}
    best_s = min(medians[rival] for rival in RIVALS)
    return {
        "model": name,
        "source": source,
        "settings": settings,
        "parameters": parameters,
        "predicted_s": predicted_s,
        "seconds": medians,
        "refused": refused,
        "against_best": medians["plan"] / best_s,
        "against_ddp": medians["plan"] / medians["ddp"],
        **({"data_parallel_against_ddp": medians[OURS] / medians["ddp"]} if OURS in medians else {}),
        "one_rank_ratio": statistics.median(
            a / b for a, b in zip(single["lowered"], single["plain"], strict=True)
        ),
    }


def markdown(results: Mapping[str, Any]) -> str:
    methods = ("plan", OURS, *RIVALS)
    head = ["model", "parameters", "predicted", *methods, "plan / best", "plan / ddp", f"{OURS} / ddp"]
    rows = []
    for row in results["rows"]:
        seconds = row["seconds"]
        cells = [row["model"], f"{row['parameters'] / 1e6:.1f} M", f"{row['predicted_s'] * 1e3:.0f}"]
        cells += [f"{seconds[m] * 1e3:.0f}" if m in seconds else "-" for m in methods]
        # Models that a way cannot split lack its ratios.
        ratios = ("against_best", "against_ddp", "data_parallel_against_ddp")
        cells += [f"{row[k]:.2f}" if k in row else "-" for k in ratios]
        rows.append([*cells, f"{row['one_rank_ratio']:.3f}"])
    return page(
        f"# Step times on {RANKS} CPU ranks, {results['date']}",
        f"Taken from {described(results)}.",
        "Milliseconds per training step (medians); `lowered / plain`: the unsplit plan on one rank against "
        "the plain module.",
        f"`{OURS}`: data parallelism as a plan, run by our executor.",
        "Theirs (TensorOpt, Table 4, 16 GPUs, seconds):",
        table(
            ["model", "plan", "its data parallelism", "Horovod", "plan / Horovod"],
            (
                (model, *(f"{figure:.2f}" for figure in (*theirs, theirs.plan / theirs.horovod)))
                for model, theirs in ITERATIONS.items()
            ),
        ),
        table([*head, "lowered / plain"], rows),
        "Each row was taken from:",
        rows_described(results["rows"], "model"),
        [
            f"- {row['model']}: no {method}: {why}"
            for row in results["rows"]
            for method, why in row["refused"].items()
        ],
    )


def main() -> None:
    parser = arguments(__doc__, "two rounds, results in out/execute", MODELS)
    parser.add_argument("--name", default="step", help="of the result, DATE-NAME; default: step")
    options = parser.parse_args()
    results = Results("execute", options.name, {}, quick=options.quick)
    for name in options.names or MODELS:
        start = time.perf_counter()
        results.add("model", measure(name, 2 if options.quick else ROUNDS))
        results.write(markdown(results.data))
        alone = results.data | {"rows": results.data["rows"][-1:]}
        print(f"{markdown(alone)}\ntook {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
