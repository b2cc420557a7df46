"""Simulate a pipelined strategy: the step of each stage, then the schedule of micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.prices import ClusterCosts
from tensoropt.costs.process_memory import named_terms
from tensoropt.evaluation.evaluate import Evaluation, evaluate_strategy, works_of
from tensoropt.pipeline import timing
from tensoropt.pipeline.costs import PipelinePrices, sources_at
from tensoropt.pipeline.memory import memory_of_actions, memory_of_places, owned_by_place
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.profiling.cuda_kernels import Capability
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.simulate.candidates import overlap_of
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.recording import Owned

TOO_LARGE = "pipelines: some were left out, as their stages need more memory than their devices have"
"""The note about pipelines that were left out because they need too much memory."""


@dataclass(frozen=True)
class _PlaceLoad:
    """The time in seconds that a rank of one device group spends on each kind of activity in a step.

    Attributes:
        communication_s: the duration of collectives and messages.
        exposed_s: the part of ``communication_s`` that no computation overlaps.
        host_s: the time that the host takes to launch kernels and messages; 0 on CPUs.
    """

    compute_s: float
    communication_s: float
    exposed_s: float
    host_s: float


@dataclass(frozen=True)
class PipelineEvaluation:
    """A pipelined strategy with its simulated figures.

    Attributes:
        stages: each stage's own step, as if its micro-batches ran one after another.
        memory: (device groups, 5) a rank's peak bytes by :data:`~tensoropt.simulate.recording.MEMORY_KINDS`.
        terms: for each device group, the memory in bytes of a process besides tensors, by name.
        kinds: the names of the kinds of devices in each device group, if groups differ.
        capability: the GPUs' compute capability; None on CPUs, which have none.
    """

    strategy: PipelinedStrategy
    stages: tuple[Evaluation, ...]
    times: timing.ScheduleTimes
    memory: np.ndarray
    time_s: float
    loads: tuple[_PlaceLoad, ...]
    terms: tuple[Mapping[str, float], ...]
    kinds: tuple[str, ...] = ()
    capability: Capability | None = None

    @property
    def busiest(self) -> _PlaceLoad:
        """The load of the device group that spends the most time on computation and exposed communication."""
        return self.loads[self.busiest_place]

    @property
    def busiest_place(self) -> int:
        busy = [load.compute_s + load.exposed_s for load in self.loads]
        return busy.index(max(busy))

    @property
    def idle_s(self) -> float:
        """The seconds for which the busiest device group waits for others (the bubble) and for its host."""
        return max(self.time_s - self.busiest.compute_s - self.busiest.exposed_s, 0.0)

    @property
    def memory_bytes(self) -> float:
        """The peak memory in bytes of the fullest rank's process, tensors and everything else."""
        return float(self.peaks.max())

    @property
    def peaks(self) -> np.ndarray:
        """The peak memory (device groups,) in bytes of a process of each device group."""
        return np.asarray(self.memory.sum(axis=1) + [sum(terms.values()) for terms in self.terms])

    @property
    def fullest(self) -> int:
        return int(self.peaks.argmax())

    def owners(self) -> list[Owned]:
        return owned_by_place(self.strategy, self.stages, self.fullest, self.capability)

    def memory_curve(self) -> list[tuple[float, np.ndarray]]:
        """Return (start in seconds, (5,) bytes by kind) of each action and the end, in the fullest group."""
        own = [h for h in self.times.happenings if h.place == self.fullest and h.kind in "FBIW"]
        starts = [*(h.start_s for h in own), own[-1].end_s]
        curve = memory_of_actions(self.strategy, self.stages, self.fullest, self.capability)
        return list(zip(starts, curve, strict=True))

    def sent_by(self, rank: int) -> Counter[Collective]:
        """Return how often one rank issues each collective in a step."""
        return timing.sent_by_rank(self.strategy, rank, [stage.collectives(0) for stage in self.stages])


def stage_works(strategy: ParallelStrategy) -> list[dict[str, Workload]]:
    """Return, for each stage, the computation (workload) of one rank in each operator group."""
    return [works_of(stage) for stage in strategy.stages]


def _evaluate_pipeline(
    strategy: PipelinedStrategy, facts_of: Callable[[int, Workload], Facts], prices: PipelinePrices
) -> PipelineEvaluation:
    """Simulate a pipelined strategy. ``facts_of``: (device group, workload) -> its sizes and FLOP counts."""
    stages = []
    for number, (stage, works) in enumerate(zip(strategy.stages, stage_works(strategy), strict=True)):
        place = strategy.place_of(number)
        at_place, facts = prices.at(place), {name: facts_of(place, work) for name, work in works.items()}
        own = at_place.of_stage(stage.graph, stage.mesh)
        stages.append(evaluate_strategy(stage, works, facts, own, at_place.overlap))
    return assemble(strategy, stages, prices)


def evaluate_pipeline_on(strategy: PipelinedStrategy, mesh: Mesh, costs: ClusterCosts) -> PipelineEvaluation:
    """Simulate a pipelined strategy on a mesh of a cluster."""
    sources, prices = sources_at(costs, strategy.places), PipelinePrices.of(costs, mesh)
    return _evaluate_pipeline(strategy, lambda place, work: sources[place].facts.of(work), prices)


def fits(evaluation: PipelineEvaluation, prices: PipelinePrices) -> bool:
    """Return whether each device group has the memory that it needs.

    If all groups have equal devices, the result is always True, as :meth:`.PipelinePrices.room` is infinite:
    their memory is compared with the budget elsewhere.
    """
    return all(peak <= prices.room(place) for place, peak in enumerate(evaluation.peaks.tolist()))


def assemble(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    prices: PipelinePrices,
    *,
    communicating_apart: bool = False,
) -> PipelineEvaluation:
    """Return a pipeline's evaluation, from the simulated steps of its stages.

    Args:
        communicating_apart: whether all gathers and reductions run outside of forward and backward
            (:meth:`~tensoropt.pipeline.timing.StageSeconds.communicating_apart`), as in Megatron-LM.
    """
    seconds = [
        _seconds(strategy, number, stage, prices, communicating_apart=communicating_apart)
        for number, stage in enumerate(stages)
    ]
    times = timing.ScheduleTimes(
        strategy.actions,
        seconds,
        blocking_sends=prices.cluster.device_type == "cpu",
        one_behind=not communicating_apart,
        forward_only=strategy.forward_only,
    )
    after_s = _tied_s(strategy, prices) + _results_s(strategy, prices)
    communication, compute = np.zeros((strategy.places, 2)), np.zeros(strategy.places)
    host = [0.0] * strategy.places
    for number, (stage, of_stage) in enumerate(zip(stages, seconds, strict=True)):
        place, metrics = strategy.place_of(number), stage.metrics
        communication[place] += float(metrics.communication_s[0]), float(metrics.exposed_s[0])
        compute[place] += float(metrics.compute_s[0])
        host[place] += float(metrics.host_s[0]) + _issuing_s(strategy, number, prices)
        slower, beside_s = prices.at(place).overlap.slower, (strategy.micro_batches - 1) * of_stage.scatter_s
        # The schedule determines how long the devices wait for these.
        communication[place, 1] -= of_stage.begin_s + beside_s + of_stage.reduce_s
        compute[place] += beside_s * slower / (1.0 + slower)
    communication[:, 1] = np.maximum(communication[:, 1], 0.0) + times.waiting_s
    loads = tuple(
        _PlaceLoad(
            compute_s=float(compute[place]),
            communication_s=float(communication[place, 0]) + messages_s + after_s,
            exposed_s=float(communication[place, 1]) + messages_s + after_s,
            host_s=host[place],
        )
        for place, messages_s in enumerate(map(float, times.sending_s))
    )
    memory = memory_of_places(strategy, stages, prices.capability)
    time_s = times.total_s + after_s
    terms = tuple(_terms(strategy, stages, place, prices) for place in range(strategy.places))
    return PipelineEvaluation(
        strategy, tuple(stages), times, memory, time_s, loads, terms, prices.kinds, prices.capability
    )


def _terms(
    strategy: PipelinedStrategy, stages: Sequence[Evaluation], place: int, prices: PipelinePrices
) -> dict[str, float]:
    process, own = prices.process_memory(strategy.graph.atoms.graph), strategy.stages_at(place)
    constants = sum(strategy.stages[number].graph.atoms.graph.constant_bytes for number in own)
    communicators = 0.0
    if process.counts_communicators:
        job = overlap_of(prices.cluster, prices.mesh, beside=prices.beside)
        at_place = prices.at(place).overlap
        # A job begins and ends with a barrier, which is an all-reduce; stages send along the first axis.
        everyone = job.links(tuple(range(len(prices.mesh.shape))))
        used: list[tuple[tuple[str, ...], Collection[str], int]] = [
            (everyone, ("all_reduce",), strategy.devices),
            (job.links((0,)), ("send",), strategy.places),
        ]
        kinds: dict[tuple[int, ...], set[str]] = {}
        for collective in (each for number in own for each in stages[number].collectives(0)):
            kinds.setdefault(collective.axes, set()).add(collective.kind)
        sizes = strategy.stages[0].mesh[1:]
        used += [
            (at_place.links(axes), sent, prod(sizes[axis] for axis in axes)) for axes, sent in kinds.items()
        ]
        communicators = sum(process.communicator_bytes(*each) for each in used)
    return named_terms(replace(process, constants=constants).constant(communicators))


def _seconds(
    strategy: PipelinedStrategy,
    number: int,
    stage: Evaluation,
    prices: PipelinePrices,
    *,
    communicating_apart: bool,
) -> timing.StageSeconds:
    parts, place = stage.metrics.parts, strategy.place_of(number)
    parameters = strategy.stages[number].graph.atoms.graph.parameters
    # Nothing leaves the last stage, and nothing goes back from the first.
    behind, before = strategy.place_of(number + 1), strategy.place_of(number - 1)
    send_s = prices.message_s(place, behind, timing.departing_bytes(strategy, number))
    back_s = prices.message_s(place, before, timing.arriving_bytes(strategy, number, learning=True))
    # The step of a stage that waits for its host is longer by what the host takes to issue messages.
    issuing_s = _issuing_s(strategy, number, prices)
    longer = 1.0
    if issuing_s:
        longer = max((float(stage.metrics.host_s[0]) + issuing_s) / float(stage.metrics.time_s[0]), 1.0)
    seconds = timing.StageSeconds(
        forward=_three(longer * parts.forward_s[0]),
        backward=_three(longer * parts.backward_s[0]),
        sync_s=longer * float(parts.end_s[0]),
        send_s=send_s,
        send_back_s=back_s,
        weights=0.5 if any(tensor.requires_grad for tensor in parameters) else 0.0,
    )
    scattering, slower = _three(parts.scattering_s[0]), prices.at(place).overlap.slower
    if communicating_apart:
        return seconds.communicating_apart(scattering, slower)
    return seconds.gathering_early().reducing_behind(scattering, float(parts.reducing_s[0]), slower)


def _issuing_s(strategy: PipelinedStrategy, number: int, prices: PipelinePrices) -> float:
    part, place, source = strategy.parts[number], strategy.place_of(number), strategy.graph.atoms.graph
    crossing: list[str] = []
    if strategy.place_of(number + 1) != place:
        crossing += part.departing
    if strategy.place_of(number - 1) != place:
        crossing += part.arriving
    ends = sum(1 + (source.training and source.tensors[name].requires_grad) for name in crossing)
    return strategy.micro_batches * ends * prices.at(place).message_end.host_s


def _three(seconds: np.ndarray) -> tuple[float, float, float]:
    first, between, last = seconds.tolist()
    return first, between, last


def _tied_s(strategy: PipelinedStrategy, prices: PipelinePrices) -> float:
    seconds = 0.0
    for name in strategy.tied:
        if strategy.graph.atoms.graph.tensors[name].requires_grad:
            holders = [strategy.place_of(stage) for stage in strategy.holders(name)]
            size = timing.stored_bytes(strategy.stages[strategy.holders(name)[0]], name)
            # A ring among few ranks: each sends its part on twice for every other rank.
            share = 2.0 * (len(holders) - 1) / len(holders)
            seconds += prices.message_s(holders[0], holders[-1], share * size)
    return seconds


def _results_s(strategy: PipelinedStrategy, prices: PipelinePrices) -> float:
    tensors = strategy.graph.atoms.graph.tensors
    names = (*strategy.sent_buffers, *strategy.graph.atoms.graph.outputs)
    sizes = [tensors[name].bytes for name in names]
    return sum(prices.communication.time_s("broadcast", (0,), size) for size in sizes)
