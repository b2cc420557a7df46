"""How far predictions are from what a step really does. Not a test.

    python -m tests.benchmarks.fidelity.bench_fidelity [--quick] [model ...]

Laptop-size versions of the models of TensorOpt's Table 2, and VGG16 and GPT-2, are explored on CPU ranks of
this machine; ten plans on a mesh, spaced evenly by index along each frontier, are run (not those that place
operators on single devices). Plans take turns in several rounds, as the machine's speed changes within
seconds; what every other round says of the same plan differs by the noise floor. Results are dated files in
tests/benchmarks/results/fidelity; models that were measured earlier the same day keep their rows.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from tests.benchmarks.program import Row, run_parts

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
CLUSTER, OPTIMIZER = "local:2", "adam"


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


def measure(name: str, plans: int, rounds: int, store: ProfileStore) -> Row:
    """Explore one model, run some of its plans several times; rows of predicted and measured."""
    source, settings = MODELS[name]
    spec = ModelSpec(source, 0, settings=settings)
    model, args, kwargs = spec.build()
    found = explore(
        model, args, kwargs, cluster=CLUSTER, optimizer=OPTIMIZER, dtype="float32", source=source, store=store
    )
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
        "rows": rows,
        **summary(rows),
    }


def _measured(name: str, quick: bool) -> Iterator[Row]:
    plans, rounds = (QUICK_PLANS, QUICK_ROUNDS) if quick else (PLANS, ROUNDS)
    with tempfile.TemporaryDirectory() as folder, ProfileStore(Path(folder) / "profiles.sqlite") as store:
        yield measure(name, plans, rounds, store)


if __name__ == "__main__":
    run_parts(
        __doc__,
        "fewer models, plans and steps",
        ("fidelity", "fidelity"),
        {name: partial(_measured, name) for name in MODELS},
        lambda data: (markdown(data), picture(data)),
        rows="results",
        few=QUICK_MODELS,
        order=lambda row: list(MODELS).index(row["model"]),
        about={"cluster": CLUSTER, "optimizer": OPTIMIZER},
    )
