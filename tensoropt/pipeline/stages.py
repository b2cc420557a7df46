"""Cut a model into pipeline stages where little data crosses, and build the operator graph of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from tensoropt.costs.source import CostSource
from tensoropt.costs.tables import group_keys
from tensoropt.errors import PlanError
from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.index_space import AtomGraph, IndexSpace, LoopDim, Operand, canonical
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Atoms
from tensoropt.ops.localise import draws_numbers
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import (
    PARTIAL_GRADIENT,
    PASSED_ON,
    WHOLE,
    AxisStrategy,
    Group,
    GroupGraph,
    Label,
)
from tensoropt.sharding.regions import find_regions, repeated_blocks
from tensoropt.types import Itself


@dataclass(frozen=True)
class Stage:
    """The part of a model that one group of devices (called a place) computes.

    Attributes:
        graph: the grouped operator graph of this stage alone.
        arriving: the activations received from the previous stage, in message order.
        departing: the activations sent to the next stage, in message order.
    """

    graph: GroupGraph
    arriving: tuple[str, ...]
    departing: tuple[str, ...]

    @cached_property
    def has_backward(self) -> bool:
        """Whether the stage has a backward pass; stages before the first trained parameter have none."""
        return self._have_gradients(self.departing or self.graph.atoms.graph.outputs)

    @cached_property
    def returns_gradients(self) -> bool:
        """Whether the stage sends gradients back to the previous stage."""
        return self._have_gradients(self.arriving)

    def _have_gradients(self, names: Iterable[str]) -> bool:
        graph = self.graph.atoms.graph
        return graph.training and any(graph.tensors[name].requires_grad for name in names)

    def micro(self, whole: Mapping[str, AxisStrategy]) -> dict[str, AxisStrategy]:
        """Return each operator group's split into micro-batches, taken from those of the ``whole`` model."""
        crossing = {g.name: _crossing_tensor(g) for g in self.graph.groups if g.name not in whole}
        # Passing on all tensors of a large model for each stage would take longer than the rest of this
        # method.
        places = {
            name: strategy.placements[name]
            for strategy in whole.values()
            for name in strategy.placements.keys() & crossing.values()
        }
        strategies = {}
        for group in self.graph.groups:
            if name := crossing.get(group.name):
                alike = (s for s in group.strategies if s.placements[name] == places[name])
                strategies[group.name] = next(alike)
            else:
                strategies[group.name] = whole[group.name]
        return strategies


def _crossing_tensor(group: Group) -> str:
    op = group.anchor
    return op.outputs[0] if op.target == ARRIVE else op.inputs()[0]


def crossing_words(group: Group) -> str:
    """Return words for a message, such as "x arriving in"; the caller appends the name of the stage."""
    way = "arriving in" if group.anchor.target == ARRIVE else "departing from"
    return f"{_crossing_tensor(group)} {way}"


def is_crossing(group: Group) -> bool:
    """Return whether an operator group only stands for a tensor received from or sent to another stage."""
    return group.anchor.target in (ARRIVE, DEPART)


def arriving_group(tensor: str) -> str:
    return f"arrive.{tensor}"


def departing_group(tensor: str) -> str:
    return f"depart.{tensor}"


Keyed = tuple[Mapping[str, AxisStrategy], Mapping[str, str]]
"""For each operator group, its split into micro-batches, and the hash that groups of equal costs share."""


class Cutter:
    """The possible cuts of a model's graph; a cut is the index of the first operator group after it."""

    def __init__(self, graph: GroupGraph):
        self.graph = graph
        self.source = graph.atoms.graph
        self.place = {group.name: number for number, group in enumerate(graph.groups)}
        self.maker = {n: g for g in graph.groups for op in g.operators for n in op.outputs}
        self.readers: dict[str, list[Group]] = {}
        self._made: dict[tuple[int, int, frozenset[str]], Stage] = {}
        self._keyed: dict[tuple[int, int, frozenset[str]], Keyed] = {}
        self._with_all_makers: dict[frozenset[str], frozenset[str]] = {}
        for group in graph.groups:
            for name in group.reads:
                assert self.place[self.maker[name].name] < self.place[group.name], (
                    f"{group.name} reads {name} of a later group"
                )
                self.readers.setdefault(name, []).append(group)

    def keyed(
        self, start: int, stop: int, duplicated: frozenset[str], whole: Mapping[str, AxisStrategy]
    ) -> Keyed:
        """Return each operator group's micro-batch split, given the ``whole`` model's, and its cost hash.

        Results are cached, without regard to ``whole``.
        """
        where = start, stop, duplicated
        if where not in self._keyed:
            part = self.stage(*where)
            micro = part.micro(whole)
            self._keyed[where] = micro, group_keys(part.graph, micro)
        return self._keyed[where]

    # -- what crosses -------------------------------------------------------------------------------

    @cached_property
    def duplicable(self) -> frozenset[str]:
        """Activations that any stage can recompute, as they depend on no parameters or random numbers."""
        tensors, names = self.source.tensors, set[str]()
        changed = set(self.source.mutations.values())
        for group in self.graph.groups:
            made = [n for op in group.operators for n in op.outputs]
            if (
                not (group.parameters or group.shared)
                and names.issuperset(group.reads)
                and not any(tensors[n].requires_grad for n in made)
                and changed.isdisjoint(made)
                and not any(draws_numbers(op) for op in group.operators)
            ):
                names.update(made)
        return frozenset(names)

    def duplication_bytes(self, name: str) -> int:
        """Return the size in bytes of all (unsplit) tensors read and written to recompute a tensor."""
        return sum(
            self.source.tensors[n].bytes
            for group in self.makers_of([name])
            for op in group.operators
            for n in (*op.inputs(), *op.outputs)
        )

    def makers_of(self, names: Iterable[str]) -> list[Group]:
        """Return the operator groups that compute the named tensors from the model's inputs, in order."""
        makers: dict[str, Group] = {}
        waiting = list(names)
        while waiting:
            group = self.maker[waiting.pop()]
            if group.name not in makers:
                makers[group.name] = group
                waiting += group.reads
        return sorted(makers.values(), key=lambda group: self.place[group.name])

    def _with_makers(self, duplicated: frozenset[str]) -> frozenset[str]:
        """Return ``duplicated`` and all results of the operator groups that must run to recompute them."""
        if duplicated not in self._with_all_makers:
            groups = self.makers_of(duplicated)
            self._with_all_makers[duplicated] = duplicated.union(
                n for g in groups for op in g.operators for n in op.outputs
            )
        return self._with_all_makers[duplicated]

    def crossing(self, cut: int, duplicated: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Return the activations computed before a cut and read after it, except ``duplicated`` ones."""
        duplicated = self._with_makers(duplicated)
        return tuple(
            name
            for name, readers in self.readers.items()
            if name not in duplicated
            and self.place[self.maker[name].name] < cut <= self.place[readers[-1].name]
        )

    def crossing_bytes(self, cut: int) -> int:
        """Return the bytes of the whole batch's activations that must be sent across a cut."""
        return sum(self.source.tensors[n].bytes for n in self.crossing(cut, self.duplicable))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The possible cuts. In training, both sides of a cut have parameters, trained or frozen."""
        if not self.source.training:
            return tuple(range(1, len(self.graph.groups)))
        having = [n for n, group in enumerate(self.graph.groups) if group.parameters or group.shared]
        if not having or self._trained_from == len(self.graph.groups):
            return ()
        # The loss is made after every cut.
        last = min(having[-1], self.place[self.maker[self.source.outputs[0]].name])
        return tuple(cut for cut in range(having[0] + 1, last + 1) if self._goes_on(cut))

    @cached_property
    def _trained_from(self) -> int:
        trained = (
            number
            for number, group in enumerate(self.graph.groups)
            if any(self.graph.learns(n, group.name) for n in (*group.parameters, *group.shared))
        )
        return next(trained, len(self.graph.groups))

    def _goes_on(self, cut: int) -> bool:
        if cut <= self._trained_from:
            return bool(self.crossing(cut, self.duplicable))
        return any(self.source.tensors[n].requires_grad for n in self.crossing(cut))

    def has_parameters(self, start: int, stop: int) -> bool:
        """Return whether groups ``start`` to ``stop - 1`` have parameters; always True in inference."""
        groups = self.graph.groups[start:stop]
        return not self.source.training or any(group.parameters or group.shared for group in groups)

    def beginning(self, name: str) -> int:
        """Return the cut before the named operator group, or before the first group of the named module.

        Raises:
            PlanError: nothing has that name.
        """
        if name in self.place:
            return self.place[name]
        for number, group in enumerate(self.graph.groups):
            # An empty name does not stand for the model's own operators, which are in no module.
            if name and f"{group.anchor.module}.".startswith(f"{name}."):
                return number
        raise PlanError(f"there is no operator or module called {name} that a stage could begin with")

    # -- stages -------------------------------------------------------------------------------------

    def stages(self, cuts: Sequence[int], duplicated: frozenset[str] = frozenset()) -> tuple[Stage, ...]:
        """Return the stages between cuts, in order.

        Args:
            cuts: the first operator group of each stage but the first, ascending.
            duplicated: the activations that stages recompute instead of receiving them.

        Raises:
            PlanError: the graph cannot be cut there; the message names the cut.
        """
        for name in duplicated - self.duplicable:
            raise PlanError(f"{name} depends on parameters or random numbers, so stages cannot recompute it")
        ends = (0, *cuts, len(self.graph.groups))
        for start, stop in pairwise(ends):
            where = self.graph.groups[min(start, len(self.graph.groups) - 1)].name
            if stop <= start:
                raise PlanError(f"the stage that begins with {where} is empty; give cuts in order, each once")
            if start and start not in self.cuts:
                raise PlanError(
                    f"a stage cannot begin with {where}: every stage needs parameters, and must receive "
                    "an activation from the previous stage, with a gradient if an earlier stage is trained; "
                    "move its cut"
                )
            if not self.has_parameters(start, stop):
                raise PlanError(f"the stage that begins with {where} has no parameters; move its cut")
        return tuple(self.stage(start, stop, duplicated) for start, stop in pairwise(ends))

    def stage(self, start: int, stop: int, duplicated: frozenset[str] = frozenset()) -> Stage:
        """Return the stage that consists of operator groups ``start`` to ``stop - 1``; cached."""
        key = start, stop, duplicated
        if key not in self._made:
            arriving = self.crossing(start, duplicated) if start else ()
            departing = self.crossing(stop, duplicated) if stop < len(self.graph.groups) else ()
            own, made_again = self.graph.groups[start:stop], self._with_makers(duplicated)
            read = {name for group in own for name in group.reads if name in made_again}
            before = {name for name in read if self.place[self.maker[name].name] < start}
            groups = [*self.makers_of(before), *own]
            self._made[key] = stage_of(self.graph, groups, arriving, departing)
        return self._made[key]


def stage_of(
    graph: GroupGraph, groups: Sequence[Group], arriving: Sequence[str], departing: Sequence[str]
) -> Stage:
    """Return some operator groups of a graph as a stage, given the tensors that it receives and sends."""
    return _StageBuilder(graph, groups, arriving, departing).build()


def cutter_of(graph: GroupGraph) -> Cutter:
    """Return the cutter of a graph; the cutter of the most recent graph is cached, with its stages."""
    return _cutter_of(Itself(graph))


@lru_cache(maxsize=1)
def _cutter_of(graph: Itself[GroupGraph]) -> Cutter:
    return Cutter(graph.content)


class _StageBuilder:
    def __init__(
        self, graph: GroupGraph, groups: Sequence[Group], arriving: Sequence[str], departing: Sequence[str]
    ):
        self.whole, self.source = graph, graph.atoms.graph
        self.kept = list(groups)
        self.arriving, self.departing = tuple(arriving), tuple(departing)

    def build(self) -> Stage:
        graph = self._operators()
        crossing = [op for op in graph.operators if op.target in (ARRIVE, DEPART)]
        whole_atoms = self.whole.atoms
        spaces = {
            op.name: whole_atoms.spaces[op.name] for op in graph.operators if op.name in whole_atoms.spaces
        }
        spaces |= {op.name: self._space(op) for op in crossing}
        inner = {op.inputs()[0]: op.outputs[0] for op in crossing}
        inner |= {outer: name for name, outer in inner.items()}
        atoms = {
            n: whole_atoms.atoms[n] if n in whole_atoms.atoms else whole_atoms.atoms[inner[n]]
            for n in graph.tensors
        }
        refined = AtomGraph(
            graph,
            spaces,
            atoms,
            {n: whole_atoms.discovered[n] for n in whole_atoms.discovered if n in spaces},
            self._zigzag(atoms, inner),
        )
        return Stage(self._groups(refined), self.arriving, self.departing)

    def _zigzag(self, atoms: Mapping[str, Atoms], inner: Mapping[str, str]) -> frozenset[tuple[str, int]]:
        """Return (tensor, index of a factor of its dims) for factors whose shards are in zig-zag order."""
        whole = self.whole.atoms
        if len({whole.atom_sizes(name)[position] for name, position in whole.zigzag}) != 1:
            return frozenset()
        return frozenset(
            (name, position)
            for name in atoms
            for position in range(sum(map(len, atoms[name])))
            if {(name, position), (inner.get(name, name), position)} & whole.zigzag
        )

    def _operators(self) -> OperatorGraph:
        source, tensors = self.source, dict[str, Tensor]()
        operators = [op for group in self.kept for op in group.operators]
        order = {op.name: number for number, op in enumerate(source.operators)}
        operators.sort(key=lambda op: order[op.name])
        for name in (*source.inputs, *(n for op in operators for n in (*op.inputs(), *op.outputs))):
            tensors[name] = source.tensors[name]
        arrivals, departures = [], []
        for number, name in enumerate(self.arriving):
            outer = f"arriving_{number}"  # the name of an argument of the lowered graph, so an identifier
            tensors[name] = source.tensors[name]
            tensors[outer] = replace(source.tensors[name], name=outer, kind="input")
            arrivals.append(Operator(arriving_group(name), ARRIVE, (Ref(outer),), {}, (name,)))
        for number, name in enumerate(self.departing):
            outer = f"departing_{number}"
            tensors[outer] = replace(source.tensors[name], name=outer)
            departures.append(Operator(departing_group(name), DEPART, (Ref(name),), {}, (outer,)))
        made = {n for op in operators for n in op.outputs}
        mutations = {n: new for n, new in source.mutations.items() if new in made}
        for name in mutations:
            tensors[name] = source.tensors[name]
        # In the whole graph's order, whatever is read first here: parameters and buffers are positional
        # arguments.
        tensors = {n: tensors[n] for n in (*(n for n in source.tensors if n in tensors), *tensors)}
        return replace(
            source,
            tensors=tensors,
            operators=(*arrivals, *operators, *departures),
            inputs=(*source.inputs, *(op.inputs()[0] for op in arrivals)),
            outputs=tuple(n for n in source.outputs if n in made or source.tensors[n].kind != "activation"),
            mutations=mutations,
            constants={n: value for n, value in source.constants.items() if n in tensors},
        )

    def _space(self, op: Operator) -> IndexSpace:
        name = op.outputs[0] if op.target == ARRIVE else op.inputs()[0]
        maker = self.whole.atoms.spaces[self.whole.atoms.graph.producer[name].name]
        (made,) = (operand for operand in maker.writes if operand.tensor == name)
        small_parts = [[maker.dims[loop].small_parts for loop in dim] for dim in made.dims]
        dims: list[LoopDim] = []
        labels: list[tuple[int, ...]] = []
        for number, sizes in enumerate(self.whole.atoms.atoms[name]):
            loops = tuple(range(len(dims), len(dims) + len(sizes)))
            several = len(sizes) > 1
            dims += [
                LoopDim(
                    f"d{number}.{atom}" if several else f"d{number}",
                    size,
                    splittable=size > 1,
                    small_parts=small_parts[number][atom],
                )
                for atom, size in enumerate(sizes)
            ]
            labels.append(loops)
        reads, writes = (Operand(n, tuple(labels)) for n in (op.inputs()[0], op.outputs[0]))
        return IndexSpace(tuple(dims), (reads,), (writes,), linear=True)

    def _groups(self, atoms: AtomGraph) -> GroupGraph:
        graph = atoms.graph
        arrivals, departures = (
            [self._crossing(op, atoms) for op in graph.operators if op.target == target]
            for target in (ARRIVE, DEPART)
        )
        drafts = [*arrivals, *self.kept, *departures]
        readers: dict[str, set[str]] = {}
        users: dict[str, set[str]] = {}
        for group in drafts:
            for name in group.reads:
                readers.setdefault(name, set()).add(group.name)
            for name in (*group.parameters, *group.shared):
                users.setdefault(name, set()).add(group.name)
        departing = {op.outputs[0] for op in graph.operators if op.target == DEPART}
        leaving = {*graph.outputs, *graph.mutations.values(), *departing}
        groups = tuple(
            replace(
                group,
                parameters=tuple(n for n in self._parameters(group) if len(users[n]) == 1),
                shared=tuple(n for n in self._parameters(group) if len(users[n]) > 1),
                writes=tuple(n for n in group.writes if n in readers or n in leaving),
            )
            for group in drafts
        )
        grouped = GroupGraph(
            atoms,
            groups,
            tuple(name for name, by in readers.items() if len(by) > 1),
            tuple(name for name, by in users.items() if len(by) > 1),
            {op.name: group for group in groups for op in group.operators},
        )
        names = {group.name for group in groups}
        regions = tuple(region for region in find_regions(self.whole) if names.issuperset(region.groups))
        return replace(grouped, regions=tuple((region.name, region.groups) for region in regions))

    @staticmethod
    def _parameters(group: Group) -> tuple[str, ...]:
        own = {*group.parameters, *group.shared}
        return tuple(dict.fromkeys(n for op in group.operators for n in op.inputs() if n in own))

    def _crossing(self, op: Operator, atoms: AtomGraph) -> Group:
        (outer,), (made,) = op.inputs(), op.outputs
        space, learns = atoms.spaces[op.name], atoms.graph.tensors[made].requires_grad
        choices: list[tuple[Label, int, int]] = [(WHOLE, REPLICATE, REPLICATE)]
        choices += [
            (Label.parse(dim.name), number, number) for number, dim in enumerate(space.dims) if dim.splittable
        ]
        if learns:
            choices += [(PASSED_ON, PARTIAL, PARTIAL), (PARTIAL_GRADIENT, PARTIAL_GRAD, PARTIAL_GRAD)]
        tensors = atoms.graph.tensors
        strategies = tuple(
            AxisStrategy(
                label, {op.name: choice}, {name: canonical(tensors[name], code) for name in (outer, made)}
            )
            for label, choice, code in choices
        )
        arrives = op.target == ARRIVE
        return Group(
            name=op.name,
            operators=(op,),
            reads=() if arrives else (outer,),
            parameters=(),
            shared=(),
            free=(outer,) if arrives else (),
            writes=(made,),
            strategies=strategies,
        )


def flops_of(graph: GroupGraph, costs: CostSource) -> np.ndarray:
    """Return (groups,) the FLOP count of each unsplit operator group, forward and backward; at least 1."""
    facts = [costs.facts.of(_whole_work(graph, group)) for group in graph.groups]
    return np.array([of.forward_flops + of.backward_flops + 1.0 for of in facts])


def _whole_work(graph: GroupGraph, group: Group) -> Workload:
    return workload(graph, Configuration(group, (group.unsplit,)), (1,))


def parameter_bytes_of(graph: GroupGraph) -> np.ndarray:
    """Return (groups,) the size in bytes of parameters with their gradients and two optimizer states."""
    tensors = graph.atoms.graph.tensors

    def stored(name: str) -> float:
        return float(tensors[name].bytes * (_STORED_IF_TRAINED if tensors[name].requires_grad else 1))

    return np.array([sum(map(stored, (*group.parameters, *group.shared))) for group in graph.groups])


_STORED_IF_TRAINED = 4
"""Tensors stored per trained parameter, as Adam does: itself, its gradient, two states."""


def block_cuts(cutter: Cutter) -> list[int]:
    starts = {cutter.place[region.groups[0]] for region in repeated_blocks(cutter.graph)}
    return [cut for cut in cutter.cuts if cut in starts]


def dealt(blocks: int, stages: int, *, ends: bool = True) -> list[int]:
    """Return the number of repeated blocks of each stage.

    If the blocks do not divide evenly, the parts before the first and after the last block count as one block
    each (Llama 3, arXiv 2407.21783, section 3.3.2). If that is uneven too, earlier stages get one block more.

    Args:
        ends: whether the parts before the first and after the last block can be stages.
    """
    each, over = divmod(blocks + 2 * (ends and _ends_count(blocks, stages)), stages)
    return [each + (stage < over) for stage in range(stages)]


def _ends_count(blocks: int, stages: int) -> bool:
    return blocks % stages != 0 and (blocks + 2) % stages == 0


def dealt_cuts(cutter: Cutter, stages: int) -> tuple[int, ...]:
    """Return the cuts that give each stage the number of repeated blocks of :func:`dealt`.

    Raises:
        PlanError: there are fewer blocks than stages, or the model cannot be cut between them.
    """
    blocks = repeated_blocks(cutter.graph)
    ends = bool(blocks) and has_ends(cutter)
    if not blocks or len(blocks) + 2 * ends < stages:
        raise PlanError(f"{len(blocks)} repeated blocks are fewer than {stages} stages; give fewer stages")
    # Before each block, and after the last one.
    starts = [cutter.place[region.groups[0]] for region in blocks]
    starts.append(cutter.place[blocks[-1].groups[-1]] + 1)
    sizes = dealt(len(blocks), stages, ends=ends)
    before = [
        sum(sizes[: stage + 1]) - (ends and _ends_count(len(blocks), stages)) for stage in range(stages)
    ]
    cuts = tuple(starts[count] for count in before[:-1])
    if unfit := [cutter.graph.groups[cut].name for cut in cuts if cut not in cutter.cuts]:
        raise PlanError(f"no stage can begin with {unfit[0]}; give another number of stages than {stages}")
    return cuts


def has_ends(cutter: Cutter) -> bool:
    """Return whether the parts of the model before and after its repeated blocks can be stages."""
    blocks = repeated_blocks(cutter.graph)
    if not blocks:
        return False
    first, last = cutter.place[blocks[0].groups[0]], cutter.place[blocks[-1].groups[-1]]
    return first in cutter.cuts and last + 1 in cutter.cuts


def stages_to_a_place(blocks: int, places: int, micro_batches: int, most: int, *, ends: bool = True) -> int:
    """Return the number of stages per device group, up to ``most``, with which a step is shortest.

    More stages shorten the bubble, but may have unequal numbers of blocks. The result is at least 2, or 1 if
    the blocks are too few. A step of equal stages takes :math:`1 + (p - 1) / (v m)` times its computation,
    with :math:`v` stages on each of :math:`p` device groups (Narayanan et al., SC 2021, section 2.2).

    Args:
        ends: whether the parts before the first and after the last block can be stages.
    """
    candidates = [(1.0, 1)]
    for count in range(2, most + 1):
        stages = places * count
        if blocks + 2 * (ends and _ends_count(blocks, stages)) >= stages:
            sizes = dealt(blocks, stages, ends=ends)
            fullest = max(sum(sizes[place::places]) for place in range(places)) * places / sum(sizes)
            step = fullest * (1.0 + (places - 1) / (count * micro_batches))
            candidates.append((step, count))
    return min(candidates[1:] or candidates)[1]


def narrow_cuts(cutter: Cutter, least: int) -> list[int]:
    """Return the cuts that the least data crosses: a quarter of all cuts, and at least ``least`` of them."""
    sizes = {cut: cutter.crossing_bytes(cut) for cut in cutter.cuts}
    if not sizes:
        return []
    limit = sorted(sizes.values())[min(len(sizes) - 1, max(least - 1, len(sizes) // 4))]
    return [cut for cut, size in sizes.items() if size <= limit]


def speeds_of(graph: GroupGraph, sources: Sequence[CostSource]) -> tuple[float, ...]:
    """Return, for each cost source, how often one of its devices can compute the whole model per second."""
    works = [_whole_work(graph, group) for group in graph.groups]
    speed_of: dict[int, float] = {}
    for source in sources:
        if id(source) not in speed_of:
            compute = source.compute()
            speed_of[id(source)] = 1.0 / sum(sum(compute.seconds(w, source.facts.of(w))) for w in works)
    return tuple(speed_of[id(source)] for source in sources)


def balanced(
    weights: np.ndarray, positions: Sequence[int], stages: int, strengths: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the cuts that make the heaviest stage lightest (the earliest of several); empty if impossible.

    Args:
        weights: (groups,) the quantity to balance.
        positions: the possible starts of stages, ascending.
        strengths: the speed of each stage, by which its weight is divided; 1 by default.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ends = [*positions, len(weights)]
    # best[e]: (heaviest, cuts) of the first stages, which end at position e.
    strength = strengths or [1.0] * stages
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (float(total[end]) / strength[0], ()) for end in ends
    }
    for stage in range(1, stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            choices = [
                (max(heaviest, float(total[end] - total[cut]) / strength[stage]), (*cuts, cut))
                for cut, (heaviest, cuts) in best.items()
                if cut < end and cut != len(weights)
            ]
            if choices:
                following[end] = min(choices)
        best = following
    return best.get(len(weights), (inf, ()))[1]


def cheaper_to_duplicate(cutter: Cutter, costs: CostSource) -> frozenset[str]:
    """Return the tensors that any stage computes in less time than sending them takes.

    Computing takes its FLOP at peak speed or, if longer, its memory traffic at full bandwidth. A message
    takes its size over the outermost link. Launches and latencies, which both have, are left out.
    """
    device, levels = costs.cluster.device, costs.cluster.levels
    if not levels:
        return cutter.duplicable
    link = levels[0].link
    peak = max(device.flops.values())
    tensors = cutter.source.tensors
    cheaper = set()
    for name in cutter.duplicable:
        works = (_whole_work(cutter.graph, group) for group in cutter.makers_of([name]))
        flops = sum(costs.facts.of(work).forward_flops for work in works)
        making_s = max(flops / peak, cutter.duplication_bytes(name) / device.memory_bandwidth)
        if making_s <= tensors[name].bytes / link.bandwidth_bytes_per_s:
            cheaper.add(name)
    return frozenset(cheaper)
