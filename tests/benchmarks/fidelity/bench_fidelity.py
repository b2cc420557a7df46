"""How far predictions are from what a step really does. Not a test.

    python -m tests.benchmarks.fidelity.bench_fidelity [--quick] [--cluster local:2] [model ...]

Laptop-size versions of the models of TensorOpt's Table 2, and VGG16 and GPT-2, are explored on CPU ranks of
this machine; ten plans on a mesh, spaced evenly by index along each frontier, are run (not those that place
operators on single devices). Plans take turns in several rounds, as the machine's speed changes within
seconds; what every other round says of the same plan differs by the noise floor. Results are dated files in
tests/benchmarks/results/fidelity; models that were measured earlier the same day keep their rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensoropt.api import explore
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.execute.executable import engine_of, strategy_from_data
from tensoropt.plan.kinds import SHARDED
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.pool import RankPool
from tensoropt.tuning.steps import run_steps, seconds_of
from tensoropt.verify.fake_ranks import RunStep, tracked_memory
from tests.benchmarks.fidelity.report import markdown, picture, summary
from tests.benchmarks.machine import Taking, dated, inherited, write
from tests.benchmarks.program import arguments

MODELS = {
    "VGG16": ("zoo:vgg16", (("batch", 32), ("classes", 10), ("hidden", 256), ("image", 32), ("width", 16))),
    "WideResNet": ("zoo:wide-resnet-tiny", (("batch", 32),)),
    "RNN": ("zoo:rnn-lm-tiny", (("batch", 64),)),
    "Transformer": ("zoo:transformer-tiny", (("batch", 32),)),
    "GPT-2": ("zoo:gpt2-demo", ()),
}
PLANS, ROUNDS, STEPS = 10, 6, 3
TRACKED = 3
"""A thread of gloo's can hold a tensor for a moment after its collective was waited for, and so add one to a
peak in one step and not in the next."""
QUICK_PLANS, QUICK_ROUNDS, QUICK_MODELS = 3, 2, ("RNN", "GPT-2")
OPTIMIZER = "adam"


def evenly(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``count`` indices, both ends among them."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(i * (count - 1) / (wanted - 1)) for i in range(wanted)})


def halves(rounds: Sequence[float]) -> list[float]:
    """Means of every other round, from the first and from the second on."""
    return [statistics.fmean(rounds[0::2]), statistics.fmean(rounds[1::2])]


def tracked_peaks(
    rank: int, world_size: int, spec: ModelSpec, strategy: Mapping[str, Any], optimizer: str, steps: int
) -> list[int]:
    """Return the peak of tensors in each step on one rank of the pool."""
    loaded = load_model(spec)
    engine = engine_of(strategy_from_data(strategy, loaded.graph), loaded.values)
    step = RunStep(engine, loaded.inputs, optimizer)
    step()
    return [tracked_memory(step)["peak"] for _ in range(steps)]


def measure(name: str, cluster: str, plans: int, rounds: int, store: ProfileStore) -> dict[str, Any]:
    """Explore one model, run some of its plans several times; rows of predicted and measured."""
    source, settings = MODELS[name]
    spec = ModelSpec(source, 0, settings=settings)
    model, args, kwargs = spec.build()
    begun = time.perf_counter()
    found = explore(
        model, args, kwargs, cluster=cluster, optimizer=OPTIMIZER, dtype="float32", source=source, store=store
    )
    explored_s = time.perf_counter() - begun
    loaded = load_model(spec)
    with RankPool(found.devices, timeout_s=600.0) as pool:
        # Placed plans have no strategy on a mesh, whose stamps and terms are what this compares.
        on_mesh = [i for i, point in enumerate(found.points) if point.kind is SHARDED]
        indices = [on_mesh[n] for n in evenly(len(on_mesh), plans)]
        chosen = [(i, found.points[i], found.plan(i)) for i in indices]
        drawn = [plan.strategy(loaded.graph).to_data() for *_, plan in chosen]
        found_in = [[pool.run(run_steps, spec, of, OPTIMIZER, STEPS) for of in drawn] for _ in range(rounds)]
        peaks_of = [pool.run(tracked_peaks, spec, of, OPTIMIZER, TRACKED) for of in drawn]
    rows = []
    for (index, point, plan), alive, *ran in zip(chosen, peaks_of, *found_in, strict=True):
        timed = [[statistics.median(seconds) for seconds in seconds_of(ranks)] for ranks in ran]
        whole, network = zip(*timed, strict=True)
        rows.append(
            {
                "point": index,
                "mesh": plan.mesh.label,
                "micro_batches": plan.micro_batches,
                "time_predicted_s": point.time_s,
                "compute_predicted_s": point.compute_s,
                "time_measured_s": halves(whole),
                "network_predicted_s": point.communication_s,
                "network_measured_s": halves(network),
                "memory_predicted_bytes": point.memory_bytes,
                "memory_measured_bytes": max(statistics.median_low(peaks) for peaks in alive),
                "memory_most_bytes": max(map(max, alive)),
            }
        )
    return {
        "model": name,
        "source": source,
        "settings": dict(settings),
        "points": len(on_mesh),
        "points_left_out": len(found.points) - len(on_mesh),
        "explore_s": explored_s,
        "rows": rows,
        **summary(rows),
    }


def line(one: dict[str, Any]) -> str:
    """What came out of one model."""
    return (
        f"{one['model']}: {len(one['rows'])} of {one['points']} plans, time off by {one['time_error']:.1%}"
        f" ({one['bias']:+.1%}; noise {one['noise']:.1%}), network {one['network_error']:.1%},"
        f" memory {one['memory_error']:.2%}"
    )


def main() -> None:
    parser = arguments(__doc__, "fewer models, plans and steps", MODELS)
    parser.add_argument("--cluster", default="local:2", help="default: %(default)s")
    options = parser.parse_args()
    names = options.names or (QUICK_MODELS if options.quick else tuple(MODELS))
    plans, rounds = (QUICK_PLANS, QUICK_ROUNDS) if options.quick else (PLANS, ROUNDS)
    results, taking = [], Taking()
    with tempfile.TemporaryDirectory() as folder, ProfileStore(Path(folder) / "profiles.sqlite") as store:
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            one = measure(name, options.cluster, plans, rounds, store)
            results.append({**one, "taken": taking.part()})
            print(line(results[-1]), file=sys.stderr, flush=True)
            # after every model: a run that is interrupted keeps what it has
            text = save(results, taking.about, options)
    print(text)


def save(results: Sequence[dict[str, Any]], about: dict[str, Any], options: argparse.Namespace) -> str:
    """Write what is known by now, with what the same day's file has of other models; gives it as text."""
    stem = dated("fidelity", "fidelity", quick=options.quick)
    data = {
        **about,
        "cluster": options.cluster,
        "quick": options.quick,
        "optimizer": OPTIMIZER,
        "results": with_earlier(results, stem.with_suffix(".json")),
    }
    text = markdown(data)
    write(stem, data, text, picture(data))
    return text


def with_earlier(results: Sequence[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Results of this run and, in the models' order, those of other models that the file has."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"results": []}
    earlier = [inherited(one, old) for one in old["results"]]
    found = {one["model"]: one for one in (*earlier, *results)}
    return [found[name] for name in MODELS if name in found]


if __name__ == "__main__":
    main()
