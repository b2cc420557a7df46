"""Find the memory-time frontier of each possible pipeline stage, with one search for isomorphic stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.builder import TableBuilder
from tensoropt.costs.cost_graph import NO_OPTION, EdgeTable, VariableTable
from tensoropt.costs.edges import TableArrays
from tensoropt.costs.restrictions import Restriction
from tensoropt.costs.source import CostSource
from tensoropt.costs.tables import CostTables, Template, outline_templates, with_facts
from tensoropt.costs.variables import Variable, variables
from tensoropt.evaluation.evaluate import Evaluation, Evaluator
from tensoropt.evaluation.problem import Problem, offered_regions
from tensoropt.frontier import representatives
from tensoropt.ops.layouts import Layout
from tensoropt.pipeline.compose import Offer
from tensoropt.pipeline.costs import PipelinePrices, sources_at
from tensoropt.pipeline.stages import Cutter, Stage, arriving_group, departing_group
from tensoropt.pipeline.timing import message_bytes
from tensoropt.question.settings import Settings
from tensoropt.search import NoStrategyError, Staircase, outline_frontier, track_frontier
from tensoropt.sharding.groups import AxisStrategy, GroupGraph
from tensoropt.sharding.regions import find_regions
from tensoropt.sharding.strategy import Strategy

CrossingWays = tuple[str, ...]
"""How a tensor that crosses a cut is split: one of :data:`CROSSINGS` for each axis of a stage's mesh."""
CROSSINGS = ("batch", "second", "whole")
"""How a mesh axis splits a tensor at a cut: along the batch, along the next dim (the sequence), or not."""
Range = tuple[int, int]
"""The index of a stage's first operator group, and the index after its last."""
Ends = tuple[CrossingWays | None, CrossingWays | None]
"""How the tensors that enter, and those that leave, a stage are split; None at an end of the model."""

_LOSS = 3e-3
"""The share of a frontier's hypervolume that may be lost by simulating few of its strategies; assumed."""


@dataclass(frozen=True)
class Thoroughness:
    """How thoroughly stages are searched.

    Attributes:
        gap: the permitted relative error of a frontier; None for a first look at it
            (:func:`.outline_frontier`).
        candidates: the number of strategies simulated per frontier. More are simulated if these would lose
            over 0.3 % of its hypervolume.
        in_flight: whether to search for every number of micro-batches in flight, not only powers of two.
    """

    gap: float | None
    candidates: int
    in_flight: bool

    def flights(self, in_flight: Iterable[int]) -> tuple[int, ...]:
        """Round numbers of micro-batches in flight up to powers of two, unless every number is searched."""
        counts = set(in_flight)
        return tuple(sorted(counts if self.in_flight else {1 << (k - 1).bit_length() for k in counts}))


@dataclass(frozen=True)
class _StageFrontier:
    """The simulated strategies of isomorphic stages.

    Attributes:
        tables: the cost tables of the first of these stages.
        evaluations: the simulated strategies, in batches.
        ends: for each strategy, the layouts of the tensors that enter and that leave the stage.
        sent: layouts as in ``ends`` -> bytes per micro-batch sent to the next and to the previous stage.
    """

    tables: CostTables
    evaluations: tuple[Evaluation, ...]
    ends: tuple[Ends, ...]
    sent: Mapping[Ends, tuple[float, float]]
    _alone: dict[int, Evaluation] = field(default_factory=dict, repr=False)

    def memory(self, in_flight: int) -> np.ndarray:
        """Return a rank's peak memory (n,) in bytes with ``in_flight`` micro-batches in flight."""
        parts = (evaluation.metrics.parts for evaluation in self.evaluations)
        return np.concatenate(
            [
                part.lasting_bytes
                + np.maximum((in_flight - 1) * part.between_bytes + part.within_bytes, part.end_bytes)
                for part in parts
            ]
        )

    def seconds(self, slower: float) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) seconds of a middle micro-batch, and by how much the last one with the end exceeds it.

        Args:
            slower: the share by which communication slows down computation.
        """
        parts = [evaluation.metrics.parts for evaluation in self.evaluations]
        _, between_s, last_s = np.concatenate([part.forward_s + part.backward_s for part in parts]).T
        # Gradients are reduce-scattered while other micro-batches are computed.
        hidden_s = np.concatenate([part.scattering_s[:, 1] for part in parts]) / (1.0 + slower)
        between_s = between_s - hidden_s
        return between_s, np.concatenate([part.end_s for part in parts]) + last_s - between_s

    def alone(self, row: int) -> Evaluation:
        if row not in self._alone:
            self._alone[row] = only(*self.at(row))
        return self._alone[row]

    def at(self, row: int) -> tuple[Evaluation, int]:
        for evaluation in self.evaluations:
            if row < evaluation.batch.count:
                return evaluation, row
            row -= evaluation.batch.count
        raise IndexError("no strategy of this frontier has that number")


@dataclass(frozen=True)
class StageOffer(Offer):
    """The strategies that one stage can have. ``rows``: (n,) their indices in the stage's frontier."""

    rows: np.ndarray

    def part(self, chosen: Sequence[int]) -> StageOffer:
        return StageOffer(**{name: column[list(chosen)] for name, column in vars(self).items()})


@dataclass(frozen=True)
class StageSearch:
    """The input of a search for the stages of a model's pipelines on one mesh.

    Attributes:
        duplicated: the activations that stages recompute instead of receiving them.
        mesh: the job's mesh, whose first axis is the pipeline.
        restriction: the configurations allowed on a stage's mesh, for the whole model.
        restricted: a function that restricts a stage's cost tables; None to permit everything.
    """

    problem: Problem
    settings: Settings
    cutter: Cutter
    duplicated: frozenset[str]
    mesh: Mesh
    micro_batches: int
    restriction: Restriction
    thoroughness: Thoroughness
    restricted: Callable[[CostTables], CostTables] | None = None


class StageFrontiers:
    """The frontiers of a model's possible stages on device groups of one kind."""

    def __init__(self, search: StageSearch, costs: CostSource):
        self.search, self.costs = search, costs
        self.prices = PipelinePrices.of(costs, search.mesh)
        self.sizes = (search.micro_batches, *search.mesh.shape[1:])
        # By hash of isomorphic stages (look): the first of them with its templates; their frontier.
        self.first: dict[str, tuple[Stage, Mapping[str, AxisStrategy], Mapping[str, Template]]] = {}
        self.frontier: dict[str, _StageFrontier | None] = {}
        self.look: dict[Range, str] = {}
        self._strategies: dict[tuple[Range, int], Strategy] = {}
        self.arrays = (TableArrays(in_memory=True), TableArrays(in_memory=True))

    def prepare(self, ranges: Iterable[Range]) -> None:
        """Read the costs of stages from the profile store or measure them, as :meth:`find` does neither."""
        works = {
            work.key: work
            for look in {self._known_look(*where) for where in ranges}
            for template in self.first[look][2].values()
            for work in template.works
        }
        self.costs.facts.find(works.values())
        for work in works.values():
            self.costs.facts.of(work)  # read from the store
        self.costs.timings.measure(works)

    def find(self, requests: Mapping[Range, Mapping[Ends, Iterable[int]]]) -> None:
        """Search prepared stages. ``requests``: stage -> layouts at both ends -> micro-batches in flight."""
        searches: dict[str, dict[Ends, set[int]]] = {}
        for where, of_range in requests.items():
            for ends, flights in of_range.items():
                searches.setdefault(self.look[where], {}).setdefault(ends, set()).update(flights)
        for look, of_look in searches.items():
            self.frontier[look] = self._search(look, of_look)

    def offer(
        self,
        where: Range,
        ends: Ends,
        in_flight: int,
        places: tuple[int | None, int, int | None],
        per_place: int,
        *,
        blocking: bool,
    ) -> StageOffer | None:
        """Return the strategies of a stage with their costs in a pipeline; None if there are none.

        Args:
            ends: the layouts of the tensors that enter and that leave the stage.
            places: the device groups of the previous, this and the next stage.
            per_place: the number of stages per device group.
            blocking: whether messages block computation.
        """
        frontier = self.frontier[self.look[where]]
        if frontier is None:
            return None
        rows = np.array(
            [index for index, ends_of_row in enumerate(frontier.ends) if ends_of_row == ends], dtype=np.int64
        )
        if not len(rows):
            return None
        each_s, end_s = frontier.seconds(self.prices.overlap.slower)
        before, place, behind = places
        messages_s = sum(
            self.prices.message_s(place, to, size)
            for to, size in zip((behind, before), frontier.sent[ends], strict=True)
            if to is not None
        )
        waiting_s = messages_s if blocking else 0.0
        # Stages on the same devices take turns and share memory; all are assumed to be equally large.
        return StageOffer(
            frontier.memory(in_flight)[rows] * per_place,
            each_s[rows] + messages_s,
            (each_s[rows] + waiting_s) * per_place,
            end_s[rows],
            rows,
        )

    def stage(self, where: Range) -> Stage:
        return self.search.cutter.stage(*where, self.search.duplicated)

    def strategy(self, where: Range, row: int) -> Strategy:
        """Return one row of a stage's frontier as a strategy of that stage."""
        if (where, row) in self._strategies:
            return self._strategies[where, row]
        frontier = self.frontier[self.look[where]]
        assert frontier is not None
        part = self.stage(where)
        pairs = zip(_variables(frontier.tables.graph), _variables(part.graph), strict=True)
        names: dict[str, Variable] = dict(pairs)
        tables = _under_names(frontier.tables, part, names, self.search.problem.micro)
        evaluation, row_there = frontier.at(row)
        choice: dict[str, int] = {names[n]: int(of[row_there]) for n, of in evaluation.choices.items()}
        options: dict[object, int] = {names[n]: int(of[row_there]) for n, of in evaluation.options.items()}
        self._strategies[where, row] = tables.strategy(choice, options)
        return self._strategies[where, row]

    def stored(self, where: Range, rows: Iterable[int], names: Iterable[str]) -> list[dict[str, Layout]]:
        """Return, by frontier row, the stored layout of each parameter in ``names`` that the stage uses."""
        used = {n for group in self.stage(where).graph.groups for n in (*group.parameters, *group.shared)}
        used_names = [name for name in names if name in used]
        if not used_names:
            return [{} for _ in rows]
        strategies = (self.strategy(where, int(row)) for row in rows)
        return [{name: strategy.stored[name] for name in used_names} for strategy in strategies]

    def evaluation(self, where: Range, row: int) -> Evaluation:
        """Return the simulated figures of one frontier row; isomorphic stages get the same object."""
        frontier = self.frontier[self.look[where]]
        assert frontier is not None
        return frontier.alone(row)

    # -- searching ----------------------------------------------------------------------------------

    def _known_look(self, start: int, stop: int) -> str:
        where = start, stop
        if where not in self.look:
            part, search = self.stage(where), self.search
            micro, keys = search.cutter.keyed(start, stop, search.duplicated, search.problem.micro)
            self.look[where] = look = _look(part, keys, search.restriction)
            if look not in self.first:
                limit = _restriction_of_stage(search.restriction, part)
                templates = outline_templates(part.graph, self.sizes, micro, limit, keys)
                self.first[look] = part, micro, templates
        return self.look[where]

    def _search(self, look: str, requests: Mapping[Ends, Iterable[int]]) -> _StageFrontier | None:
        part, micro, outlined = self.first[look]
        templates = with_facts(outlined, self.costs.facts.of)
        offered = {region.name for region in offered_regions(self.search.problem, self.search.settings)}
        regions = [region for region in find_regions(part.graph) if region.name in offered]
        # Saved tensors count once per micro-batch in flight, so tables for one and two give any number's.
        one, two = (
            TableBuilder(
                part.graph,
                micro,
                templates,
                self.prices.of_stage(part.graph, self.sizes, in_flight),
                regions,
                _restriction_of_stage(self.search.restriction, part),
                arrays,
            ).build()
            for in_flight, arrays in zip((1, 2), self.arrays, strict=True)
        )
        chosen: list[tuple[Mapping[str, int], Mapping[object, int]]] = []
        ends_of: list[Ends] = []
        for ends, flights in requests.items():
            allowed = self._crossing_configurations(part, micro, one, ends)
            seen: set[object] = set()
            for in_flight in self.search.thoroughness.flights(flights):
                for choice, options in self._tracked(_with_in_flight(one, two, in_flight), allowed):
                    key = tuple(choice.values()), tuple(options.values())
                    if key not in seen:
                        seen.add(key)
                        chosen.append((choice, options))
                        ends_of.append(ends)
        if not chosen:
            return None
        evaluations = tuple(Evaluator(one, self.prices.overlap)(chosen))
        sent: dict[Ends, tuple[float, float]] = {}
        for ends in dict.fromkeys(ends_of):
            strategy = one.strategy(*chosen[ends_of.index(ends)])
            on = message_bytes(strategy, part.departing, departing_group)
            back = message_bytes(strategy, part.arriving, arriving_group, learning=True)
            sent[ends] = float(on), float(back)
        return _StageFrontier(one, evaluations, tuple(ends_of), sent)

    def _tracked(
        self, tables: CostTables, allowed: Mapping[str, int]
    ) -> list[tuple[Mapping[str, int], Mapping[object, int]]]:
        graph = tables.restricted(lambda v, i: None if allowed.get(v.key, i) == i else NO_OPTION)
        if self.search.restricted is not None:
            graph = self.search.restricted(graph)
        try:
            gap = self.search.thoroughness.gap
            frontier = outline_frontier(graph) if gap is None else track_frontier(graph, epsilon=gap)
        except NoStrategyError:
            return []
        points = Staircase(frontier.memory, frontier.time)
        chosen = frontier.strategies(representatives(points, self.search.thoroughness.candidates, _LOSS))
        return [(chosen.strategy(i), chosen.options_of(i)) for i in range(len(chosen))]

    def _crossing_configurations(
        self, part: Stage, micro: Mapping[str, AxisStrategy], tables: CostTables, ends: Ends
    ) -> dict[str, int]:
        configurations = {}
        before, behind = ends
        for names, group_named, placement in (
            (part.arriving, arriving_group, before),
            (part.departing, departing_group, behind),
        ):
            for name in names:
                assert placement is not None, "a tensor crosses an end of the model"
                group = part.graph.group_of[group_named(name)]
                choices = tables.templates[group.name].choices
                labels = [tables.labels(group.name, index) for index in range(len(choices))]
                batch = micro[group.name].label
                label_of = {"batch": str(batch) if batch.splits else "none", "second": "d1", "whole": "none"}
                axis_labels = tuple(label_of[way] for way in placement)
                if axis_labels not in labels:
                    axis_labels = tuple("none" if way == "d1" else way for way in axis_labels)
                if axis_labels not in labels:
                    axis_labels = ("none",) * len(placement)
                configurations[group.name] = labels.index(axis_labels)
        return configurations


def _variables(graph: GroupGraph) -> list[Variable]:
    moves = [Variable.of_move(name) for group in graph.groups for name in group.writes]
    return [*variables([group.name for group in graph.groups], graph.hubs, graph.shared), *moves]


def _under_names(
    tables: CostTables, part: Stage, names: Mapping[str, Variable], micro: Mapping[str, AxisStrategy]
) -> CostTables:
    group_of = {region.groups[0]: region for region in find_regions(part.graph)}
    return replace(
        tables,
        graph=part.graph,
        variables=[replace(v, key=names[v.key]) for v in tables.variables],
        edges=[],
        templates={names[Variable.of_group(n)]: template for n, template in tables.templates.items()},
        micro=part.micro(micro),
        regions=tuple(group_of[names[Variable.of_group(r.groups[0])]] for r in tables.regions),
        moves={
            names[Variable.of_move(n)].name: (names[a], names[b], nth)
            for n, (a, b, nth) in tables.moves.items()
        },
    )


def only(evaluation: Evaluation, row: int) -> Evaluation:
    """Return an evaluation that contains only strategy ``row``."""
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


def _look(part: Stage, keys: Mapping[str, str], restriction: Restriction) -> str:
    numbers: dict[str, int] = {}
    position = {group.name: number for number, group in enumerate(part.graph.groups)}
    key_parts: list[object] = []
    for group in part.graph.groups:
        names = [n for op in group.operators for n in (*op.inputs(), *op.outputs)]
        wires = [numbers.setdefault(name, len(numbers)) for name in names]
        key_parts.append((keys[group.name], wires, restriction.about(group)))
    key_parts.append([numbers[name] for name in (*part.graph.hubs, *part.graph.shared)])
    key_parts.append([numbers[name] for name in part.graph.atoms.graph.outputs if name in numbers])
    key_parts.append([[position[name] for name in region.groups] for region in find_regions(part.graph)])
    key_parts.append(
        [[position[name] for name in names if name in position] for names in restriction.together]
    )
    return hashlib.sha256(repr(key_parts).encode()).hexdigest()


def _restriction_of_stage(restriction: Restriction, part: Stage) -> Restriction:
    names = {group.name for group in part.graph.groups}
    colocated = (tuple(name for name in group_names if name in names) for group_names in restriction.together)
    return replace(
        restriction,
        kept={name: kept for name, kept in restriction.kept.items() if name in names},
        together=tuple(group_names for group_names in colocated if len(group_names) > 1),
        combined={name: left for name, left in restriction.combined.items() if name in names},
    )


def _with_in_flight(one: CostTables, two: CostTables, in_flight: int) -> CostTables:
    """Return the cost tables for ``in_flight`` micro-batches, given those for one and two."""
    if in_flight == 1:
        return one
    extended: dict[int, tuple[np.ndarray, ...]] = {}

    def memory(variable: VariableTable, with_two: VariableTable) -> tuple[np.ndarray, ...]:
        # Isomorphic groups still share their arrays.
        if id(variable.memory) not in extended:
            columns = zip(variable.memory, with_two.memory, strict=True)
            extended[id(variable.memory)] = tuple(_extended(x, y, in_flight) for x, y in columns)
        return extended[id(variable.memory)]

    def table(edge: EdgeTable, with_two: EdgeTable) -> np.ndarray:
        if id(edge.table) not in extended:
            extended[id(edge.table)] = (_extended(edge.table, with_two.table, in_flight),)
        return extended[id(edge.table)][0]

    return replace(
        one,
        variables=[
            replace(a, memory=memory(a, b)) for a, b in zip(one.variables, two.variables, strict=True)
        ],
        edges=[replace(a, table=table(a, b)) for a, b in zip(one.edges, two.edges, strict=True)],
    )


def _extended(one: np.ndarray, two: np.ndarray, in_flight: int) -> np.ndarray:
    each = np.subtract(two, one, out=np.zeros_like(one), where=np.isfinite(one))
    return one + (in_flight - 1) * each


class PlaceFrontiers:
    """The stage frontiers of each device group (place) of a pipeline; groups of equal devices share them.

    Args:
        costs: the costs of all kinds of devices.

    Attributes:
        search: the input of the search, which all device groups share.
        prices: the cost model of the whole job.
    """

    def __init__(self, search: StageSearch, costs: CostSource):
        sources = sources_at(costs, search.mesh.shape[0])
        frontiers_of = {id(s): StageFrontiers(search, s) for s in {id(s): s for s in sources}.values()}
        self._places = [frontiers_of[id(source)] for source in sources]
        self.search = search
        uniform = sources[0] is costs
        self.prices = self._places[0].prices if uniform else PipelinePrices.of(costs, search.mesh)

    def at(self, place: int) -> StageFrontiers:
        return self._places[place]
