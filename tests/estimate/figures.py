"""Counts what ``tensoropt fit`` knows of the zoo: the configs of its transformers, and figures of the others.

``python -m tests.estimate.figures [NAME ...]`` writes ``estimate/figures.json`` anew, or only the rows of the
names given. A model without a config is captured on the meta device at two batches and simulated on four
devices; what its activations take grows by a line between and beyond them. With ``accuracy`` as the name, the
models with a config are compared with the simulator, and how far their estimates are off is written.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.estimate.known import known_model
from tensoropt.estimate.strategies import DTYPES, AskedStep
from tensoropt.evaluation.problem import Problem, prepare
from tensoropt.planners.pinned import PinnedConfiguration, simulate_pinned
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.estimate.beside_simulator import beside

FILE = "figures.json"
DEVICES = 4
CONFIG = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act",
    "tie_word_embeddings", "type_vocab_size",
    "num_local_experts", "num_experts_per_tok", "n_embd", "n_layer", "n_head", "n_positions",
    "activation_function",
)  # fmt: skip
"""The keys of a ``config.json`` that are kept."""
STAGES = (0, 2, 3)
ACCURACY = "accuracy"
COMPARED = [
    *((f"{family}-tiny", 8, dtype) for family in ("gpt2", "bert", "llama", "mixtral") for dtype in DTYPES),
    ("gpt2", 8, "bfloat16"), ("gpt2", 64, "bfloat16"), ("gpt2", 8, "float32"), ("bert-base", 8, "bfloat16"),
    ("bert-large", 64, "float32"), ("gpt2-xl", 8, "bfloat16"), ("gpt3-6.7b", 8, "bfloat16"),
    ("gpt3-6.7b", 8, "float32"), ("llama3-8b", 8, "bfloat16"), ("llama3-8b", 8, "float32"),
    ("llama3-8b?sequence=2048", 8, "bfloat16"), ("llama3-70b", 8, "bfloat16"),
    ("mixtral-8x7b", 8, "bfloat16"),
]  # fmt: skip
"""The model, the batch and the dtype of each comparison."""


def config_of(built: zoo.ZooModel) -> dict[str, Any] | None:
    """Return the config of a model that the package ``transformers`` defines; None for others."""
    config = getattr(getattr(built.model, "network", None), "config", None)
    if config is None:
        return None
    found = config.to_dict()
    return {key: found[key] for key in CONFIG if found.get(key) is not None}


def simulated(problem: Problem, dtype: str, **chosen: Any) -> Any:
    """Return the point of a pinned configuration without an optimizer, on a node of H100."""
    pinned = PinnedConfiguration(**chosen)
    settings = Settings(dtype=dtype, measure="never", optimizer="sgd", process_memory=False)
    costs = CostSource(load_cluster(f"dgx-h100[{pinned.devices}]"), ProfileStore(":memory:"), settings)
    return simulate_pinned(problem, costs, pinned).point


def lines(name: str, batch: int) -> tuple[dict[str, Any], str]:
    """Return per dtype, per ZeRO stage, without and with recomputation: bytes of a device and bytes for each
    of its samples, which parameters, gradients and optimizer come on top of; and why there is none.
    """
    each = max(1, batch // (2 * DEVICES))
    found, refusal = dict[str, Any](), ""
    for dtype in ("bfloat16", "float32"):
        problems = {}
        for samples in (each, 2 * each):
            built = zoo.build(name, batch=DEVICES * samples, device="meta")
            problems[samples] = prepare(capture(built.model, built.args, built.kwargs, dtype=dtype))
        rows = found[dtype] = {}
        for stage in STAGES:
            for recompute in (False, True):
                sizes = []
                try:
                    for samples, problem in problems.items():
                        point = simulated(problem, dtype, data=DEVICES, stage=stage, recompute=recompute)
                        sizes.append((samples, point.memory_bytes - sum(point.memory[:3])))
                except TensorOptError as error:
                    refusal = refusal or str(error)
                    continue
                (low, small), (high, large) = sizes
                slope = (large - small) / (high - low)
                rows[f"{stage}{' full' if recompute else ''}"] = [round(small - slope * low), round(slope)]
    return {dtype: rows for dtype, rows in found.items() if rows}, refusal


def row(name: str) -> dict[str, Any]:
    """Return what is kept of one model of the zoo."""
    entry = zoo.entry(name)
    built = zoo.build(name, batch=entry.batch, device="meta")
    config = config_of(built)
    if config is not None:
        sequence = entry.overrides["sequence"]
        return {"batch": entry.batch, "sequence": sequence, "config": config}
    simulated_lines, refusal = lines(name, entry.batch)
    known = {"batch": entry.batch, "parameters": built.parameter_count, "lines": simulated_lines}
    return known if simulated_lines else {**known, "refusal": refusal}


def accuracy() -> dict[str, Any]:
    """Return how far estimates of the zoo's transformers are off the simulator's figures, as shares."""
    off = []
    for name, batch, dtype in COMPARED:
        known = known_model(name)
        step = AskedStep(batch=batch, sequence=known.sequence, dtype=dtype)
        off += [abs(one.off) for one in beside(known, zoo.build(name, batch=batch, device="meta"), step)]
        print(name, dtype, len(off), max(off), flush=True)
    return {"count": len(off), "median": round(median(off), 5), "worst": round(max(off), 5)}


def main(names: list[str]) -> None:
    """Write the rows of the models named, by default all, and the accuracy."""
    path = Path(str(resources.files("tensoropt.estimate").joinpath(FILE)))
    for name in names or [*(entry.name for entry in zoo.list_models()), ACCURACY]:
        print(name, flush=True)
        found = accuracy() if name == ACCURACY else row(name)
        # Read again for each, so that two runs of this keep each other's rows.
        kept = json.loads(path.read_text(encoding="utf-8"))
        kept["versions"] = {package: version(package) for package in ("torch", "transformers")}
        if name == ACCURACY:
            kept[ACCURACY] = found
        else:
            kept["models"] = dict(sorted({**kept["models"], name: found}.items()))
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
