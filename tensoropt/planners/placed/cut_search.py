"""Cut search: split the batch of some operators over the devices, and place the others whole.

If every operator is cut over all devices, that is data parallelism, except that each parameter is on one
device. If none is cut, that is a placement. Between the two are plans with parallel branches on parts of the
devices, as in FlexFlow (Jia et al., MLSys 2019) and Unity (Unger et al., OSDI 2022).

The search starts from plans in which everything that can be cut is cut, into each number of pieces that
divides the number of devices, and from one in which nothing is cut. :mod:`.local_search` places operators and
pieces. Then the model's order is divided into segments with few bytes between them. In the fastest plan so
far, each segment in turn is changed from cut to whole, or back. A change that makes the step shorter is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement
from tensoropt.placement.flat import FlatProblem, step_s
from tensoropt.placement.graph import Splits
from tensoropt.placement.prices import PricedGraph
from tensoropt.plan.point import reduce_points
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.annealing import State
from tensoropt.planners.placed.common.starting import scheduled
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.placed.local_search import LocalSearch, simulated_places

_NAME = "cut_search"
_SEGMENTS = 12
"""The most segments of the model's order."""
_SEGMENTS_PER_SECOND = 2.0
"""The number of segments per second of effort, as every changed segment places the model anew."""
_STARTS = 0.5
"""The share of the effort for plans in which everything is cut, or nothing."""
_MUCH_SLOWER = 1.25
"""A changed segment is dropped if the step is longer by this factor before operators move. All four numbers
are assumptions."""


@dataclass(frozen=True, kw_only=True)
class CutSearch:
    """The settings of the planner.

    Attributes:
        seconds: the effort in seconds on the machine where :mod:`.local_search` was timed. It is spent on the
            starts, and on changing each segment once from the best start of either kind. As long as this
            makes the step shorter, all segments are tried again, beyond this effort.
    """

    seconds: float = 40.0


DEFAULTS = CutSearch()


@dataclass(frozen=True)
class _Found:
    graph: PricedGraph
    cuts: Splits
    simulated: SimulatedPlacement

    @property
    def time_s(self) -> float:
        return self.simulated.time_s


class _Search:
    def __init__(self, whole: PricedGraph, limit: float | None, seed: int, settings: CutSearch):
        self.whole, self.limit, self.seed, self.settings = whole, limit, seed, settings
        count = whole.problem.devices.count
        cuts = {number: whole.batch_cuts(number) for number in range(count, 1, -1)}
        # If no divisor of the device count divides the batch, as few devices as possible are left out.
        numbers = [n for n in cuts if count % n == 0 and cuts[n]] or [n for n in cuts if cuts[n]][:1]
        self.everywhere: list[Splits] = [cuts[number] for number in numbers]
        self.segments = segments(whole, int(np.clip(_SEGMENTS_PER_SECOND * settings.seconds, 1, _SEGMENTS)))
        self.found: list[_Found] = []
        self.tried: list[Splits] = []
        self.refusal: InfeasibleError | None = None

    def run(self) -> None:
        starts: tuple[list[Splits], ...] = (self.everywhere, [{}])
        for cuts_of_start in starts:
            share = _STARTS / sum(map(len, starts))
            placed = [found for cuts in cuts_of_start if (found := self._try(cuts, None, share)) is not None]
            if placed:
                self._descend(min(placed, key=lambda found: found.time_s))

    def _descend(self, best: _Found) -> None:
        cuts_of = best.cuts or self.everywhere[0]
        share, before = (1 - _STARTS) / (2 * len(self.segments)), None
        while best is not before:
            before = best
            for segment in self.segments:
                own = {name: cuts_of[name] for name in segment if name in cuts_of}
                rest = {name: cut for name, cut in best.cuts.items() if name not in own}
                cuts = rest if len(rest) < len(best.cuts) else {**best.cuts, **own}
                if cuts not in self.tried:
                    tried = self._try(cuts, best, share)
                    best = tried if tried is not None and tried.time_s < best.time_s else best

    def _try(self, cuts: Splits, before: _Found | None, share: float) -> _Found | None:
        """Return the fastest placement found for the graph with these cuts, for a ``share`` of the effort.

        It starts from the devices of the plan ``before``. The result is None if the start takes over 1.25
        times as long as ``before``, or if nothing fits.
        """
        self.tried.append(cuts)
        graph = self.whole.split(cuts)
        problem = graph.problem
        known: list[Placement] = []
        if before is not None:
            known = list(_carried(before.simulated, problem, self.seed))
            flat = FlatProblem.of(problem)
            begun = min((step_s(flat, placement) for placement in known), default=0.0)
            if begun > _MUCH_SLOWER * before.time_s:
                return None
        effort = LocalSearch(seconds=share * self.settings.seconds)
        try:
            placed, _ = simulated_places(_NAME, problem, self.limit, self.seed, effort, known)
        except InfeasibleError as refusal:
            self.refusal = self.refusal or refusal
            return None
        self.found += [_Found(graph, cuts, simulated) for simulated in placed]
        return self.found[-1]


def _carried(before: SimulatedPlacement, problem: PlacementProblem, seed: int) -> Iterator[Placement]:
    """Yield placements that keep another plan's devices and order for the operators that both plans have."""
    lies = dict(zip(before.problem.names, before.placement.device, strict=True))
    pins = tuple((o, (lies[name],)) for o, name in enumerate(problem.names) if name in lies)
    state = State.of(before)
    names = [[before.problem.names[o] for o in line.tolist()] for line in (state.ahead, state.back)]
    ahead, back = (_in_turn(problem, line, backward=i == 1) for i, line in enumerate(names))
    for placement in scheduled(replace(problem, pinned=(*problem.pinned, *pins)), seed):
        yield Placement.in_order(placement.device, problem.devices.count, ahead, back)


def _in_turn(problem: PlacementProblem, line: Sequence[str], *, backward: bool) -> list[int]:
    """Return the operators in an order that respects dependences and is close to ``line`` (operator names).
    Operators that are not in ``line`` come as early as possible.
    """
    turn = {name: number for number, name in enumerate(line)}
    reads = nx.DiGraph()
    reads.add_nodes_from(range(problem.size))
    reads.add_edges_from((t.producer, r) for t in problem.tensors for r in t.readers)
    order = reads.reverse() if backward else reads
    turns = [0.0] * problem.size
    # Operators come in the model's order, so that all before one have their turns already.
    for operator in reversed(range(problem.size)) if backward else range(problem.size):
        latest = max((turns[o] for o in order.predecessors(operator)), default=0.0)
        turns[operator] = max(latest, turn.get(problem.names[operator], latest))
    return list(nx.lexicographical_topological_sort(order, key=lambda o: (turns[o], o)))


def segments(whole: PricedGraph, most: int) -> list[tuple[str, ...]]:
    """Divide the model's operators, in order, into at most ``most`` segments of similar weight, with borders
    that few bytes cross. With no more than ``most`` operators, each is a segment.

    An operator's weight is its computing time plus the time to send its parameters between devices.
    """
    problem = whole.problem
    names = [whole.whole_of(o) for o in range(problem.size)]
    if len(alone := dict.fromkeys(name for name in names if name is not None)) <= most:
        return [(name,) for name in alone]
    crossing = np.zeros(problem.size + 1)
    for tensor in problem.tensors:
        last = max(tensor.readers, default=tensor.producer)
        crossing[tensor.producer + 1 : last + 1] += tensor.bytes
    sending = problem.parameter_bytes * problem.devices.seconds_per_byte.max()
    weight = (problem.forward_s + problem.backward_s).min(axis=1) + sending
    share = np.concatenate([[0.0], np.cumsum(weight)[:-1]]) / max(weight.sum(), 1e-30)
    borders = [0]
    for number in range(1, most):
        near = np.flatnonzero(
            (np.abs(share - number / most) <= 0.5 / most) & (np.arange(len(share)) > borders[-1])
        )
        if len(near):
            borders.append(int(near[np.argmin(crossing[near])]))
    parts = (names[a:b] for a, b in zip(borders, [*borders[1:], problem.size], strict=True))
    return [part for each in parts if (part := tuple(dict.fromkeys(n for n in each if n is not None)))]


def placements(
    whole: PricedGraph, memory_limit_bytes: float | None, seed: int, settings: CutSearch = DEFAULTS
) -> list[tuple[PricedGraph, PlacedAnswer]]:
    """Return the non-dominated placements found that fit the memory, each with its graph of cut operators.

    Raises:
        UnsuitableError: no operator can be cut along the batch.
        InfeasibleError: no placement found fits.
    """
    search = _Search(whole, memory_limit_bytes, seed, settings)
    if not search.everywhere:
        count = whole.problem.devices.count
        raise UnsuitableError(
            f"{_NAME} cuts the batch, and no operator's batch can be cut into 2 to {count} equal pieces; use "
            "local_search, or another batch"
        )
    search.run()
    if not search.found:
        assert search.refusal is not None
        raise search.refusal
    kept = reduce_points(search.found, lambda f: (f.simulated.memory_bytes, f.time_s))
    return [(f.graph, PlacedAnswer(f.simulated.placement, _notes(search, f))) for f in kept]


def _notes(search: _Search, found: _Found) -> tuple[str, ...]:
    if not found.cuts:
        return ("no operator is cut into pieces",)
    pieces = sorted({count for _, count in found.cuts.values()})
    groups = len({name for segment in search.segments for name in segment})
    return (f"the batch of {len(found.cuts)} of {groups} groups is cut in {', '.join(map(str, pieces))}",)
