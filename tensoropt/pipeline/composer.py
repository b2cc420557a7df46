"""Find the pipelines of one mesh and schedule: search possible stages, compose them, simulate the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensoropt.errors import PlanError
from tensoropt.ops.layouts import Layout
from tensoropt.pipeline.compose import Composition, Offer, compose
from tensoropt.pipeline.evaluate import TOO_LARGE, PipelineEvaluation, assemble, fits
from tensoropt.pipeline.stage_frontiers import (
    CROSSINGS,
    CrossingWays,
    Ends,
    PlaceFrontiers,
    Range,
    StageFrontiers,
    StageOffer,
)
from tensoropt.pipeline.strategy import (
    PipelinedStrategy,
    check_apart,
    in_flight_of,
    place_actions,
    schedule_named,
    stage_place,
)

Cut = tuple[int, CrossingWays | None]
"""The position of a cut among the operator groups, and how the tensors that cross it are split."""
_Offers = Sequence[Mapping[tuple[Cut, Cut], StageOffer]]
Composing = Callable[[Sequence[Mapping[tuple[Cut, Cut], Offer]], int], Iterator[Composition[Cut]]]
"""A function that composes stages, as :func:`~tensoropt.pipeline.compose.compose` does."""


@dataclass(frozen=True)
class Crossings:
    """The layouts that a search tries for the tensors that cross a cut between two stages.

    Attributes:
        ways: the splits to try on the last axis of a stage's mesh, by their names in ``CROSSINGS``.
        outer: the splits to try on all other axes.
        everywhere_alike: whether all cuts have the same layout, which takes fewer searches.
        of_axes: the splits to try on each axis. If given, ``ways`` and ``outer`` are ignored.
    """

    ways: Sequence[str] = CROSSINGS
    outer: Sequence[str] = CROSSINGS
    everywhere_alike: bool = False
    of_axes: tuple[Sequence[str], ...] | None = None

    def placements(self, axes: int) -> list[CrossingWays]:
        """Return all layouts of a crossing tensor on a mesh of ``axes`` axes, as one split per axis."""
        if self.of_axes is not None:
            assert len(self.of_axes) == axes, f"ways of {len(self.of_axes)} axes for {axes}"
            return list(itertools.product(*self.of_axes))
        return list(itertools.product(*[self.outer] * (axes - 1), *[self.ways] * min(axes, 1)))

    def ends(self, axes: int, *, first: bool, last: bool) -> list[Ends]:
        """Return the pairs of layouts to try for entering and leaving tensors; None at the model's ends."""
        ways: Sequence[CrossingWays | None] = self.placements(axes)
        if self.everywhere_alike and not (first or last):
            return [(way, way) for way in ways]
        return list(itertools.product([None] if first else ways, [None] if last else ways))


class Composer:
    """Finds pipelines for one mesh, number of micro-batches and schedule.

    Args:
        frontiers: the frontiers of possible stages on that mesh.
        composing: the function that chooses cuts and stage strategies, by default ``compose``.
        notes: the notes on pipelines that were left out, to which the search adds its own.
        per_place: the number of stages per device group; by default two if the schedule allows it, else one.
        refused: is called with the error if stages cannot run in the schedule; by default, adds a note.

    Raises:
        PlanError: the schedule does not fit the mesh and the micro-batches.
    """

    def __init__(
        self,
        frontiers: PlaceFrontiers,
        schedule: str,
        crossings: Crossings,
        composing: Composing = compose,
        notes: dict[str, None] | None = None,
        per_place: int | None = None,
        refused: Callable[[PlanError], None] | None = None,
    ):
        self.frontiers, self.schedule, self.crossings = frontiers, schedule, crossings
        self.composing, self.notes = composing, {} if notes is None else notes
        self.refused = refused or self._note_refusal
        self.mesh, self.micro_batches = frontiers.prices.mesh, frontiers.search.micro_batches
        self.places = self.mesh.shape[0]
        self.per_place = per_place or (2 if schedule_named(schedule).several else 1)
        self.stages = self.places * self.per_place
        actions = place_actions(schedule, self.places, self.per_place, self.micro_batches)
        self.in_flight = [in_flight_of(actions, stage) for stage in range(self.stages)]
        self.place_of = [stage_place(schedule, self.places, stage) for stage in range(self.stages)]

    def pipelines(self, positions: Sequence[Sequence[int]]) -> Iterator[PipelineEvaluation]:
        """Yield composed pipelines with their simulated figures.

        Args:
            positions: for each stage, the operator groups with which it may begin, by index; as a further
                last item, a list with the number of operator groups.
        """
        self.prepare(positions)
        yield from self.composed(positions)

    def prepare(self, positions: Sequence[Sequence[int]]) -> None:
        """Read from stores, or measure on ranks, the costs that :meth:`composed` needs."""
        ranges: dict[StageFrontiers, dict[Range, None]] = {}
        for place, of_stage in zip(self.place_of, self._wanted(positions), strict=True):
            ranges.setdefault(self.frontiers.at(place), {}).update(dict.fromkeys(of_stage))
        for frontiers, of_kind in ranges.items():
            frontiers.prepare(of_kind)

    def composed(self, positions: Sequence[Sequence[int]]) -> Iterator[PipelineEvaluation]:
        """Yield composed pipelines with simulated figures, after :meth:`prepare` with the same positions."""
        offers = self._offers(self._wanted(positions))
        for alike in self._grouped_by_storage(offers):
            for composition in self.composing(alike, self.micro_batches):
                if not composition.exact:
                    self.notes[
                        "pipelines: some combinations of stages were left out, as there are too many"
                    ] = None
                if pipeline := self._evaluated(alike, composition):
                    yield pipeline

    def _wanted(self, positions: Sequence[Sequence[int]]) -> list[dict[Range, list[Ends]]]:
        axes, has_parameters = len(self.mesh.shape) - 1, self.frontiers.search.cutter.has_parameters
        ends_of_stages = []
        for stage in range(self.stages):
            ends = self.crossings.ends(axes, first=stage == 0, last=stage == self.stages - 1)
            ranges = itertools.product(positions[stage], positions[stage + 1])
            fit = [(a, b) for a, b in ranges if a < b and has_parameters(a, b) and self._can_run(stage, a, b)]
            ends_of_stages.append(dict.fromkeys(fit, ends))
        return ends_of_stages

    def _can_run(self, stage: int, start: int, stop: int) -> bool:
        if not schedule_named(self.schedule).apart:
            return True
        try:
            search = self.frontiers.search
            check_apart(self.schedule, stage, search.cutter.stage(start, stop, search.duplicated))
        except PlanError as refusal:
            self.refused(refusal)
            return False
        return True

    def _note_refusal(self, refusal: PlanError) -> None:
        self.notes[f"some pipelines were left out: {refusal}"] = None

    def _offers(self, ends_of_stages: Sequence[Mapping[Range, Sequence[Ends]]]) -> _Offers:
        # Device groups of one kind share their frontiers, so everything that they need is searched at once.
        searches: dict[StageFrontiers, dict[Range, dict[Ends, set[int]]]] = {}
        for place, flights, of_stage in zip(self.place_of, self.in_flight, ends_of_stages, strict=True):
            of_kind = searches.setdefault(self.frontiers.at(place), {})
            for where, ends in of_stage.items():
                for end in ends:
                    of_kind.setdefault(where, {}).setdefault(end, set()).add(flights)
        for frontiers, of_kind in searches.items():
            frontiers.find(of_kind)
        blocking = self.frontiers.prices.cluster.device_type == "cpu"
        place_of = self.place_of
        offers: list[dict[tuple[Cut, Cut], StageOffer]] = []
        for stage, of_stage in enumerate(ends_of_stages):
            before, behind = (place_of[n] if 0 <= n < self.stages else None for n in (stage - 1, stage + 1))
            place, flights = place_of[stage], self.in_flight[stage]
            frontiers, room = self.frontiers.at(place), self.frontiers.prices.room(place)
            stand = (before, place, behind), self.per_place
            own: dict[tuple[Cut, Cut], StageOffer] = {}
            for (start, stop), ends in of_stage.items():
                for end in ends:
                    offer = frontiers.offer((start, stop), end, flights, *stand, blocking=blocking)
                    if offer is not None and (offer := _within(offer, room)) is not None:
                        own[(start, end[0]), (stop, end[1])] = offer
            offers.append(own)
        return offers

    def _grouped_by_storage(self, offers: _Offers) -> Iterator[_Offers]:
        shared = self.frontiers.search.cutter.graph.shared
        stored = [
            {
                ends: self.frontiers.at(place).stored((ends[0][0], ends[1][0]), offer.rows, shared)
                for ends, offer in of_stage.items()
            }
            for place, of_stage in zip(self.place_of, offers, strict=True)
        ]
        for way in _ways_to_store([[own for rows in of.values() for own in rows] for of in stored]):
            left = []
            for of_stage, layouts in zip(offers, stored, strict=True):
                alike: dict[tuple[Cut, Cut], StageOffer] = {}
                for ends, offer in of_stage.items():
                    rows = [i for i, own in enumerate(layouts[ends]) if _agree(own, way)]
                    if rows:
                        alike[ends] = offer.part(rows)
                left.append(alike)
            yield left

    def _evaluated(self, offers: _Offers, composition: Composition[Cut]) -> PipelineEvaluation | None:
        search, chosen = self.frontiers.search, []
        for place, of_stage, (ends, row) in zip(self.place_of, offers, composition.stages, strict=True):
            (start, _), (stop, _) = ends
            chosen.append((self.frontiers.at(place), (start, stop), int(of_stage[ends].rows[row])))
        try:
            strategy = PipelinedStrategy(
                search.cutter.graph,
                tuple(start for _, (start, _), _ in chosen[1:]),
                search.duplicated,
                tuple(own.strategy(where, row) for own, where, row in chosen),
                self.schedule,
                self.places,
                search.cutter,
            )
        except PlanError as refusal:
            self.refused(refusal)
            return None
        alone = [own.evaluation(where, row) for own, where, row in chosen]
        evaluation = assemble(strategy, alone, self.frontiers.prices)
        if not fits(evaluation, self.frontiers.prices):
            self.notes[TOO_LARGE] = None
            return None
        return evaluation


def _within(offer: StageOffer, room: float) -> StageOffer | None:
    rows = np.nonzero(offer.memory <= room)[0].tolist()
    return offer.part(rows) if rows else None


def _agree(stored: Mapping[str, Layout], way: Mapping[str, Layout]) -> bool:
    return all(stored.get(name, layout) == layout for name, layout in way.items())


def _ways_to_store(of_stages: Sequence[Sequence[Mapping[str, Layout]]]) -> list[dict[str, Layout]]:
    """Return all choices of one common layout for each parameter that several stages use.

    Args:
        of_stages: for each stage and strategy, the layout of each parameter that stages share.
    """
    ways: list[dict[str, Layout]] = [{}]
    for name in dict.fromkeys(n for rows in of_stages for of in rows for n in of):
        users = [{of[name] for of in rows if name in of} for rows in of_stages]
        users = [layouts for layouts in users if layouts]
        if len(users) > 1:
            common = sorted(set.intersection(*users))
            ways = [{**way, name: layout} for way in ways for layout in common]
    return ways
