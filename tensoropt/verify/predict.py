"""Predicted collectives, memory and time of strategies, and the choice of ranks on which to check them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tensoropt.cluster import Mesh, available_cores
from tensoropt.cluster.local import most_ranks
from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.evaluate import evaluate_on
from tensoropt.exploration.rates import made_for
from tensoropt.ops.registry import reserve_of
from tensoropt.pipeline.evaluate import evaluate_pipeline_on, stage_works
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.pipeline.timing import sent_by_rank
from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.prices import PricedGraph
from tensoropt.placement.strategy import PlacedStrategy, ValueTransfer
from tensoropt.plan.plan import Plan
from tensoropt.ranks.local_hardware import local_gpus, why_no_gpu
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.strategy import ParallelStrategy, Strategy
from tensoropt.simulate.collectives import Collective, predicted_collectives
from tensoropt.verify.recorder import rows_of

Wanted = Literal["auto", "ranks", "share-gpu", "fake"]
_Kind = Literal["cpu", "cuda", "fake"]


@dataclass(frozen=True)
class Place:
    """The ranks on which strategies are checked: CPU ranks, GPUs, or fake ranks.

    Attributes:
        text: how the check was run, in words.
        shared: whether all ranks are on one GPU, so that measured times mean nothing.
    """

    kind: _Kind
    text: str
    shared: bool = False

    @property
    def backend(self) -> str:
        return "nccl" if self.kind == "cuda" and not self.shared else "gloo"

    def pool(self, ranks: int, timeout_s: float) -> RankPool:
        """Return a pool of ranks of this kind, not started yet."""
        assert self.kind != "fake"
        return RankPool(ranks, timeout_s=timeout_s, backend=self.backend, share_gpu=self.shared)

    def keeps_as_predicted(self, strategy: ParallelStrategy, device_type: str) -> bool:
        """Return whether kernels on these ranks save the same tensors as kernels on ``device_type``."""
        operators = strategy.graph.atoms.graph.operators
        recurrent = any(reserve_of(op.target) is not None for op in operators)
        return not self.shared and (self.kind == "cuda" or "cuda" not in device_type or not recurrent)

    @property
    def device(self) -> str:
        """The PyTorch device on which ranks have the model; ``meta`` for fake ranks."""
        return "meta" if self.kind == "fake" else self.kind


def place_for(devices: int, device_type: str, name: str, wanted: Wanted = "auto") -> Place:
    """Return the ranks on which to check strategies for ``devices`` devices of a cluster.

    Args:
        device_type: the cluster's: ``cpu``, ``cuda`` or ``cuda and cpu``.
        name: the cluster's name.
        wanted: ``auto`` for the cluster's kind of device, or fake ranks if this machine lacks them; ``ranks``
            for this machine's CPU ranks; ``share-gpu`` for ranks on its first GPU; or ``fake``.

    Raises:
        TensorOptError: there are too many devices for ``ranks`` or ``share-gpu``, or no GPU to share.
    """
    local = Place("cpu", f"run on {devices} CPU ranks of this machine")
    if wanted == "fake":
        return Place("fake", "checked on fake ranks, as requested: nothing was computed, sent or timed")
    if wanted == "ranks":
        _check_room(devices)
        return local
    if wanted == "share-gpu":
        if reason := why_no_gpu():
            raise TensorOptError(f"there is no GPU to share: {reason}, or give --ranks for CPU ranks")
        _check_room(devices)
        return Place(
            "cuda",
            f"run on {devices} ranks that share the first GPU and talk through the host (gloo): its kernels "
            "computed the numbers, and steps were not timed, as their times would mean nothing",
            shared=True,
        )
    if device_type != "cpu":
        # The ranks of a job are all of one type.
        gpus = len(local_gpus()) if device_type == "cuda" else 0
        if gpus >= devices:
            return Place("cuda", f"run on {devices} GPUs of this machine")
        what = "GPUs" if device_type == "cuda" else "devices"
        missing = f"{devices} {what} of {name} are not here" + (f" ({gpus} are)" if gpus else "")
    elif devices <= most_ranks():
        return local
    else:
        missing = f"{devices} ranks are too many for the {len(available_cores())} cores here"
    return Place(
        "fake",
        f"{missing}, so this was checked on fake ranks: nothing was computed, sent or timed"
        + ("; --ranks runs it on CPU ranks instead" if devices <= most_ranks() else ""),
    )


def cluster_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return (device type, name) of the cluster in a plan; CPU ranks if the plan has none."""
    cluster = made_for(data)
    if cluster is None:
        return "cpu", "an unknown cluster"
    return " and ".join(cluster.device_types), cluster.name


def _check_room(devices: int) -> None:
    if devices > most_ranks():
        cores = len(available_cores())
        raise TensorOptError(
            f"each device needs a process, and {devices} are too many for {cores} cores; use fake ranks "
            f"(--fake), or a plan for at most {most_ranks()} devices, for example --cluster cpu:{cores}"
        )


_Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Prediction:
    """The predicted collectives, memory and time of one step of a strategy.

    Attributes:
        collectives: one row per distinct collective (:func:`tensoropt.verify.recorder.rows_of`): those of one
            rank or, for pipelines and placed plans, of all ranks. Mesh axes are numbered from 0. The axes of
            a message are its sender and receiver.
        memory_bytes: the peak memory of the rank that needs most.
        of_ranks: each rank's collectives in a pipeline.
        of_places: the peak memory of one rank per device group of a pipeline, or of each device of a placed
            plan, in bytes; empty for other plans.
    """

    collectives: _Rows
    memory_bytes: float
    time_s: float
    of_ranks: tuple[_Rows, ...] = ()
    of_places: tuple[float, ...] = ()

    def sent_by(self, rank: int) -> _Rows:
        if self.of_ranks:
            return self.of_ranks[rank]
        return [row for row in self.collectives if row["kind"] != "send" or row["axes"][0] == rank]


def prediction_of(plan: Plan, strategy: ParallelStrategy, costs: CostSource) -> Prediction:
    """Return a plan's saved prediction, with the collectives that plan files leave out."""
    rows = [c.model_dump(mode="json") for c in plan.predicted.collectives]
    # A tracker sees tensors and constants, but not the other memory of a process.
    constants = plan.predicted.terms.get(CONSTANTS, 0.0)
    seen = plan.predicted.tensor_bytes + constants
    prediction = Prediction(rows, seen, plan.predicted.time_s)
    if isinstance(strategy, PipelinedStrategy):
        return _of_each_rank(prediction, plan, strategy, costs)
    if isinstance(strategy, PlacedStrategy):
        return replace(
            prediction,
            collectives=[*rows, *_result_rows(strategy)],
            of_places=tuple(peak + constants for peak in plan.info.peak_bytes),
        )
    return prediction


def _of_each_rank(
    prediction: Prediction, plan: Plan, strategy: PipelinedStrategy, costs: CostSource
) -> Prediction:
    """Return a pipeline's prediction with the collectives of each rank added."""
    works = stage_works(strategy)
    costs.facts.find(work for of_stage in works for work in of_stage.values())
    sent = [
        predicted_collectives(stage, {name: costs.facts.of(work) for name, work in of_stage.items()})
        for stage, of_stage in zip(strategy.stages, works, strict=True)
    ]
    ranks = [sent_by_rank(strategy, rank, sent) for rank in range(strategy.devices)]
    beside = plan.predicted.memory_bytes - prediction.memory_bytes
    places = tuple(peak - beside for peak in plan.info.peak_bytes)
    return _with_ranks(ranks, prediction.memory_bytes, prediction.time_s, places)


def _with_ranks(
    sent: Sequence[Counter[Collective]], memory_bytes: float, time_s: float, of_places: tuple[float, ...]
) -> Prediction:
    every = rows_of(sum(sent, Counter()))
    return Prediction(every, memory_bytes, time_s, tuple(map(rows_of, sent)), of_places)


def _result_rows(strategy: PlacedStrategy) -> _Rows:
    """Return rows for a placed plan's broadcasts of outputs and buffers, once per step."""
    source = strategy.graph.atoms.graph
    made = [name for name in source.outputs if source.tensors[name].kind == "activation"]
    everywhere = (*strategy.sent_buffers, *made) if strategy.devices > 1 else ()
    sizes = Counter(source.tensors[name].bytes for name in everywhere)
    return [{"kind": "broadcast", "axes": [0], "bytes": size, "count": n} for size, n in sizes.items()]


def predict_placed(graph: PricedGraph, placement: Placement) -> tuple[PlacedStrategy, Prediction]:
    simulated = simulate_placement(graph.problem, placement)
    tensors = simulated.problem.tensors
    transfers = tuple(ValueTransfer(tensors[t].name, i, j, back) for t, i, j, back in simulated.transfers)
    sends = Counter(((i, j), tensors[t].bytes) for t, i, j, _ in simulated.transfers)
    rows: _Rows = [
        {"kind": "send", "axes": list(pair), "bytes": size, "count": n * simulated.micro_batches}
        for (pair, size), n in sends.items()
    ]
    strategy = PlacedStrategy(graph.graph, placement, transfers)
    rows += _result_rows(strategy)
    constants = graph.graph.groups.atoms.graph.constant_bytes
    peaks = tuple(peak + constants for peak in simulated.peak_bytes)
    return strategy, Prediction(rows, max(peaks), simulated.time_s, of_places=peaks)


def predict(
    drawn: Sequence[tuple[Strategy | PipelinedStrategy, Mesh]], costs: CostSource
) -> list[tuple[ParallelStrategy, Prediction]]:
    """Return strategies with their predictions, after measuring the costs that these need and no others."""
    # All strategies' work at once, by key: what several of them share is measured once.
    works = [of_stage for strategy, _ in drawn for of_stage in stage_works(strategy)]
    every = {work.key: work for of_stage in works for work in of_stage.values()}
    costs.facts.find(every.values())
    costs.timings.measure(every)
    return [(strategy, _predicted(strategy, mesh, costs)) for strategy, mesh in drawn]


def _predicted(strategy: Strategy | PipelinedStrategy, mesh: Mesh, costs: CostSource) -> Prediction:
    if isinstance(strategy, PipelinedStrategy):
        return _pipelined(strategy, mesh, costs)
    evaluated = evaluate_on(strategy, mesh, costs)
    simulated = evaluated.metrics
    return Prediction(
        rows_of(evaluated.collectives(0)),
        float(simulated.memory.sum()) + strategy.graph.atoms.graph.constant_bytes,
        float(simulated.time_s[0]),
    )


def _pipelined(strategy: PipelinedStrategy, mesh: Mesh, costs: CostSource) -> Prediction:
    evaluated = evaluate_pipeline_on(strategy, mesh, costs)
    sent = [evaluated.sent_by(rank) for rank in range(strategy.devices)]
    tensors = evaluated.memory.sum(axis=1).tolist()
    peaks = [size + terms.get(CONSTANTS, 0.0) for size, terms in zip(tensors, evaluated.terms, strict=True)]
    return _with_ranks(sent, max(peaks), evaluated.time_s, tuple(peaks))
