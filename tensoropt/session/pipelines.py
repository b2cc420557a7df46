"""The search for pipelines, which composes stages from the frontiers of ranges of the model.

For every pipeline degree, mesh and micro-batch count, the frontier of each range of operators is found
(:mod:`tensoropt.pipeline.stage_frontiers`). Stages are composed from them for every amount of memory
(:mod:`tensoropt.pipeline.compose`), and each composition is simulated with its schedule. If there are too
many ways to cut a model, each cut is tried only in the range from where it would balance computation to where
it would balance parameter storage. The notes say what else is left out.

In this file, a place is a pipeline rank: the equal part of the devices that computes one or more stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.restrictions import FREE, Restriction, restrict
from tensoropt.costs.source import CostSource
from tensoropt.errors import PlanError
from tensoropt.evaluation.problem import micro_batch_counts
from tensoropt.exploration.exploration import Exploration
from tensoropt.pipeline.compose import compose
from tensoropt.pipeline.composer import Composer, Crossings
from tensoropt.pipeline.costs import PipelinePrices, degrees_of, job_meshes, kinds_at, sources_at
from tensoropt.pipeline.evaluate import TOO_LARGE, PipelineEvaluation, assemble, fits
from tensoropt.pipeline.points import pipelined_point, pipelined_space
from tensoropt.pipeline.stage_frontiers import CROSSINGS, PlaceFrontiers, StageSearch, Thoroughness
from tensoropt.pipeline.stages import (
    Cutter,
    balanced,
    block_cuts,
    cheaper_to_duplicate,
    dealt_cuts,
    flops_of,
    has_ends,
    narrow_cuts,
    parameter_bytes_of,
    speeds_of,
    stages_to_a_place,
)
from tensoropt.pipeline.strategy import schedule_named
from tensoropt.plan.point import Point, reduce_points
from tensoropt.processes import cores, in_forks
from tensoropt.question.settings import Settings
from tensoropt.session.evaluation import only_used_spaces
from tensoropt.session.refining import best_counts, combining
from tensoropt.session.searched import Searched
from tensoropt.session.session import Session
from tensoropt.session.simulations import Simulations
from tensoropt.sharding.constraints import ConstraintError, PipelinePin, match
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import find_regions
from tensoropt.units import counted

_FEW_POSITIONS = 8
"""The number of positions up to which all cuts are tried; an assumption."""
_MOST_STAGES = 16
"""The most stages per pipeline rank; Llama 3's published job has 8."""


@dataclass(eq=False)
class _Cutting:
    """The possible cuts of a model into stages.

    Attributes:
        again: the names of tensors that stages recompute instead of receiving them.
        pin: the user's constraint on pipelines; None if there is none.
        costs: the source of the costs by which cuts balance computation.
        note: called with remarks on what is left out.
        small: whether the model is small enough to be cut inside blocks, too.
    """

    cutter: Cutter
    again: frozenset[str]
    pin: PipelinePin | None
    costs: CostSource
    note: Callable[[str], None]
    small: bool

    @property
    def pinned(self) -> tuple[str, ...]:
        """The names of the operators at which the user's constraint cuts the model."""
        return () if self.pin is None else self.pin.cuts

    def stages_to_a_place(self, places: int, micro_batches: int) -> int:
        return stages_to_a_place(self._blocks, places, micro_batches, _MOST_STAGES, ends=self._ends)

    def positions(self, composer: Composer, costs: CostSource, *, every: bool) -> list[list[int]]:
        """Return, for each stage, the indices of the groups of operators with which it may begin. The last
        item is a list with the number of groups, where the last stage ends.

        Args:
            costs: the source of the costs that compare the speeds of pipeline ranks.
            every: whether to try all cuts, if there are few.

        Raises:
            PlanError, ConstraintError: the model cannot be cut as the constraint on pipelines demands.
        """
        count, stages = len(self.cutter.graph.groups), composer.stages
        if self.pinned:
            pinned = tuple(self.cutter.beginning(name) for name in self.pinned)
            if len(pinned) != stages - 1:
                raise ConstraintError(
                    f"{self.pin}: {stages} stages take {stages - 1} cuts, not {len(pinned)}"
                )
            self.cutter.stages(pinned, self.again)
            return [[0], *([cut] for cut in pinned), [count]]
        if composer.per_place > 1 and not self.small and self._blocks + 2 >= stages:
            try:
                dealt = dealt_cuts(self.cutter, stages)
                self.note("pipelines of several stages on the same devices: blocks are spread evenly")
                return [[0], *([cut] for cut in dealt), [count]]
            except PlanError as refusal:  # not every block of every model can begin a stage
                self.note(f"pipelines of {stages} stages are not cut between blocks alone: {refusal}")
        places = self._cuttable(stages)
        if len(places) <= _FEW_POSITIONS and every:
            return [[0], *(places for _ in range(stages - 1)), [count]]
        self.note(
            "pipelines: cuts are tried only from where they balance computation to where they balance storage"
        )
        even = [
            cuts
            for weights, strengths in zip(self._weights, self._strengths(composer, costs), strict=True)
            if (cuts := balanced(weights, places, stages, strengths))
        ]
        windows = []
        for number in range(stages - 1):
            own = [cuts[number] for cuts in even]
            windows.append([cut for cut in places if own and min(own) <= cut <= max(own)])
        return [[0], *windows, [count]]

    @cached_property
    def _blocks(self) -> int:
        return len(find_regions(self.cutter.graph))

    @cached_property
    def _ends(self) -> bool:
        return has_ends(self.cutter)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """(groups,) the FLOP of each group of operators, and (groups,) its parameters in bytes."""
        return flops_of(self.cutter.graph, self.costs), parameter_bytes_of(self.cutter.graph)

    def _strengths(self, composer: Composer, costs: CostSource) -> tuple[Sequence[float], Sequence[float]]:
        prices, at = composer.frontiers.prices, composer.place_of
        if not prices.of_places:
            return (), ()
        speeds = speeds_of(self.cutter.graph, sources_at(costs, composer.places))
        return [speeds[place] for place in at], [prices.room(place) for place in at]

    def _cuttable(self, stages: int) -> list[int]:
        """Return the groups with which stages may begin: all possible ones if they are few; otherwise those
        that begin blocks or, if these are too few, those before which the fewest bytes are sent."""
        if len(self.cutter.cuts) <= _FEW_POSITIONS:
            return list(self.cutter.cuts)
        blocks = block_cuts(self.cutter)
        if len(blocks) >= stages - 1:
            self.note("pipelines: every stage begins with a repeated block of the model")
            return blocks
        self.note("pipelines: the model is cut where the fewest bytes are sent from stage to stage")
        return narrow_cuts(self.cutter, stages - 1)


_MOST_PLACES = 16
"""The highest pipeline degree that is tried, as in published work."""
_MOST_NAMED = 4
"""The most micro-batch counts that an error message proposes."""
_MOST_AXES = 2
"""The most mesh axes of a pipeline rank: every placement of crossing tensors on these is searched."""
_INTERLEAVED = "interleaved_1f1b"
"""The schedule in which each pipeline rank has several stages."""
_APART = "zero_bubble"
"""The schedule with which found pipelines are also simulated."""
_MULTIPLES = (8, 4, 2, 1)
"""The micro-batches per pipeline rank that are tried: with 8 the bubble is a ninth of the step."""
_MOST_COUNTS = 2
"""The most micro-batch counts searched for a large model: those with the smallest bubbles."""
_EXACT = Thoroughness(gap=1e-3, candidates=64, in_flight=True)
_QUICK = Thoroughness(gap=None, candidates=24, in_flight=False)
FEW_GROUPS = 64
"""The number of a model's groups of operators up to which ranges are searched to a small gap, and each cut
may have its own tensor placement; an assumption."""
_HEURISTIC = "pipelines: found by a heuristic, which proves nothing about them"
_STEP, _COARSE_STEP = 0.01, 0.05
"""The least relative decrease of memory from one pipeline to the next for large models. The coarse step is
used with several stages per pipeline rank, as composing more stages takes longer."""


def wants_pipelines(session: Session) -> bool:
    """Return whether to search for pipelines: if the user asks for them or constrains them, or by default if
    the cluster has several levels of links or kinds of devices."""
    settings = session.settings
    if settings.first:
        return False
    if (pin := pinned_pipeline(settings)) is not None:
        return pin.stages > 1
    # With several kinds of devices, all other plans run at the pace of the slowest.
    promising = len(session.cluster.levels) > 1 or len(session.cluster.device_kinds) > 1
    return settings.pipelines == "always" or (settings.pipelines == "auto" and promising)


def pinned_pipeline(settings: Settings) -> PipelinePin | None:
    return settings.constraints.pipeline if settings.constraints is not None else None


def with_pipelines(session: Session, searched: Searched, exploration: Exploration) -> Exploration:
    """Return the exploration with the pipelines found, without points that another one beats; with pipelines
    alone if the user constrains them.

    Raises:
        ConstraintError: no pipeline fulfils the constraint.
    """
    pinned = pinned_pipeline(session.settings) is not None
    finder = _Finder(session, searched, () if pinned else exploration.points)
    if reason := finder.refusal():
        if pinned:
            raise ConstraintError(f"{finder.pin}: {reason}")
        return exploration.noted([f"no pipelines: {reason}"])
    spaces, points = list(exploration.spaces), [] if pinned else list(exploration.points)
    with session.clock.stage("pipelines"):
        every = finder.all()
    for mesh, micro_batches, found in every:
        made = [point.changed(space=len(spaces)) for point in found]
        problem = searched.problem
        spaces.append(
            pipelined_space(mesh, micro_batches, problem.parameter_keys, [*finder.notes], problem.sequence)
        )
        points = list(reduce_points([*points, *made]))
    if not points:
        remedy = "give a batch size that is a multiple of the number of stages, or other cuts"
        why = " ".join(finder.refusals.values()) or remedy
        raise ConstraintError(f"{finder.pin}: no such pipeline was found; {why}")
    among = sum(p.space >= len(exploration.spaces) for p in points)
    notes = [*finder.notes, f"pipelines: {finder.simulated:,} simulated, {among:,} of them among the points"]
    noted = exploration.noted(notes, seconds=session.seconds_with(exploration.report, "pipelines"))
    return only_used_spaces(replace(noted, spaces=tuple(spaces), points=tuple(points)))


@dataclass(frozen=True)
class _Task:
    """A mesh and a micro-batch count for which pipelines are searched.

    Attributes:
        schedule: the name of the schedule; "" for the requested one.
        outer: the splits to try for tensors sent between stages of a large model, on all axes of a stage's
            mesh but the last; for a small model all are tried.
        per_place: stages per pipeline rank; None to let :meth:`_Finder._several` choose.
    """

    mesh: Mesh
    micro_batches: int
    schedule: str = ""
    outer: Sequence[str] = CROSSINGS[:1]
    per_place: int | None = None

    @property
    def words(self) -> str:
        several = f", {self.per_place} stages on the same devices" if self.per_place else ""
        return f"pp{self.mesh.label}, {self.micro_batches} micro-batches{several}"


_Prepared = tuple[_Task, Composer, Sequence[Sequence[int]]]
"""A task with the composer and the cut positions of its pipelines."""


class _Finder:
    """The search for pipelines on all meshes.

    Attributes:
        notes: remarks on what was left out.
        refusals: why pipelines were left out, by schedule, or by number of device groups and of
            micro-batches.
    """

    def __init__(self, session: Session, searched: Searched, points: Sequence[Point]):
        self.session, self.problem, self.searched = session, searched.problem, searched
        self.graph: GroupGraph = searched.problem.graph
        self.cutter = Cutter(self.graph)
        self.settings = session.settings
        self.pin = pinned_pipeline(self.settings)
        self.schedule = (self.pin.schedule if self.pin is not None else None) or "1f1b"
        self.costs: CostSource = searched.costs
        self.again = cheaper_to_duplicate(self.cutter, self.costs)
        self.small = len(self.graph.groups) <= FEW_GROUPS
        self.cutting = _Cutting(self.cutter, self.again, self.pin, self.costs, self._note, self.small)
        self.notes: dict[str, None] = {_HEURISTIC: None}
        self.refusals: dict[str, str] = {}
        # Points name each operator of a plan, which takes longer than to simulate it: those that others beat
        # never become points.
        self._unbeaten: Sequence[Point] = points
        self._known: list[tuple[float, float]] = []
        # Meshes and micro-batches whose pipelines do not fit, or that other plans beat in any case.
        self._beaten: set[tuple[Mesh, int]] = set()
        self.simulated = 0
        self._least = (float("inf"), Mesh(shape=(1,)))

    def _refused(self, schedule: str, refusal: PlanError) -> None:
        if schedule not in self.refusals:
            self.refusals[schedule] = str(refusal)
            self._note(f"some or all pipelines with the schedule {schedule} were left out: {refusal}")

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def refusal(self) -> str:
        """Return why no pipeline is possible; "" if some may be.

        Raises:
            PlanError: there is no schedule with the name in the user's constraint.
        """
        schedule_named(self.schedule)
        given = self.settings.constraints
        if given is not None and given.devices:
            return "stages cannot be combined with constraints on devices; leave one of them out"
        if self.searched.refusal:
            return self.searched.refusal
        if not self.graph.atoms.graph.training:
            return "pipelines are searched for training only, not for inference"
        if self.problem.refusal or not self._degrees:
            return self.problem.refusal or self._no_degree()
        return "" if any(self._counts(places) for places in self._degrees) else self._no_count()

    def _no_count(self) -> str:
        batch, least, given = self.problem.batch, min(self._degrees), self.settings.micro_batches
        asked = given if isinstance(given, str) else ",".join(map(str, given))
        if self.pin is None:
            return (
                f"none of the requested micro-batch counts ({asked}), times {least} stages or more, "
                f"divides the batch of {batch}; give a larger batch or fewer micro-batches"
            )
        possible = [str(m) for m in range(least, batch + 1) if batch % m == 0][:_MOST_NAMED]
        remedy = f"--micro-batches {' or '.join(possible)}" if possible else f"a batch of at least {least}"
        return (
            f"a pipeline needs at least as many micro-batches as it has stages, {least}, in a number that "
            f"divides the batch of {batch}, but --micro-batches is {asked}; give {remedy}"
        )

    def _no_degree(self) -> str:
        cluster, parts = self.session.cluster, degrees_of(self.session.cluster)
        possible = [p for p in parts if p <= self._most_stages]
        allowed = (
            f"{cluster.name} has {counted(cluster.device_count, 'device')}, which allow "
            f"{', '.join(map(str, parts)) or 'no'} stages, and the model, with "
            f"{counted(len(self.graph.groups), 'group')} of operators, can be cut at "
            f"{counted(len(self.cutter.cuts), 'place')}, for at most "
            f"{counted(self._most_stages, 'stage')}"
        )
        remedy = "take more devices, a model of more layers, or plans without stages"
        if possible:
            remedy = f"ask for one of these numbers of stages: {', '.join(map(str, possible))}"
        return (
            "stages run on equal parts of the devices; each stage has parameters, trained or frozen, and "
            f"each but the first uses a tensor of the stage before it; {allowed}; {remedy}"
        )

    @property
    def _most_stages(self) -> int:
        return len(self.cutter.cuts) + 1

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        found = degrees_of(self.session.cluster)
        if self.pin is not None:
            # Which of several pinned cuts is impossible is said where they are made.
            most = self._most_stages if not self.pin.cuts else self.pin.stages
            return tuple(p for p in found if p == self.pin.stages <= most)
        return tuple(p for p in found if p <= min(_MOST_PLACES, self._most_stages))

    def all(self) -> list[tuple[Mesh, int, Sequence[Point]]]:
        """Return the pipelines of each mesh and micro-batch count, as points without a space number."""
        self._note_kinds()
        asked = [
            (mesh, micro_batches)
            for places in self._degrees
            for mesh in job_meshes(self.session.cluster, places, _MOST_AXES)
            for micro_batches in self._counts(places)
        ]
        with self.session.open_store() as store, self.session.open_ranks() as pool:
            # The source's own were closed when the search was over.
            self.costs = self.costs.reopened(store, pool)
            found: list[list[Point]] = [[] for _ in asked]
            try:
                self._search(asked, found)
            except KeyboardInterrupt:
                if not self._unbeaten:
                    raise
                self.session.left.append("pipelines other than those found")
        return [(*one, reduce_points(of)) for one, of in zip(asked, found, strict=True)]

    def _search(self, asked: list[tuple[Mesh, int]], found: list[list[Point]]) -> None:
        """Add the pipelines of each mesh and micro-batch count in ``asked`` to the list at the same index of
        ``found``. For a large model, also search the mesh with the least memory at one sample per
        micro-batch, and append this search to both lists."""
        self._add([(own, _Task(*at)) for own, at in zip(found, asked, strict=True)])
        if not self.small and not self._pinned_schedule and not self.cutting.pinned:
            left = [(own, at) for own, at in zip(found, asked, strict=True) if at not in self._beaten]
            several = [
                (own, _Task(mesh, count, _INTERLEAVED, per_place=stages))
                for own, (mesh, count) in left
                if (stages := self.cutting.stages_to_a_place(mesh.shape[0], count)) > 1
            ]
            self._add(several)
        if leanest := self._leanest(asked):
            # All axes of a place split the next dim: the least that a stage can have in flight.
            mesh, rows = leanest
            self._note(f"pipelines with one sample per micro-batch were searched only on mesh pp{mesh.label}")
            asked.append(leanest)
            found.append([])
            self._add([(found[-1], _Task(mesh, rows, outer=CROSSINGS[1:2]))])
        self.session.progress("pipelines", len(asked), len(asked), "composed and simulated")

    def _note_kinds(self) -> None:
        cluster = self.session.cluster
        if len(cluster.device_kinds) == 1:
            return
        self._note("pipelines: each stage has its own devices' speed and memory, in order of rank")
        mixed = [p for p in self._degrees if any(len(kinds) > 1 for kinds in kinds_at(cluster, p))]
        if mixed:
            degrees = ", ".join(map(str, mixed))
            self._note(
                f"pipelines on {degrees} groups of devices: groups of several device kinds run at the "
                "speed of the slowest"
            )

    def _add(self, tasks: Sequence[tuple[list[Point], _Task]]) -> None:
        """Search the pipelines of each task in forks, one per core, and add them to the task's list."""
        # Of before, so that the number of cores changes nothing.
        self._known = sorted((one.memory_bytes, one.time_s) for one in self._unbeaten)
        for start in range(0, len(tasks), cores()):
            part = tasks[start : start + cores()]
            self.session.progress("pipelines", start, len(tasks), "; ".join(task.words for _, task in part))
            prepared = [(own, made) for own, task in part if (made := self._prepared(task)) is not None]
            every = in_forks(self._composed, [made for _, made in prepared])
            for (own, _), (points, simulated, least, notes, refusals, beaten) in zip(
                prepared, every, strict=True
            ):
                own += points
                self._unbeaten = reduce_points([*self._unbeaten, *points])
                self.simulated += simulated
                self._least = min(self._least, least, key=itemgetter(0))
                self.notes |= notes
                self.refusals |= refusals
                self._beaten |= beaten

    def _leanest(self, asked: Sequence[tuple[Mesh, int]]) -> tuple[Mesh, int] | None:
        """Return, for a large model, the mesh whose pipelines need the least memory, and the batch size as
        its micro-batch count; None if that was already tried or is impossible, or if the micro-batch count of
        a constrained pipeline is given."""
        rows = self.problem.batch
        given = self.pin is not None and self.settings.micro_batches != "auto"
        if self.small or given or not self.simulated:
            return None
        _, mesh = self._least
        return (mesh, rows) if mesh.shape[0] <= rows and (mesh, rows) not in asked else None

    def _counts(self, places: int) -> tuple[int, ...]:
        """Return the micro-batch counts to try, which divide the batch. Requested counts are multiplied by
        the pipeline degree, so that each device computes pieces of the same size as without stages, unless
        the user constrains the pipeline."""
        batch = self.problem.batch
        if self.settings.micro_batches == "auto":
            counts = [places * m for m in _MULTIPLES if batch % (places * m) == 0]
            counts = counts if self.small else counts[:_MOST_COUNTS]
        else:
            given = micro_batch_counts(self.problem, self.settings)
            counts = [m if self.pin is not None else places * m for m in given]
        return tuple(m for m in sorted({*counts}) if m >= places and batch % m == 0)

    # -- stages -------------------------------------------------------------------------------------

    def _prepared(self, task: _Task) -> _Prepared | None:
        """Return a task with all costs that it needs already measured, so that a fork can compose its
        pipelines; None if there are none."""
        mesh, micro_batches, per_place = task.mesh, task.micro_batches, task.per_place
        schedule = task.schedule or self.schedule
        restriction = self._restriction(mesh, micro_batches)
        if restriction is None:
            return None
        search = StageSearch(
            self.problem,
            self.settings,
            self.cutter,
            self.again,
            mesh,
            micro_batches,
            restriction,
            _EXACT if self.small else _QUICK,
        )
        frontiers = PlaceFrontiers(search, self.costs)
        if not self.small:
            self._note("pipelines: all stage boundaries use the same layout")
        if per_place is None and schedule_named(schedule).several:
            per_place = self._several(mesh.shape[0], micro_batches, schedule)
        step = 0.0 if self.small else _STEP if (per_place or 1) == 1 else _COARSE_STEP
        try:
            composer = Composer(
                frontiers,
                schedule,
                Crossings() if self.small else Crossings(outer=task.outer, everywhere_alike=True),
                partial(compose, step=step, known=() if self.small else self._known),
                self.notes,
                per_place,
                refused=partial(self._refused, schedule),
            )
        except PlanError as refusal:
            where = f"pipelines on {mesh.shape[0]} groups of devices, {micro_batches} micro-batches"
            self.refusals.setdefault(where, str(refusal))
            self._note(f"no {where}: {refusal}")
            return None
        positions = self.cutting.positions(composer, self.costs, every=self.small)
        composer.prepare(positions)
        return task, composer, positions

    def _composed(self, prepared: _Prepared) -> tuple[Any, ...]:
        """Compose and simulate the pipelines of a task.

        Return the pipelines that no plan so far beats, the number of simulated ones, the least memory with
        its mesh, notes, refusals, and (mesh, micro-batch count) if other plans beat all pipelines. Pipelines
        are returned as points, since evaluations hold the simulated steps of all stages: gigabytes for a
        model of a hundred blocks.
        """
        task, composer, positions = prepared
        mesh, beaten = task.mesh, set[tuple[Mesh, int]]()
        found = list(composer.composed(positions))
        if self._known and not found:
            beaten.add((mesh, task.micro_batches))
            self._note("several stages on the same devices: tried only where one stage gave a pipeline")
        if not self._pinned_schedule and composer.schedule == self.schedule:
            found += self._apart(reduce_points(found), composer.frontiers.prices)
        least = min([self._least, *((one.memory_bytes, mesh) for one in found)], key=itemgetter(0))
        unbeaten = reduce_points([*self._unbeaten, *found])
        points = [pipelined_point(o, mesh, space=0) for o in unbeaten if isinstance(o, PipelineEvaluation)]
        return points, len(found), least, self.notes, self.refusals, beaten

    @property
    def _pinned_schedule(self) -> bool:
        return self.pin is not None and self.pin.schedule is not None

    def _several(self, places: int, micro_batches: int, schedule: str) -> int | None:
        if self.cutting.pinned:
            return max(1, (len(self.cutting.pinned) + 1) // places)
        if schedule != _INTERLEAVED or self.small:
            return None
        return max(2, self.cutting.stages_to_a_place(places, micro_batches))

    def _apart(self, found: Sequence[PipelineEvaluation], prices: PipelinePrices) -> list[PipelineEvaluation]:
        made = []
        for one in found:
            try:
                apart = replace(one.strategy, schedule=_APART)
            except PlanError as refusal:
                self._refused(_APART, refusal)
            else:
                made.append(assemble(apart, one.stages, prices))
        fitting = [one for one in made if fits(one, prices)]
        if len(fitting) < len(made):
            self._note(TOO_LARGE)
        return fitting

    def _restriction(self, mesh: Mesh, micro_batches: int) -> Restriction | None:
        inner = Mesh(shape=mesh.shape[1:] or (1,), names=mesh.names[1:] or ("gpu",))
        given, limit = self.settings.constraints, FREE
        if given is not None:
            try:
                spaces = restrict(
                    match(given, self.graph), self.graph, self.problem.micro, (inner,), (micro_batches,)
                ).spaces
            except ConstraintError as refusal:
                self._note(f"no pipelines on pp{mesh.label}: {refusal}")
                return None
            limit = (spaces or {}).get((inner.label, micro_batches), FREE)
        if inner.axis_count < _MOST_AXES:
            return limit
        self._note(
            f"pipelines whose stages have {_MOST_AXES} mesh axes: groups combine only the splits that the "
            "best strategies without stages use"
        )
        simulations = Simulations(self.session.cluster, list(self.searched.simulations))
        searched = {space.tables.mesh[0] for space in simulations.spaces}
        count = micro_batches if micro_batches in searched else best_counts(simulations)[0]
        return combining(limit, simulations, count)
