"""How far predictions are from what a step really does. Not a test.

    python -m tests.benchmarks.fidelity.bench_fidelity [--quick] [--cluster local:2] [--models NAME ...]

Laptop-size versions of the models of TensorOpt's Table 2, and VGG16 and GPT-2, are explored on CPU ranks of
this machine, with measurements made in the same run; ten plans spaced evenly by index along each frontier are
run. Every plan is timed in two rounds over all plans: their difference is the noise floor. Results are dated
files in tests/benchmarks/results/fidelity; models that were measured earlier the same day keep their rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensoropt.api import explore
from tensoropt.costs.pool import RankPool
from tensoropt.costs.store import ProfileStore
from tensoropt.execute.models import ModelSpec
from tests.benchmarks.fidelity.report import markdown, picture, summary
from tests.benchmarks.fidelity.steps import run_plan, seconds_of
from tests.benchmarks.machine import dated, machine, write

MODELS = {
    "VGG16": ("zoo:vgg16", (("batch", 32), ("classes", 10), ("hidden", 256), ("image", 32), ("width", 16))),
    "WideResNet": ("zoo:wide-resnet-tiny", (("batch", 32),)),
    "RNN": ("zoo:rnn-lm-tiny", (("batch", 64),)),
    "Transformer": ("zoo:transformer-tiny", (("batch", 32),)),
    "GPT-2": ("zoo:gpt2-demo", ()),
}
PLANS, STEPS = 10, 7
QUICK_PLANS, QUICK_STEPS, QUICK_MODELS = 3, 3, ("RNN", "GPT-2")
OPTIMIZER = "adam"


def evenly(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``count`` indices, both ends among them."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(i * (count - 1) / (wanted - 1)) for i in range(wanted)})


def measure(name: str, cluster: str, plans: int, steps: int, store: ProfileStore) -> dict[str, Any]:
    """Explore one model, run some of its plans twice; rows of predicted and measured."""
    source, settings = MODELS[name]
    spec = ModelSpec(source, 0, settings=settings)
    model, args, kwargs = spec.build()
    begun = time.perf_counter()
    found = explore(model, args, kwargs, cluster=cluster, optimizer=OPTIMIZER, source=source, store=store)
    explored_s = time.perf_counter() - begun
    rows = []
    with RankPool(found.devices, timeout_s=600.0) as pool:
        chosen = [(i, found.points[i], found.plan(i)) for i in evenly(len(found.points), plans)]
        rounds = [
            [pool.run(run_plan, spec, plan.strategy_data(), OPTIMIZER, steps) for _, _, plan in chosen]
            for _ in range(2)
        ]
    for (index, point, plan), *both in zip(chosen, *rounds, strict=True):
        timed = [seconds_of(ranks) for ranks in both]
        rows.append(
            {
                "point": index,
                "mesh": plan.mesh.label,
                "micro_batches": plan.micro_batches,
                "time_predicted_s": point.time_s,
                "time_measured_s": [statistics.median(whole) for whole, _ in timed],
                "network_predicted_s": point.communication_s,
                "network_measured_s": [statistics.median(network) for _, network in timed],
                "memory_predicted_bytes": point.memory_bytes,
                "memory_measured_bytes": max(rank["memory_bytes"] for rank in both[0]),
            }
        )
    return {
        "model": name,
        "source": source,
        "settings": dict(settings),
        "points": len(found.points),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer models, plans and steps")
    parser.add_argument("--cluster", default="local:2", help="default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), help="default: all")
    parser.add_argument("--out", type=Path, help="where the results go")
    options = parser.parse_args()
    names = options.models or (QUICK_MODELS if options.quick else tuple(MODELS))
    plans, steps = (QUICK_PLANS, QUICK_STEPS) if options.quick else (PLANS, STEPS)
    results = []
    with tempfile.TemporaryDirectory() as folder, ProfileStore(Path(folder) / "profiles.sqlite") as store:
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            results.append(measure(name, options.cluster, plans, steps, store))
            print(line(results[-1]), file=sys.stderr, flush=True)
            text = save(results, options)  # after every model: a run that is interrupted keeps what it has
    print(text)


def save(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Write what is known by now, with what the same day's file has of other models; gives it as text."""
    date = datetime.date.today().isoformat()
    stem = dated("fidelity", "fidelity", quick=options.quick, out=options.out)
    data = {
        "date": date,
        "machine": machine(),
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
    earlier = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else []
    found = {one["model"]: one for one in (*earlier, *results)}
    return [found[name] for name in MODELS if name in found]


if __name__ == "__main__":
    main()
