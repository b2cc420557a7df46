"""Whether published jobs fitted their devices, and the peaks of memory that they reached, beside what is
predicted of a process: tensors, what PyTorch's allocator reserves for them, and each term that comes on top.

What a run's framework keeps of each parameter differs from what plans here keep, as it accumulates gradients
in other types; that difference is a term, too (:func:`framework_bytes`). Meters are told apart: an
allocator's figures leave out what the driver and NCCL take.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tensoropt.costs.device_fit import LEAST, MOST, DeviceFit, device_fit
from tensoropt.costs.process_memory import TERMS
from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.planners.pinned import PinnedPipelinePoint, PinnedPoint
from tensoropt.profiling.store import ProfileStore
from tests.benchmarks.machine import described
from tests.benchmarks.program import Row, page, table
from tests.benchmarks.published.memory import (
    ALLOCATED,
    RESERVED,
    RESERVED_EXPANDABLE,
    approximated,
    beside_tensors,
    kept_between,
    kept_bytes,
    lasting_kinds,
    tensors_of,
)
from tests.benchmarks.published.predict import (
    completed_by,
    errors_of,
    other_notes,
    recompute_notes,
    simulate_run,
)
from tests.benchmarks.published.runs import GIB, Run, architecture_of, cluster_of

METERS = {
    "max allocated": "torch allocated",
    "max reserved": "torch reserved",
    "nvidia-smi assumed": "nvidia-smi, assumed",
    "nvidia-smi": "nvidia-smi",
    "XLA": "XLA",
}
"""By words of a row what measured its peak."""
UNSAID_METER = "unsaid"
SAVED = "saved inside for backward"
VERDICTS = ("fits", "tight", "does not fit")
METER_TITLES = (
    "meter", "peaks", "median error", "worst", "measured / predicted", "its tenth", "nine tenths", "in band",
)  # fmt: skip
ROW_TITLES = (
    "run", "model", "outcome", "meter", "predicted, GiB", "published", "off by", "needs, GiB", "of",
    "verdict",
)  # fmt: skip


def meter_of(run: Run) -> str:
    """What measured the run's peak; "" where it has none."""
    if not run.row.get("peak_mem_gib"):
        return ""
    said = run.row.get("peak_mem_kind", "")
    return next((name for words, name in METERS.items() if words in said), UNSAID_METER)


def is_of_memory(run: Run) -> bool:
    """Whether the run says something of memory: a peak, that it ran out of it, or only that it ran."""
    return bool(run.row.get("peak_mem_gib")) or run.outcome == "oom" or not run.row["step_s"]


def _framework(run: Run) -> str:
    return run.row.get("framework", "")


def in_16_bits(run: Run) -> bool:
    """Whether the run's parameters are in 16 bits, beside float32 ones of its optimizer: what Megatron-LM,
    NeMo and DeepSpeed do, whose are the jobs with a sharded optimizer alone. FSDP and autocast have them in
    float32."""
    kind = run.dp_kind.partition(" (")[0]
    return kind == "zero1" or _framework(run).startswith(("Megatron", "NeMo"))


def gradient_bytes(run: Run) -> float:
    """Of each parameter in 16 bits the bytes of its gradient on a rank.

    A gradient has the type of its parameter, unless a framework adds up in float32: then Megatron-LM's is
    float32 from the beginning (``main_grad``, always with bfloat16: ``megatron/training/arguments.py``), and
    DeepSpeed keeps a float32 copy beside it (``runtime/bf16_optimizer.py``).
    """
    said, framework = run.row.get("grad_reduce_dtype", ""), _framework(run)
    wide = said.startswith("fp32")
    if "DeepSpeed" in framework:
        return 6.0 if wide else 2.0
    if framework.startswith("Megatron"):
        wide = wide or run.precision.startswith("bf16")
    return 4.0 if wide else 2.0


def framework_bytes(run: Run, lasting: Sequence[float]) -> float:
    """How much more than a plan here the run's framework keeps of its parameters; negative for less.

    Args:
        lasting: bytes of parameters, gradients and optimizer state that a plan keeps, on the fullest rank.
    """
    if not in_16_bits(run):
        return 0.0
    kind = run.dp_kind.partition(" (")[0]
    shards = run.number("dp") * run.number("cp") if kind == "zero1" else 1
    parameters = lasting[2] * shards / 8  # Adam's two float32 numbers, sharded
    return parameters * (2 + gradient_bytes(run) + 12 / shards) - sum(lasting)


def as_trained(run: Run) -> Run:
    """The run with what of its training decides its memory: Megatron-LM drops a tenth unless told otherwise
    (``--attention-dropout``, ``--hidden-dropout``) and keeps the masks; with sequence parallelism it keeps a
    rank's part of products' inputs (arXiv 2205.05198, section 4.2.2)."""
    row = dict(run.row)
    if _framework(run).startswith("Megatron") and not run.flash_attn.startswith("yes"):
        row["dropout"] = "0.1"
    if in_16_bits(run) and run.seq_parallel.startswith("yes"):
        row["gathers"] = "again in backward"
    return Run(row)


def needs(run: Run, found: PinnedPoint | PinnedPipelinePoint) -> Row:
    """What the fullest rank is predicted to take, in bytes: peaks of the allocator, terms."""
    tensors, terms, place = tensors_of(found)
    own = framework_bytes(run, lasting_kinds(found, place))
    fused = kept_bytes(found, place) - kept_bytes(found, place, partial(less_in_fused_kernels, run))
    peak = tensors - fused + beside_tensors(terms) + own
    return {
        "requested": peak,
        "allocated": ALLOCATED * peak,
        "reserved": RESERVED * peak,
        "reserved_expandable": RESERVED_EXPANDABLE * peak,
        **{name: terms.get(name, 0.0) for name in TERMS if name != "segments"},
        "framework": own,
    }


def less_in_fused_kernels(run: Run, stage: Evaluation) -> float:
    """How much less a micro-batch keeps where kernels compute a norm, or a gate and its product, at once.

    A norm then keeps its input in 16 bits, where PyTorch's under autocast keeps it and its result in float32;
    of a gate its activation is computed again in backward (Transformer Engine's SwiGLU, compiled ones).
    """
    said = f"{run.row.get('compile', '')} {run.row.get('notes', '')}"
    norms = run.fused or re.search(r"norm kernel", said, re.IGNORECASE) is not None
    less = 0.0
    for named in kept_between(stage):
        if run.fused and named.what == "activation" and named.tensor.startswith("silu"):
            less += named.bytes
        if norms and named.what == SAVED and named.tensor.startswith("rms_norm"):
            less += named.bytes * 3 / 4
    return less


def fit_of(needed: Mapping[str, float], device_bytes: float) -> DeviceFit:
    """Whether that fits a device."""
    terms = {name: needed[name] for name in TERMS if name in needed}
    tensors = needed["requested"] - beside_tensors(terms)
    return device_fit(tensors, terms, device_bytes, device_bytes, estimated=True)


def by_meter(needed: Mapping[str, float], meter: str) -> float:
    """What a meter shows of that. One that is unsaid is taken for the allocator's blocks, which training
    loops print."""
    match meter:
        case "torch reserved":
            return needed["reserved"]
        case "nvidia-smi" | "nvidia-smi, assumed":
            return needed["reserved"] + needed["context"] + needed["communicators"]
        case "XLA":
            return needed["requested"]
        case _:
            return needed["allocated"]


def measure(run: Run, models: Mapping[str, Any], store: ProfileStore) -> Row:
    """The row of a run: predicted and published bytes, and whether it fitted, as predicted and in truth; or
    why nothing is predicted."""
    row: Row = {
        **{name: run.row.get(name, "") for name in ("id", "source", "framework", "model", "gpu", "outcome")},
        "meter": meter_of(run),
        "published_bytes": float(run.row["peak_mem_gib"]) * GIB if run.row.get("peak_mem_gib") else None,
        "predicted_bytes": None,
        "refused": None,
    }
    run = as_trained(run)

    def made() -> Row:
        of, device_bytes = architecture_of(run, models), float(cluster_of(run).memory_bytes)
        needed = Counter[str]()
        for recipe, share in run.recomputed.items():
            found = simulate_run(run, of, store, recipe=recipe, process_memory=True)
            for name, size in needs(run, found).items():
                needed[name] += share * size
        fit = fit_of(needed, device_bytes)
        return {
            "predicted_bytes": by_meter(needed, row["meter"]) if row["meter"] else None,
            "terms": dict(needed),
            "needed_bytes": fit.needed_bytes,
            "device_bytes": device_bytes,
            "verdict": fit.verdict,
            "fits": fit.needed_bytes <= device_bytes,
            "notes": [*recompute_notes(run), *other_notes(run)],
        }

    return completed_by(made, row)


# -- words ----------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors by meter, how many layouts are right, and within which share of the predicted four fifths of the
    published peaks lie."""
    found = [row for row in rows if row["refused"] is None]
    parts: dict[str, list[Row]] = {}
    for row in found:
        if row["meter"]:
            parts.setdefault(row["meter"], []).append(row)
    return {
        "meters": {meter: _errors(part) for meter, part in sorted(parts.items())},
        "layouts": {
            outcome: {
                "layouts": len(part),
                "right": sum(row["fits"] == (outcome == "ok") for row in part),
                **Counter(row["verdict"] for row in part),
            }
            for outcome in ("ok", "oom")
            if (part := [row for row in found if row["outcome"] == outcome])
        },
    }


def _errors(part: Sequence[Row]) -> dict[str, Any]:
    ratios = sorted(row["published_bytes"] / row["predicted_bytes"] for row in part)
    tenths = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    return {
        **errors_of(part, "bytes"),
        "median_ratio": statistics.median(ratios),
        "tenth": tenths[0],
        "nine_tenths": tenths[-1],
        "in_band": sum(LEAST <= ratio <= MOST for ratio in ratios),
    }


def markdown(data: Mapping[str, Any]) -> str:
    """The result as a page, where no steps were asked for."""
    return page(
        f"# What published runs take of their devices, predicted, {data['date']}",
        f"Of {data['runs']}, {data['left_out']}. Nothing was run here.",
        f"Taken from {described(data)}.",
        part(data),
        "What was approximated:",
        approximated(data["memory_rows"]),
    )


def part(data: Mapping[str, Any]) -> str:
    """The rows and their summary as a part of a page; "" where no run says anything of memory."""
    rows = data.get("memory_rows")
    if not rows:
        return ""
    found = data["memory"]
    layouts = found["layouts"].values()
    right, every = (sum(of[name] for of in layouts) for name in ("right", "layouts"))
    return page(
        "## Memory",
        (
            "What a process takes of a device, predicted with each term, beside published peaks (never",
            "pooled over meters) and outcomes. A layout is right where it is predicted to fit and ran, or",
            "not to fit and ran out of memory. In band is what lies between "
            f"{LEAST:g} and {MOST:g} times the prediction.",
        ),
        table(
            METER_TITLES,
            (
                [meter, of["runs"], f"{of['median_error']:.1%}", f"{of['worst_error']:.1%}",
                 f"{of['median_ratio']:.2f}", f"{of['tenth']:.2f}", f"{of['nine_tenths']:.2f}",
                 f"{of['in_band']} of {of['runs']}"]
                for meter, of in found["meters"].items()
            ),
        ),
        table(
            ["outcome", "layouts right", *VERDICTS],
            (
                [outcome, f"{of['right']} of {of['layouts']}", *(of.get(verdict, 0) for verdict in VERDICTS)]
                for outcome, of in found["layouts"].items()
            ),
        ),
        f"Layouts right: {right} of {every}.",
        table(ROW_TITLES, map(_cells, rows)),
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    cells = [row["id"], row["model"], row["outcome"], row["meter"]]
    published = f"{row['published_bytes'] / GIB:.1f}" if row["published_bytes"] else ""
    if row["refused"] is not None:
        return [*cells, "", published, row["refused"], "", "", ""]
    peak = [f"{row['predicted_bytes'] / GIB:.1f}", published] if row["meter"] else ["", ""]
    off = f"{row['predicted_bytes'] / row['published_bytes'] - 1:+.1%}" if row["meter"] else ""
    return [*cells, *peak, off, f"{row['needed_bytes'] / GIB:.1f}", f"{row['device_bytes'] / GIB:.0f}",
            row["verdict"]]  # fmt: skip
