"""Published peaks of memory, or parts of it, beside what the same configuration is predicted to take.

A row says less than one of published runs does; what its source leaves out is in :data:`SOURCES`. Three kinds
of figures are told apart, by what was measured:

- ``activations``: what the first stage keeps between forward and backward, of all micro-batches in flight;
- ``parameters and optimizer``: what lasts through the step there;
- ``peak``: what PyTorch's allocator reserves (``torch.cuda.max_memory_reserved``) for the fullest rank's
  tensors. No context and no buffers of NCCL's are in it.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.pipeline.memory import KEPT, alive_at
from tensoropt.planners.pinned import PinnedPipelinePoint, PinnedPoint
from tensoropt.profiling.store import ProfileStore
from tensoropt.simulate.step import NamedBytes, lifetimes
from tests.benchmarks.machine import described
from tests.benchmarks.program import Row, page, table
from tests.benchmarks.published.decoder import Architecture
from tests.benchmarks.published.predict import completed_by, errors_of, extended, simulate_run
from tests.benchmarks.published.runs import GIB, Run, architecture_of

ALLOCATED, RESERVED, RESERVED_EXPANDABLE = 1.0, 1.056, 1.016
"""What used blocks take over what was requested, and what is taken from the device without and with
``expandable_segments``: the middle of replays of 21 published jobs (results/published/2026-11-27-fits.json:
at most 1.002, 1.024 to 1.175, 1.001 to 1.047)."""
GOAL = 0.06
"""The median error that is aimed at."""
MODELS = Path(__file__).with_name("models.yaml")
SOURCES: dict[str, dict[str, str]] = {
    # Section 4.1: dropout of attention's weights and of what is added, masks of 1 byte; attention as
    # products.
    "arXiv 2205.05198": {
        "framework": "Megatron-LM", "date": "2022-05", "flash_attn": "no", "dropout": "0.1",
    },
    # torchtitan 9dec370 (2024-12-26), which the tables name: parallelize_llama.py leaves parameters of
    # pipelines unsharded after forward, and their gradients are reduced once, as PyTorch's schedules tell
    # FSDP2; run_llama_train.sh sets expandable_segments; the loss is not compiled (train.py).
    "torchtitan": {
        "framework": "torchtitan", "date": "2024-12", "flash_attn": "yes", "root": "gathered once",
        "gpu": "H100-80GB",
    },
}  # fmt: skip
"""Of each source, by how it begins, what its rows leave out."""


def load_memory(path: Path) -> list[Run]:
    """All rows, in order, with what their sources leave out."""
    with path.open(encoding="utf-8", newline="") as lines:
        return [_completed(row) for row in csv.DictReader(lines)]


def _completed(row: Mapping[str, str]) -> Run:
    more = next((said for name, said in SOURCES.items() if row["source"].startswith(name)), {})
    places, batch = int(row["pp"]), int(row["micro_batch_per_gpu"])
    pieces, (kind, *_) = 1, row["dp_kind"].split()
    if places > 1 and more.get("framework") == "torchtitan":
        # Its batch is that of a rank in a whole step, cut into as many pieces as there are places
        # (pipelining_utils.py).
        pieces, batch = places, batch // places
    elif places > 1:
        # As many as are ever in flight, and as interleaved schedules take; more of them keep no more.
        pieces = 2 * places
    return Run(
        {
            **row,
            **more,
            "outcome": "ok",
            "step_s": "",
            "micro_batch_per_gpu": str(batch),
            "grad_accum": str(pieces),
            "global_batch_seqs": str(batch * pieces * int(row["dp"])),
            "gpus_per_node": "8",
            "internode_net": "unsaid",
            "shard_group": "",
            # Over ranks of a context, too, it is wherever there are any.
            "dp_kind": "zero1" if places > 1 and kind == "zero3" else kind,
            "virtual_stages": "2" if row["virtual_stages"] == "unsaid" else row["virtual_stages"],
            "precision": "bf16" if row["precision"].startswith("float8") else row["precision"],
            "products": "float8" if row["precision"].startswith("float8") else "",
            "said_stages": row["virtual_stages"],
        }
    )


# -- what was measured ----------------------------------------------------------------------------


def kept_bytes(
    found: PinnedPoint | PinnedPipelinePoint,
    place: int,
    less: Callable[[Evaluation], float] = lambda stage: 0.0,
) -> float:
    """What a rank of a place of the pipeline keeps for backward, of all micro-batches in flight.

    Args:
        less: how much less than is simulated a micro-batch of a stage keeps, in bytes.
    """
    if isinstance(found, PinnedPoint):
        return float(found.evaluation.metrics.parts.between_bytes[0]) - less(found.evaluation)
    of = found.evaluation
    shares = {
        n: 1 - less(of.stages[n]) / float(of.stages[n].metrics.parts.between_bytes[0])
        for n in of.strategy.stages_at(place)
    }
    kept = Counter[int]()
    for alive in alive_at(of.strategy, of.stages, place, of.capability):
        if alive.what == KEPT:
            kept.update(dict.fromkeys(range(alive.first, alive.end), alive.bytes * shares[alive.stage]))
    return float(max(kept.values()))


def kept_between(stage: Evaluation) -> Iterator[NamedBytes]:
    """Yield what a micro-batch of a stage keeps between forward and backward."""
    turn = stage.batch.schedule.forward_end
    return (alive.named for alive in lifetimes(stage.batch) if alive.first <= turn < alive.end)


def _gathers_again(run: Run) -> bool:
    """Whether inputs of products are gathered again in backward: Megatron-LM with sequence parallelism keeps
    a rank's part of them (section 4.2.2)."""
    return run.framework.startswith("Megatron") and run.seq_parallel.startswith("yes")


def less_where_gathered_again(run: Run, stage: Evaluation) -> float:
    """How much less a micro-batch keeps where inputs of products are gathered again in backward: of a copy
    that was moved for its reader, a rank keeps its part."""
    if not _gathers_again(run):
        return 0.0
    kept = kept_between(stage)
    copies = (named.bytes for named in kept if named.what == "activation" and " read " in named.key)
    return sum(copies) * (1 - 1 / run.number("tp"))


def lasting_kinds(found: PinnedPoint | PinnedPipelinePoint, place: int) -> Sequence[float]:
    """Bytes of parameters, gradients and optimizer state on a rank of a place of its pipeline."""
    if isinstance(found, PinnedPoint):
        return [float(size) for size in found.evaluation.metrics.memory[0][:3]]
    of = found.evaluation
    kinds = sum(of.stages[n].metrics.memory[0] for n in of.strategy.stages_at(place))
    return [float(size) for size in kinds[:3]]


def lasting_bytes(run: Run, found: PinnedPoint | PinnedPipelinePoint) -> float:
    """Parameters, gradients and optimizer state of the first stage. Megatron-LM has its parameters in 16 bits
    beside the float32 ones."""
    kinds = lasting_kinds(found, 0)
    return sum(kinds) + (kinds[0] / 2 if run.framework.startswith("Megatron") else 0.0)


def tensors_of(found: PinnedPoint | PinnedPipelinePoint) -> tuple[float, Mapping[str, float], int]:
    """The peak of tensors on the fullest rank in bytes, what its process takes beside them, and its place in
    the pipeline."""
    of = found.evaluation
    if isinstance(found, PinnedPoint):
        return float(of.metrics.memory[0].sum()), found.point.terms, 0
    return float(of.memory[of.fullest].sum()), of.terms[of.fullest], of.fullest


def beside_tensors(terms: Mapping[str, float]) -> float:
    """The bytes that PyTorch's allocator gives a process for workspaces, inputs and constants."""
    return sum(terms.get(name, 0.0) for name in ("workspaces", "inputs", CONSTANTS))


def reserved_bytes(run: Run, of: Architecture, found: PinnedPoint | PinnedPipelinePoint) -> float:
    """What PyTorch's allocator reserves on the fullest rank, with expandable segments, as the run sets."""
    tensors, terms, place = tensors_of(found)
    last = run.number("pp") - 1
    tables = 2 if not last else int(place == 0) + int(place == last)
    waiting = _receive_buffers(run, of, place) if last else 0
    loss = _loss_of_torchtitan(run, of) if place == last else 0
    buffers = sum(_gather_buffers(run, of, tables)) + beside_tensors(terms)
    return RESERVED_EXPANDABLE * (tensors + waiting + loss + buffers)


def _loss_of_torchtitan(run: Run, of: Architecture) -> int:
    """What torchtitan's loss has at its peak beside what the simulator counts. Its caller holds the head's
    16-bit logits. A parallel loss, whose logits are split over the vocabulary, is DTensor's, and has the
    float32 logits less their maximum, too (``torch/distributed/tensor/parallel/loss.py``)."""
    tokens = run.number("micro_batch_per_gpu") * run.number("seq_len") // run.number("cp")
    split = run.number("tp")
    return tokens * of.vocab // split * (6 if split > 1 else 2)


def _gather_buffers(run: Run, of: Architecture, tables: int) -> list[int]:
    """What FSDP2 gathers into before it copies parameters out: a buffer of the root's parameters and, until
    the next one is gathered, one of a block's. They are made on a stream of their own, whose memory PyTorch's
    allocator gives to no other (``_fsdp_collectives.foreach_all_gather``).

    Args:
        tables: how many of the embedding and the head the rank has.
    """
    table = of.vocab * of.hidden
    block = (of.params - (1 if of.tied else 2) * table) // of.layers
    return [2 * elements // run.number("tp") for elements in (tables * table, block)]


def _receive_buffers(run: Run, of: Architecture, place: int) -> int:
    """What PyTorch's stages receive into beside what the simulator counts, which lets go of them as the
    executor here does: a buffer for each micro-batch and direction lasts from the beginning
    (``torch/distributed/pipelining/stage.py``), in forward that of what is kept for backward."""
    places, (schedule, per_place), pieces = run.number("pp"), run.schedule, run.number("grad_accum")
    tokens = run.number("micro_batch_per_gpu") * run.number("seq_len") // run.number("cp")
    message = 2 * tokens * of.hidden // run.number("tp")
    back = per_place - (place == places - 1)
    waiting = pieces - min(pieces, places - place) if schedule == "1f1b" and place else 0
    return message * (back * pieces + waiting)


# -- rows -----------------------------------------------------------------------------------------


def measure(run: Run, models: Mapping[str, Any], store: ProfileStore) -> Row:
    """The row of a run: predicted and published bytes, or why nothing is predicted."""
    row: Row = {
        **{name: run.row[name] for name in ("id", "source", "model", "what", "meter")},
        "predicted_bytes": None,
        "published_bytes": run.published_bytes,
        "refused": None,
    }

    def made() -> Row:
        (recipe,) = run.recomputed
        of = architecture_of(run, models)

        def read(found: PinnedPoint | PinnedPipelinePoint) -> Row:
            if run.what == "activations":
                return {"bytes": kept_bytes(found, 0, partial(less_where_gathered_again, run))}
            if run.what == "parameters and optimizer":
                return {"bytes": lasting_bytes(run, found)}
            return {"bytes": reserved_bytes(run, of, found)}

        simulated = partial(simulate_run, run, store=store, recipe=recipe, process_memory=True)
        # What an allocator leaves unused does not grow evenly with the blocks.
        found, _ = extended(of, simulated, read, run.what == "peak" or run.number("pp") > 1)
        return {"predicted_bytes": found["bytes"], "notes": _notes(run)}

    return completed_by(made, row)


def _notes(run: Run) -> list[str]:
    """What was approximated of the run."""
    notes = (
        [] if run.precision == "bf16" else ["simulated in bfloat16, where the run computes in other 16 bits"]
    )
    if run.row["products"]:
        notes.append("products in bfloat16, where the run's are in float8")
    if _gathers_again(run):
        notes.append(
            "inputs of products are counted as their makers hold them, and gathered again in backward"
        )
    if "asynchronous" in run.notes:
        notes.append("tensor parallelism in collectives of PyTorch's, where the run's has its own buffers")
    if run.row["said_stages"] == "unsaid" and run.number("pp") > 1:
        notes.append("2 stages to a place, torchtitan's default")
    return notes


# -- words ----------------------------------------------------------------------------------------


def medians(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows are predicted, the median and the worst of their errors: of all, and by what was measured
    and by which meter."""
    found = [row for row in rows if row["refused"] is None]
    parts = {"all": found}
    for row in found:
        parts.setdefault(f"{row['what']} ({row['meter']})", []).append(row)
    return {name: errors_of(part, "bytes") for name, part in parts.items()}


def markdown(data: Mapping[str, Any]) -> str:
    """The result as a page."""
    return page(
        f"# Published memory, predicted, {data['date']}",
        (
            "Peaks and parts of memory that other people measured, with their configuration pinned. Nothing",
            f"was run here. The median error is to be within {GOAL:.0%}.",
        ),
        f"Taken from {described(data)}.",
        table(
            ["measured", "runs", "median error", "worst"],
            (
                [name, of["runs"], f"{of['median_error']:.1%}", f"{of['worst_error']:.1%}"]
                for name, of in data["medians"].items()
                if of["runs"]
            ),
        ),
        table(
            ["run", "model", "what", "predicted, GiB", "published, GiB", "off by"], map(_cells, data["rows"])
        ),
        "What was approximated:",
        approximated(data["rows"]),
    )


def _cells(row: Row) -> list[str]:
    predicted, off = "", row["refused"]
    if off is None:
        off = f"{row['predicted_bytes'] / row['published_bytes'] - 1:+.1%}"
        predicted = f"{row['predicted_bytes'] / GIB:.2f}"
    return [row["id"], row["model"], row["what"], predicted, f"{row['published_bytes'] / GIB:.2f}", off]


def approximated(rows: Sequence[Row]) -> list[str]:
    """What was approximated, with the number of runs, as lines of Markdown."""
    notes = Counter(note for row in rows for note in row.get("notes", ()))
    return [f"- {n} runs: {note}" for note, n in notes.items()]
