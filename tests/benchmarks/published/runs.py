"""Rows of a file of published runs: what of them can be pinned, on which cluster, and why others cannot."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tensoropt.cluster import Cluster
from tensoropt.cluster.catalog import cluster_preset, device_kind, list_clusters, list_devices
from tensoropt.cluster.files import cluster_from
from tensoropt.launchers.job import NOTHING, LaunchedJob
from tensoropt.sharding.recipes import FULL
from tests.benchmarks.published.decoder import Architecture, Variant

GIB = 2**30
STAGES = {"ddp": 0, "none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3}
OUTCOMES = ("ok", "oom")
"""How a run that is predicted ended: it ran, or ran out of memory."""
COLUMNS = (
    "id", "source", "outcome", "model", "seq_len", "global_batch_seqs", "micro_batch_per_gpu", "grad_accum",
    "gpu", "n_gpus", "gpus_per_node", "internode_net", "dp", "dp_kind", "shard_group", "tp", "seq_parallel",
    "pp", "cp", "recompute", "precision", "flash_attn", "step_s",
)  # fmt: skip
"""What a file of runs has to say; it may say more."""
SCHEDULES = {
    "interleaved": "interleaved_1f1b", "1f1b": "1f1b", "gpipe": "gpipe", "zbv": "zbv", "zb": "zero_bubble",
}  # fmt: skip
"""By how a run's schedule begins, the name that it has here."""
SAID = {
    r"^full": FULL,
    r"qkv projections kept": "query, key, value products",
    r"dots kept except MLP": "attention products",
    r"every second (product|matmul|mm|op)|products/2": "products/2",
    r"attention core|core.attention|core.attn": "attention core",
    r"moe.act|layer.?norm|norms|activation func": "norms and activations",
    r"products|dots kept|matmuls? kept": "products",
}
"""By a pattern of a run's words, the recipe of what it recomputes. torchtitan's selective recomputation by
operator, which :attr:`Run.recipe` knows beside these, keeps attention and all products but every second one
(its ``_get_custom_policy``)."""
UNSAID_STAGES = 8
"""Stages of a place where an interleaved run does not say; an assumption: NeMo's recipe for Llama-3.1-405B
gives each place of its pipeline 8."""


class RefusedRunError(Exception):
    """A run that cannot be expressed; says what of it."""


@dataclass(frozen=True)
class Run:
    """A row of the file."""

    row: Mapping[str, str]

    def __getattr__(self, name: str) -> str:
        try:
            # Not self.row: while a run is unpickled it has none, and would look for it here.
            return vars(self)["row"][name]
        except KeyError:
            raise AttributeError(name) from None

    def number(self, name: str) -> int:
        """A column that counts; 1 where it is empty."""
        value = float(self.row[name] or 1)
        if value != int(value) or value < 1:
            raise RefusedRunError(f"{name} is {self.row[name]}, which is no whole number of at least 1")
        return int(value)

    @property
    def published_step_s(self) -> float | None:
        """None for a run that ended before a step."""
        return float(self.row["step_s"]) if self.row["step_s"] else None

    @property
    def family(self) -> str:
        """The team with its code, whose jobs are alike: sources that name their GPU are one with that name
        left out."""
        return self.source.removesuffix(" V100")

    @property
    def date(self) -> str:
        """The month, or the day; "" where it is unsaid, which is taken for now."""
        return self.row.get("date", "")

    @property
    def core(self) -> bool:
        """Whether it belongs to the file's balanced subset."""
        return self.row.get("core") == "yes"

    @property
    def recomputed(self) -> dict[str | None, float]:
        """Which shares of the blocks are recomputed by which recipe, None for none; notes of a run that
        recomputes some blocks say about how many.

        Raises:
            RefusedRunError: nothing says which parts are recomputed.
        """
        if self.recompute == "none":
            return {None: 1.0}
        share = re.search(r"blocks recomputed is about (\d+)%", self.row.get("notes", ""))
        if self.recompute.startswith("selective (some blocks)") and share:
            return {None: 1 - int(share.group(1)) / 100, FULL: int(share.group(1)) / 100}
        if every := re.search(r"every (\d+|second|third|fourth)\S* (block|layer)", self.recompute):
            said = every.group(1)
            blocks = int(said) if said.isdigit() else ("second", "third", "fourth").index(said) + 2
            return {None: 1 - 1 / blocks, FULL: 1 / blocks}
        if (recipe := self.recipe) is None:
            raise RefusedRunError(f"recomputes parts that are not known ({self.recompute})")
        return {recipe: 1.0}

    @property
    def recipe(self) -> str | None:
        """The recipe by which its blocks are recomputed, as far as its words are known."""
        by_operator = "products/2" if self.source.startswith("torchtitan") else "products"
        known = {**SAID, r"per.op\b|\(op\b|by op|^op\b": by_operator}
        return next((name for words, name in known.items() if re.search(words, self.recompute)), None)

    @property
    def fused(self) -> bool:
        """Whether element-wise operators share kernels: compiled, or written by hand as in Transformer
        Engine, on which NeMo and Megatron-LM compute."""
        compiled = self.row.get("compile", "")
        return self.by_hand or compiled.startswith("yes") or "fused" in compiled

    @property
    def by_hand(self) -> bool:
        """Whether its kernels are Megatron-LM's or NeMo's, which keep parameters in 16 bits beside the
        optimizer's copies and so cast them once a step, not for each use."""
        return self.row.get("framework", "").startswith(("NeMo", "Megatron"))

    @property
    def adds_in_products(self) -> bool:
        """Whether products of weights' gradients add to what other micro-batches left, instead of kernels of
        their own: Megatron-LM's gradient accumulation fusion, its default since 2022. Megatron-DeepSpeed,
        which left Megatron-LM in 2021, adds in its own optimizer."""
        kernels = self.row.get("framework", "").startswith(("NeMo", "Megatron-LM"))
        return kernels and (not self.date or self.date >= "2022")

    @property
    def half_precision(self) -> bool:
        """Whether it computes in 16 bits: in which of the two makes no difference to seconds and bytes."""
        return self.precision.startswith(("bf16", "fp16", "16-bit"))

    @property
    def variant(self) -> Variant:
        """How its model computes. Attention without a fused kernel stores the scores."""
        return Variant(
            stored_scores=self.flash_attn.startswith("no"), dropout=float(self.row.get("dropout") or 0.0)
        )

    @property
    def published_bytes(self) -> float | None:
        """The peak of memory, or the part of it, that was measured; None for a run that says none."""
        return float(self.row["memory_gib"]) * GIB if self.row.get("memory_gib") else None

    @property
    def schedule(self) -> tuple[str, int]:
        """Of its pipeline the schedule and the stages of a place.

        Raises:
            RefusedRunError: it is of a kind that is not known.
        """
        said = self.row.get("pp_schedule", "")
        if self.number("pp") == 1:
            return "1f1b", 1
        known = next((name for words, name in SCHEDULES.items() if said.startswith(words)), None)
        if known is None:
            raise RefusedRunError(f"its pipeline's schedule is {said or 'unsaid'}, which is unknown")
        if known != "interleaved_1f1b":
            return known, 2 if known == "zbv" else 1
        stages = self.row.get("virtual_stages", "")
        return known, int(float(stages)) if stages not in ("", "unsaid") else UNSAID_STAGES

    @property
    def single_node(self) -> bool:
        """Whether all of its GPUs are in one node."""
        return int(float(self.row["n_gpus"])) <= int(float(self.row["gpus_per_node"] or 8))


def load_runs(path: Path) -> list[Run]:
    """All rows, in order.

    Raises:
        SystemExit: a column is missing.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path} has no column {', '.join(missing)}; give a file of published runs")
        return [Run(completed(row)) for row in reader]


EMPTY = {
    "tp": "1", "pp": "1", "cp": "1", "seq_parallel": "no", "recompute": "none", "precision": "bf16",
    "gpus_per_node": "8", "micro_batch_per_gpu": "1",
}  # fmt: skip
"""What an empty cell is taken for, of a run that says little but whether it ran."""


def completed(row: Mapping[str, str]) -> dict[str, str]:
    """A row whose empty cells have what follows from others, or what is usual. A run of which only is known
    whether it ran has as many micro-batches as a pipeline ever holds, as more of them need no more memory."""
    found = {**row, **{name: usual for name, usual in EMPTY.items() if not row[name]}}
    try:
        devices, inner = float(found["n_gpus"]), 1.0
        for name in ("tp", "pp", "cp"):
            inner *= float(found[name])
        found["dp"] = found["dp"] or f"{devices / inner:g}"
        each = float(found["micro_batch_per_gpu"]) * float(found["dp"])
        if not found["grad_accum"]:
            whole = float(found["global_batch_seqs"] or 0) / each
            found["grad_accum"] = f"{whole or (2 * float(found['pp']) if found['pp'] != '1' else 1):g}"
        found["global_batch_seqs"] = found["global_batch_seqs"] or f"{each * float(found['grad_accum']):g}"
    except ValueError:
        return found  # refused where the numbers are used
    found["dp_kind"] = found["dp_kind"] or ("ddp" if float(found["dp"]) > 1 else "none")
    if float(found["pp"]) > 1 and "pp_schedule" in found:
        found["pp_schedule"] = found["pp_schedule"] or "1f1b"
    return found


def load_models(path: Path) -> dict[str, Any]:
    """Per name the numbers of an architecture."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def architecture_of(run: Run, models: Mapping[str, Any]) -> Architecture:
    """The run's model.

    Raises:
        RefusedRunError: the file of models lacks it, or numbers of it.
    """
    if run.model not in models:
        raise RefusedRunError(f"its model {run.model} is not in the file of models")
    try:
        return Architecture.of(models[run.model])
    except KeyError as missing:
        raise RefusedRunError(f"its model {run.model} lacks {missing}") from None


def pinned_of(run: Run, *, recipe: str | None = None) -> LaunchedJob:
    """What the run pins.

    Args:
        recipe: by which all blocks are recomputed; None for none.

    Raises:
        RefusedRunError: something of it cannot be expressed.
    """
    if run.outcome not in OUTCOMES:
        raise RefusedRunError(
            f"its outcome is {run.outcome or 'unsaid'}, which says nothing of its step or memory"
        )
    if recipe not in (shares := run.recomputed) and recipe is not None:
        raise RefusedRunError(f"recomputes {', '.join(map(str, shares))}, not {recipe}")
    if not run.half_precision:
        raise RefusedRunError(f"computes in {run.precision}; 16 bits are what is simulated")
    kind = run.dp_kind.partition(" (")[0]
    if kind not in STAGES:
        raise RefusedRunError(f"its data parallelism is of kind {run.dp_kind or 'unsaid'}, which is unknown")
    data, pieces, batch = run.number("dp"), run.number("grad_accum"), run.number("global_batch_seqs")
    context = run.number("cp")
    if data * context * run.number("tp") * run.number("pp") != run.number("n_gpus"):
        raise RefusedRunError(
            f"data {data} x context {context} x tensor {run.tp} x pipeline {run.pp} is not {run.n_gpus} "
            "GPUs, and what fills the rest is unsaid"
        )
    if batch % (data * pieces):
        raise RefusedRunError(
            f"{batch} sequences do not divide into {pieces} equal micro-batches on {data} ranks"
        )
    stage = STAGES[kind] if data * context > 1 else 0
    group = int(float(run.shard_group)) if kind == "hsdp" and run.shard_group else None
    schedule, per_place = run.schedule
    return LaunchedJob(
        launcher="", data=data, tensor=run.number("tp"), context=context, stage=stage,
        replicas=data // group if group else 1, root_once=run.row.get("root") == "gathered once",
        sequence_parallel=run.seq_parallel.startswith("yes"),
        gathered_inputs=bool(run.row.get("gathers")), micro_batches=pieces, recompute=recipe or NOTHING,
        places=run.number("pp"), schedule=schedule, stages_per_place=per_place,
    )  # fmt: skip


def cluster_of(run: Run) -> Cluster:
    """The cluster: GPUs, nodes and links of the preset with such GPUs, with the network that the run states.

    Raises:
        RefusedRunError: no data sheet of such a GPU, or of links between several, is there.
    """
    gpu = _sheet_of(run.gpu)
    preset = _preset_of(gpu)
    count, per_node = run.number("n_gpus"), _per_node(run)
    if count % per_node:
        raise RefusedRunError(f"{count} GPUs are no whole nodes of {per_node}")
    links = dict(preset["links"]) if count > 1 else {}
    if count == per_node:
        links.pop("inter_node", None)
    elif network := _network_of(run.internode_net, per_node):
        links["inter_node"] = network
    data: dict[str, Any] = {"devices": [{"kind": _kind_of(gpu), "count": per_node}]}
    data |= {"nodes": count // per_node, **({"links": links} if links else {})}
    return cluster_from(data, name=f"{run.gpu} x {count}")


def _sheet_of(gpu: str) -> str:
    """The data sheet's name of a GPU; one that is named without its memory has that of the only such kind."""
    named = [name for name in list_devices() if name == gpu or name.startswith(f"{gpu}-")]
    if gpu in named:
        return gpu
    if len(named) == 1:
        return named[0]
    why = f"; it may be any of {', '.join(named)}" if named else ""
    raise RefusedRunError(f"there is no data sheet of a {gpu}{why}")


def _per_node(run: Run) -> int:
    """GPUs whose links are those inside a node. An NVLink domain of several trays is one node, and a job on
    several such domains is assumed to use equally many GPUs of each."""
    count = run.number("n_gpus")
    domain = re.search(r"NVLink domain of (\d+) GPUs", run.internode_net)
    if domain is None:
        return min(count, run.number("gpus_per_node"))
    return max(size for size in range(1, int(domain.group(1)) + 1) if count % size == 0)


def _kind_of(name: str) -> str | dict[str, Any]:
    """The GPU; one without bfloat16 computes that, which all is simulated in, as it does float16."""
    flops = device_kind(name).flops
    if "bfloat16" in flops or "float16" not in flops:
        return name
    return {"base": name, "name": f"{name} in float16", "flops": {**flops, "bfloat16": flops["float16"]}}


def _preset_of(kind: str) -> Mapping[str, Any]:
    for name in list_clusters():
        found = cluster_preset(name)
        if found is not None and found[0].get("scalable") and found[0]["devices"][0]["kind"] == kind:
            return found[0]
    raise RefusedRunError(f"no cluster preset says how several {kind} are linked")


def _network_of(words: str, per_node: int) -> dict[str, Any] | None:
    """The cards of a node of so many GPUs; None where the run leaves them unsaid, and the preset's hold."""
    if card := re.search(r"(\d+) Gb/s per GPU", words):
        return {"link": f"IB-{card.group(1)}G", "count": per_node}
    if cards := re.search(r"(\d+)\s*x\s*(\d+) Gb/s", words):
        return {"link": f"IB-{cards.group(2)}G", "count": int(cards.group(1))}
    if total := re.search(r"([\d,]+) Gb/s per node", words):
        # How many cards share it is unsaid: 8 of 200 Gb/s from 1,600 on, else cards of 100.
        rate = int(total.group(1).replace(",", ""))
        card = 200 if rate % 1600 == 0 else 100
        return {"link": f"IB-{card}G", "count": max(1, rate // card)}
    return None
