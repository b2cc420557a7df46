"""TensorOpt's Table 1: its models' sizes, beside the zoo's models of figure 6. Not a test.

    python -m tests.benchmarks.papers.sizes [--quick]

Memory is that of a step on one device that holds everything, simulated: parameters, gradients, SGD without
momentum, and what backward needs. The paper's counts less. Results:
tests/benchmarks/results/papers/DATE-sizes.{json,md}.
"""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cluster import load_cluster
from tensoropt.placement import Placement, simulate_placement
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.benchmarks.machine import Results, described, rows_described
from tests.benchmarks.papers.authors import SIZES
from tests.benchmarks.papers.figure6 import CLUSTER, MODELS, OPTIMIZER, QUICK
from tests.benchmarks.papers.planned import captured, priced


def size(model: str, source: str, settings: dict[str, int]) -> dict[str, Any]:
    """Bytes of a model's parameters and of its step on one device; samples of its batch."""
    options = tuple((key, value) for key, value in settings.items() if key != "batch")
    batch = settings.get("batch")
    with ProfileStore() as store:
        cluster = load_cluster(f"{CLUSTER}[1]")
        graph = priced(
            source, batch, cluster, store, options, Settings(optimizer=OPTIMIZER, process_memory=False)
        )
    alone = simulate_placement(graph.problem, Placement.in_order([0] * graph.problem.size, 1))
    operators = captured(source, batch, options).graph.atoms.graph
    inputs = [operators.tensors[name].shape for name in operators.inputs]
    return {
        "model": model,
        "source": source,
        "settings": settings,
        "parameter_bytes": sum(tensor.bytes for tensor in operators.parameters),
        "batch": inputs[0][0],
        "memory_bytes": alone.memory_bytes,
    }


def markdown(data: dict[str, Any]) -> str:
    lines = [
        f"# Sizes of TensorOpt's models, {data['date']}",
        "",
        "*Theirs*: Table 1 of arXiv 2004.10856. *Ours*: the models of figure 6; memory of a step on one",
        f"device that holds everything, {OPTIMIZER}, simulated. Theirs counts less: parameters and gradients",
        "of the RNN alone are 216 GB. So only parameters and batches are to be set side by side.",
        "",
        f"Taken from {described(data)}.",
        "",
        "| model | parameters, theirs | ours | batch, theirs | ours | memory, theirs | ours |",
        "|" + " --- |" * 7,
    ]
    for row in data["rows"]:
        theirs = SIZES[row["model"]]
        parameters, memory = (row[key] / 2**30 for key in ("parameter_bytes", "memory_bytes"))
        cells = [row["model"], f"{theirs.parameters_gb} GB", f"{parameters:.3g} GiB", theirs.batch]
        cells += [row["batch"], f"{theirs.memory_gb} GB", f"{memory:.3g} GiB"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *rows_described(data["rows"], "model")]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="laptop-size models, into out/papers")
    options = parser.parse_args()
    results = Results("papers", "sizes", {}, quick=options.quick)
    for name, (source, settings) in (QUICK if options.quick else MODELS).items():
        results.add("model", size(name, source, settings))
        results.write(markdown(results.data))
    print(markdown(results.data))


if __name__ == "__main__":
    main()
