"""Pipelines beside the frontier of one mesh: cuts, stages searched one by one, and the pipelines made of
them.

A heuristic, which says so. Of every degree, mesh of a place and number of micro-batches, the model is cut
where its stages have about as much to compute, or about as many parameters. What crosses lies in one
placement at all cuts, of which a few are tried; so the stages' searches are independent. Representatives of
each stage's frontier are simulated, and for every amount of memory at which a stage could be faster the
fastest stages within it make a pipeline, whose schedule is then simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.builder import TableBuilder
from tensoropt.costs.restrictions import Restriction
from tensoropt.costs.source import CostSource
from tensoropt.costs.tables import CostTables, outline_templates, with_facts
from tensoropt.errors import PlanError
from tensoropt.frontier import representatives
from tensoropt.pipeline.costs import PipelinePrices
from tensoropt.pipeline.evaluate import PipelineEvaluation, assemble
from tensoropt.pipeline.meshes import degrees_of, job_meshes
from tensoropt.pipeline.points import pipelined_point, pipelined_space
from tensoropt.pipeline.schedules import in_flight_of, place_actions, schedule_named
from tensoropt.pipeline.stages import Cutter, Stage, arriving_group, departing_group
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan.evaluate import Evaluation, Evaluator
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point, check_budget, reduce_points
from tensoropt.plan.problem import micro_batch_counts, offered_regions
from tensoropt.plan.settings import Settings
from tensoropt.plan.space import Space
from tensoropt.profiling.workload import workload
from tensoropt.search import NoStrategyError, Staircase, track_frontier
from tensoropt.session.one_space import cost_graph
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.sharding.configurations import Configuration, enumerate_configurations
from tensoropt.sharding.constraints import ConstraintError
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.labels import WHOLE
from tensoropt.sharding.regions import find_regions

MOST_PLACES = 16
"""The highest degree that is tried, as in what is published."""
MOST_AXES = 2
"""Axes of a place's mesh: what crosses, and each stage, is searched for every one of their placements."""
MULTIPLES = (1, 2, 4, 8)
"""Micro-batches for each place of the pipeline: with 8 the bubble is a ninth of the step."""
CANDIDATES = 48
"""Strategies of a stage that are simulated; an assumption, as are the numbers above."""
HEURISTIC = (
    "pipelines: a heuristic; cut where stages have about as much to compute or to store, 1F1B, one placement "
    "for what crosses; other cuts and schedules may be better"
)


@dataclass(frozen=True)
class _Candidates:
    """Simulated strategies of one stage.

    Attributes:
        memory: (n,) bytes of a rank with the stage's micro-batches in flight.
        time_s: (n,) of one micro-batch, forward and backward. sync_s: (n,) behind the last one.
    """

    tables: CostTables
    evaluation: Evaluation
    memory: np.ndarray
    time_s: np.ndarray
    sync_s: np.ndarray


def wants_pipelines(settings: Settings) -> bool:
    """Whether pipelines are looked for: where they are asked for, or pinned."""
    pin = settings.constraints.pipeline if settings.constraints is not None else None
    return pin.stages > 1 if pin is not None else settings.pipelines == "auto"


def with_pipelines(session: Session, searched: Searched, exploration: Exploration) -> Exploration:
    """The exploration with the pipelines that are found, reduced to one frontier; where a pipeline is pinned,
    with these alone.

    Raises:
        ConstraintError: there is no pipeline as it is pinned.
        InfeasibleError: none of those pinned fits the budget of the settings.
    """
    finder = _Finder(session, searched)
    pinned = finder.pin is not None
    if reason := finder.refusal():
        if pinned:
            raise ConstraintError(f"{finder.pin}: {reason}")
        return replace(exploration, report=_noted(exploration, [f"no pipelines: {reason}"]))
    spaces, points = list(exploration.spaces), [] if pinned else list(exploration.points)
    keys = {t.name: str(t.key) for t in searched.problem.graph.atoms.graph.parameters}
    count = 0
    for mesh, micro_batches, evaluations in finder.all():
        made = [pipelined_point(one, mesh, space=len(spaces)) for one in evaluations]
        spaces.append(pipelined_space(mesh, micro_batches, keys, [HEURISTIC]))
        count += len(made)
        points = list(reduce_points([*points, *made], _costs))
    if not points:
        raise ConstraintError(
            f"{finder.pin}: no such pipeline was found; give the batch a size that as many micro-batches as "
            "stages divide, or other cuts"
        )
    among = sum(p.pipeline is not None for p in points)
    notes = [HEURISTIC, f"pipelines: {count:,} simulated, {among:,} of them among the points"]
    check_budget(points, session.settings.memory_bytes)
    kept, used = _used_spaces(spaces, points)
    return replace(exploration, spaces=kept, points=used, report=_noted(exploration, notes))


def _costs(point: Point) -> tuple[float, float]:
    return point.memory_bytes, point.time_s


def _noted(exploration: Exploration, notes: Sequence[str]) -> dict[str, object]:
    return {**exploration.report, "notes": [*exploration.report["notes"], *notes]}


def _used_spaces(
    spaces: Sequence[Space], points: Sequence[Point]
) -> tuple[tuple[Space, ...], tuple[Point, ...]]:
    """The spaces without those of pipelines that have no point, and the points with their numbers."""
    needed = {p.space for p in points if p.pipeline is not None}
    kept = [n for n, space in enumerate(spaces) if space.groups or space.mesh.placed or n in needed]
    number = {n: i for i, n in enumerate(kept)}
    return tuple(spaces[n] for n in kept), tuple(replace(p, space=number[p.space]) for p in points)


class _Finder:
    """Finds pipelines of one problem on one cluster."""

    def __init__(self, session: Session, searched: Searched):
        self.session, self.problem = session, searched.problem
        self.graph: GroupGraph = searched.problem.graph
        self.cutter = Cutter(self.graph)
        self.settings = session.settings
        self.pin = self.settings.constraints.pipeline if self.settings.constraints is not None else None
        self.schedule = (self.pin.schedule if self.pin is not None else None) or "1f1b"
        self.costs: CostSource = searched.costs
        self.again = self.cutter.can_be_made_again

    def refusal(self) -> str:
        """Why there are no pipelines, or ""."""
        given = self.settings.constraints
        if given is not None and (given.pins or given.stored or given.together or given.devices):
            return "constraints of operators, parameters or device kinds are not carried over to stages"
        if not self.graph.atoms.graph.training:
            return "they are searched for training only"
        return self.problem.refusal or ("" if self._degrees else "the model or the cluster cannot be cut so")

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        most = min(MOST_PLACES, len(self.cutter.cuts) + 1)
        found = degrees_of(self.session.cluster)
        if self.pin is not None:
            return tuple(p for p in found if p == self.pin.stages)
        return tuple(p for p in found if p <= most)

    def all(self) -> Iterator[tuple[Mesh, int, list[PipelineEvaluation]]]:
        """Per mesh of a job and number of micro-batches the pipelines found."""
        schedule_named(self.schedule)
        self.weights = self._weights()
        asked = [
            (mesh, micro_batches)
            for places in self._degrees
            for mesh in job_meshes(self.session.cluster, places, MOST_AXES)
            for micro_batches in self._counts(places)
        ]
        with self.session.open_store() as store, self.session.open_ranks() as pool:
            # The source's own were closed when the search was over.
            self.costs = replace(self.costs, store=store, pool=pool)
            for number, (mesh, micro_batches) in enumerate(asked):
                label = f"pp{mesh.label}, {micro_batches} micro-batches"
                self.session.report("pipelines", number, len(asked), label)
                yield mesh, micro_batches, self._of_mesh(mesh, micro_batches)
            self.session.report("pipelines", len(asked), len(asked), "composed and simulated")

    def _counts(self, places: int) -> tuple[int, ...]:
        """Micro-batches that divide the batch and keep all places busy."""
        if self.settings.micro_batches != "auto":
            counts = micro_batch_counts(self.problem, self.settings)
            return tuple(m for m in counts if m >= places)
        tensors = self.graph.atoms.graph.tensors
        batch = next((tensors[n].shape[0] for n in self.graph.atoms.graph.inputs if tensors[n].shape), 1)
        return tuple(places * m for m in MULTIPLES if batch % (places * m) == 0)

    # -- cuts ---------------------------------------------------------------------------------------

    def _weights(self) -> np.ndarray:
        """(2, groups) of computation, in FLOP unsplit and at least a little for everything, and of
        parameters."""
        tensors = self.graph.atoms.graph.tensors
        found = np.zeros((2, len(self.graph.groups)))
        for number, group in enumerate(self.graph.groups):
            found[:, number] = (
                self._flops(group),
                sum(tensors[n].bytes for n in (*group.parameters, *group.shared)),
            )
        return found

    def _flops(self, group: Group) -> float:
        work = workload(self.graph, Configuration(group, (group.unsplit,)), (1,))
        facts = self.costs.facts_of(work)
        return facts.forward_flops + facts.backward_flops + 1.0

    def _cuttings(self, stages: int) -> list[tuple[int, ...]]:
        """Cuts that even out computation, and storage, at positions that few bytes cross; or those pinned.

        Raises:
            PlanError, ConstraintError: the model cannot be cut as it is pinned.
        """
        if self.pin is not None and self.pin.cuts:
            pinned = tuple(self.cutter.beginning(name) for name in self.pin.cuts)
            if len(pinned) != stages - 1:
                raise ConstraintError(
                    f"{self.pin}: {stages} stages take {stages - 1} cuts, not {len(pinned)}"
                )
            self.cutter.stages(pinned, self.again)
            return [pinned]
        positions = self._positions(stages)
        found = {_balanced(weights, positions, stages) for weights in self.weights}
        return [cuts for cuts in sorted(filter(None, found)) if self._legal(cuts)]

    def _positions(self, stages: int) -> list[int]:
        """Where stages may begin: with repeated blocks where there are enough, else where least crosses."""
        starts = {self.cutter.place[region.groups[0]] for region in find_regions(self.graph)}
        blocks = [cut for cut in self.cutter.cuts if cut in starts]
        if len(blocks) >= stages - 1:
            return blocks
        sizes = {cut: self.cutter.crossing_bytes(cut) for cut in self.cutter.cuts}
        limit = sorted(sizes.values())[min(len(sizes) - 1, max(stages - 1, len(sizes) // 4))]
        return [cut for cut, size in sizes.items() if size <= limit]

    def _legal(self, cuts: tuple[int, ...]) -> bool:
        try:
            self.cutter.stages(cuts, self.again)
        except PlanError:
            return False
        return True

    # -- stages -------------------------------------------------------------------------------------

    def _of_mesh(self, mesh: Mesh, micro_batches: int) -> list[PipelineEvaluation]:
        found: list[PipelineEvaluation] = []
        places, prices = mesh.shape[0], PipelinePrices.of(self.costs, mesh)
        per_place = 2 if schedule_named(self.schedule).several else 1
        actions = place_actions(self.schedule, places, per_place, micro_batches)
        in_flight = [in_flight_of(actions, stage) for stage in range(places * per_place)]
        for cuts in self._cuttings(places * per_place):
            parts = self.cutter.stages(cuts, self.again)
            for across in _placements(len(mesh.shape) - 1):
                try:
                    candidates = [
                        self._candidates(part, kept, (micro_batches, *mesh.shape[1:]), across, prices)
                        for part, kept in zip(parts, in_flight, strict=True)
                    ]
                except NoStrategyError:
                    continue
                found += self._pipelines(cuts, candidates, prices)
        return list(_unbeaten(found))

    def _candidates(
        self,
        part: Stage,
        in_flight: int,
        sizes: tuple[int, ...],
        across: tuple[bool, ...],
        prices: PipelinePrices,
    ) -> _Candidates:
        """The simulated strategies of a stage.

        Args:
            in_flight: micro-batches that it keeps something of at once.
            sizes: micro-batches, then the axes of a place.
            across: per axis whether what crosses is split along the batch.

        Raises:
            NoStrategyError: none crosses so.
        """
        micro = part.micro(self.problem.micro)
        made = outline_templates(part.graph, sizes, micro, _crossing_so(part, micro, sizes, across))
        works = {work.key: work for template in made.values() for work in template.works}
        self.costs.find_facts_of(works.values())
        self.costs.measure(works)
        templates = with_facts(made, self.costs.facts_of)
        offered = {region.name for region in offered_regions(self.problem, self.settings)}
        regions = [region for region in find_regions(part.graph) if region.name in offered]
        tables = TableBuilder(
            part.graph, micro, templates, prices.of_stage(part.graph, sizes, in_flight), regions
        ).build()
        frontier = track_frontier(cost_graph(tables), epsilon=max(self.settings.epsilon, 1e-3))
        points = Staircase(frontier.memory, frontier.time)
        chosen = representatives(points, CANDIDATES, 1e-3)
        strategies = [(frontier.strategy(i), frontier.options(i)) for i in np.asarray(chosen).tolist()]
        (evaluation,) = Evaluator(tables, prices.overlap)(strategies)
        parts = evaluation.metrics.parts
        memory = parts.lasting_bytes + np.maximum(
            (in_flight - 1) * parts.between_bytes + parts.within_bytes, parts.end_bytes
        )
        time_s = parts.forward_s[:, 1] + parts.backward_s[:, 1]
        return _Candidates(tables, evaluation, memory, time_s, parts.end_s)

    # -- pipelines ----------------------------------------------------------------------------------

    def _pipelines(
        self, cuts: tuple[int, ...], stages: Sequence[_Candidates], prices: PipelinePrices
    ) -> Iterator[PipelineEvaluation]:
        """The fastest stages within every amount of memory at which one of them could be faster."""
        micro_batches = stages[0].tables.mesh[0]
        seen: set[tuple[int, ...]] = set()
        least = max(float(stage.memory.min()) for stage in stages)
        caps = sorted({float(m) for stage in stages for m in stage.memory if m >= least})
        for cap in _spread(caps, CANDIDATES):
            rows = tuple(_fastest(stage, cap, micro_batches) for stage in stages)
            if rows in seen:
                continue
            seen.add(rows)
            try:
                strategy = self._strategy(cuts, stages, rows)
            except PlanError:
                continue  # stages store a tied parameter in two ways
            alone = [_only(stage.evaluation, row) for stage, row in zip(stages, rows, strict=True)]
            yield assemble(strategy, alone, prices)

    def _strategy(
        self, cuts: tuple[int, ...], stages: Sequence[_Candidates], rows: Sequence[int]
    ) -> PipelinedStrategy:
        chosen = []
        for stage, row in zip(stages, rows, strict=True):
            of = stage.evaluation
            choice = {name: int(column[row]) for name, column in of.choices.items()}
            options: dict[object, int] = {name: int(column[row]) for name, column in of.options.items()}
            chosen.append(stage.tables.strategy(choice, options))
        per_place = 2 if schedule_named(self.schedule).several else 1
        places = len(stages) // per_place
        return PipelinedStrategy(self.graph, cuts, self.again, tuple(chosen), self.schedule, places)


def _balanced(weights: np.ndarray, positions: Sequence[int], stages: int) -> tuple[int, ...]:
    """The cuts at which the heaviest stage is lightest; of equals the first. Empty where there are too
    few."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ends = [*positions, len(weights)]
    # best[e]: (heaviest, cuts) of the first stages that end at position e.
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (float(total[end]), ()) for end in ends}
    for _ in range(stages - 1):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            choices = [
                (max(heaviest, float(total[end] - total[cut])), (*cuts, cut))
                for cut, (heaviest, cuts) in best.items()
                if cut < end and cut != len(weights)
            ]
            if choices:
                following[end] = min(choices)
        best = following
    return best.get(len(weights), (inf, ()))[1]


def _placements(axes: int) -> list[tuple[bool, ...]]:
    """Per axis whether what crosses is split along the batch: all ways."""
    return list(itertools.product((True, False), repeat=axes))


def _crossing_so(
    part: Stage, micro: Mapping[str, AxisStrategy], sizes: tuple[int, ...], across: tuple[bool, ...]
) -> Restriction:
    """What is left where tensors cross in one placement: along the batch on some axes where they have one
    that divides, whole on the others."""
    kept = {}
    names = (*(arriving_group(n) for n in part.arriving), *(departing_group(n) for n in part.departing))
    for name in names:
        group = part.graph.group_of[name]
        batch = micro[name].label
        configurations = enumerate_configurations(part.graph.atoms, group, sizes, micro[name])
        wanted = [batch if split and batch.splits else WHOLE for split in across]
        labels = [[s.label for s in c.strategies[1:]] for c in configurations]
        if wanted not in labels:
            wanted = [WHOLE for _ in across]
        kept[name] = (labels.index(wanted),)
    return Restriction(kept=kept)


def _fastest(stage: _Candidates, cap: float, micro_batches: int) -> int:
    """The strategy of a stage that takes least of a step within a memory."""
    takes = np.where(stage.memory <= cap * (1 + 1e-12), stage.time_s + stage.sync_s / micro_batches, inf)
    return int(np.argmin(takes))


def _spread(values: Sequence[float], most: int) -> list[float]:
    """At most so many of ascending values, both ends among them."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, most).astype(int)).tolist()]


def _only(evaluation: Evaluation, row: int) -> Evaluation:
    """One strategy of an evaluation by itself."""
    rows = slice(row, row + 1)
    metrics = evaluation.metrics
    parts = type(metrics.parts)(**{name: value[rows] for name, value in vars(metrics.parts).items()})
    figures = {name: value[rows] for name, value in vars(metrics).items() if name != "parts"}
    return Evaluation(
        evaluation.batch.part(rows),
        type(metrics)(**figures, parts=parts),
        {name: column[rows] for name, column in evaluation.choices.items()},
        {name: column[rows] for name, column in evaluation.options.items()},
    )


def _unbeaten(found: Sequence[PipelineEvaluation]) -> tuple[PipelineEvaluation, ...]:
    return reduce_points(found, lambda one: (one.memory_bytes, one.total_s))
