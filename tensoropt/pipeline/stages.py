"""Cutting a model into stages: positions where few bytes are alive, and the graph of each stage.

A stage is a range of groups. What an earlier stage has made arrives in it, and what later stages need departs
from it, both through operators of its graph (:mod:`tensoropt.ops.families.stages`); a tensor that a later
stage needs passes through all stages between. The groups, their atoms and the ways in which they split are
those of the whole graph, so that a stage is a graph like any other: the code that configures, prices,
searches, simulates and lowers models handles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tensoropt.errors import PlanError
from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor
from tensoropt.ops.atom_graph import AtomGraph, canonical
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.index_space import IndexSpace, LoopDim, Operand
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.ops.localise import draws_numbers
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.labels import PARTIAL_GRADIENT, PASSED_ON, WHOLE, Label
from tensoropt.sharding.regions import find_regions


@dataclass(frozen=True)
class Stage:
    """A part of a model that one part of the devices computes.

    Attributes:
        graph: the graph of the stage alone.
        arriving, departing: the tensors that come from the previous stage and go to the next one, in the
            order in which they are sent.
    """

    graph: GroupGraph
    arriving: tuple[str, ...]
    departing: tuple[str, ...]

    def micro(self, whole: Mapping[str, AxisStrategy]) -> dict[str, AxisStrategy]:
        """Return the strategy by which each group of the stage follows the batch, given those of the whole
        graph."""
        crossed = {crossing_tensor(group) for group in self.graph.groups if group.name not in whole}
        # Passing all tensors of a large model for each of its stages would take longer than all else here.
        places = {
            name: one.placements[name] for one in whole.values() for name in crossed & one.placements.keys()
        }
        found = {}
        for group in self.graph.groups:
            if group.name in whole:
                found[group.name] = whole[group.name]
            else:
                crossing = crossing_tensor(group)
                found[group.name] = next(
                    s for s in group.strategies if s.placements[crossing] == places[crossing]
                )
        return found


def crossing_tensor(group: Group) -> str:
    """Return the tensor that a group brings into a stage, or takes out of it."""
    op = group.anchor
    return op.outputs[0] if op.target == ARRIVE else op.inputs()[0]


def is_crossing(group: Group) -> bool:
    """Return whether a group computes nothing, and stands for what is received or sent."""
    return group.anchor.target in (ARRIVE, DEPART)


def arriving_group(tensor: str) -> str:
    """Return the name of the group by which a tensor enters a stage."""
    return f"arrive.{tensor}"


def departing_group(tensor: str) -> str:
    """Return the name of the group by which a tensor leaves a stage."""
    return f"depart.{tensor}"


class Cutter:
    """All ways to cut a graph into stages.

    A cut is a position among the graph's groups: that of the first group after it.
    """

    def __init__(self, graph: GroupGraph):
        self.graph = graph
        self.source = graph.atoms.graph
        self.place = {group.name: number for number, group in enumerate(graph.groups)}
        self.maker = {n: g for g in graph.groups for op in g.operators for n in op.outputs}
        self.readers: dict[str, list[Group]] = {}
        self._made: dict[tuple[int, int, frozenset[str]], Stage] = {}
        self._whole_again: dict[frozenset[str], frozenset[str]] = {}
        for group in graph.groups:
            for name in group.reads:
                assert self.place[self.maker[name].name] < self.place[group.name], (
                    f"{group.name} reads {name} of a later group"
                )
                self.readers.setdefault(name, []).append(group)

    # -- what crosses -------------------------------------------------------------------------------

    @cached_property
    def can_be_made_again(self) -> frozenset[str]:
        """Activations that any stage can make itself: those that depend only on inputs, buffers and
        constants, without a gradient or random numbers (masks, tables of positions)."""
        tensors, found = self.source.tensors, set[str]()
        changed = set(self.source.mutations.values())
        for group in self.graph.groups:
            made = [n for op in group.operators for n in op.outputs]
            if (
                not (group.parameters or group.shared)
                and found.issuperset(group.reads)
                and not any(tensors[n].requires_grad for n in made)
                and changed.isdisjoint(made)
                and not any(draws_numbers(op) for op in group.operators)
            ):
                found.update(made)
        return frozenset(found)

    def made_again_bytes(self, name: str) -> int:
        """Return the bytes read and written, unsplit, to make a tensor in another stage."""
        return sum(
            self.source.tensors[n].bytes
            for group in self.makers_of([name])
            for op in group.operators
            for n in (*op.inputs(), *op.outputs)
        )

    def makers_of(self, names: Iterable[str]) -> list[Group]:
        """Return the groups that make tensors from inputs alone, in execution order."""
        found: dict[str, Group] = {}
        waiting = list(names)
        while waiting:
            group = self.maker[waiting.pop()]
            if group.name not in found:
                found[group.name] = group
                waiting += group.reads
        return sorted(found.values(), key=lambda group: self.place[group.name])

    def _with_makers(self, again: frozenset[str]) -> frozenset[str]:
        """Return the tensors of a stage that makes some tensors again: these, and all that is made on the way
        to them.

        A stage that is sent a tensor cannot make it a second time.
        """
        if again not in self._whole_again:
            groups = self.makers_of(again)
            self._whole_again[again] = again.union(
                n for g in groups for op in g.operators for n in op.outputs
            )
        return self._whole_again[again]

    def crossing(self, cut: int, again: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Return the activations that are made before a cut and read after it.

        Args:
            again: the activations that stages make themselves, with those that these are made from.
        """
        again = self._with_makers(again)
        return tuple(
            name
            for name, readers in self.readers.items()
            if name not in again and self.place[self.maker[name].name] < cut <= self.place[readers[-1].name]
        )

    def crossing_bytes(self, cut: int) -> int:
        """Return the bytes of the whole batch that cross a cut, if stages make what they can themselves."""
        return sum(self.source.tensors[n].bytes for n in self.crossing(cut, self.can_be_made_again))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The positions at which the graph can be cut into two stages that both have trained parameters."""
        learning = [
            number
            for number, group in enumerate(self.graph.groups)
            if any(self.graph.learns(n, group.name) for n in (*group.parameters, *group.shared))
        ]
        if not self.source.training:
            return tuple(range(1, len(self.graph.groups)))
        if not learning:
            return ()
        # The loss is made after every cut, and each stage hands a gradient to the previous one.
        last = min(learning[-1], self.place[self.maker[self.source.outputs[0]].name])
        return tuple(
            cut
            for cut in range(learning[0] + 1, last + 1)
            if any(self.source.tensors[n].requires_grad for n in self.crossing(cut))
        )

    def learns(self, start: int, stop: int) -> bool:
        """Return whether a range of groups has parameters that are trained."""
        return not self.source.training or any(
            self.graph.learns(n, group.name)
            for group in self.graph.groups[start:stop]
            for n in (*group.parameters, *group.shared)
        )

    def beginning(self, name: str) -> int:
        """Return the cut before a group, or before the first group of a module, by its name.

        Raises:
            PlanError: the model has no group and no module of that name.
        """
        if name in self.place:
            return self.place[name]
        for number, group in enumerate(self.graph.groups):
            # An empty name does not stand for the model's own operators, which are in no module.
            if name and f"{group.anchor.module}.".startswith(f"{name}."):
                return number
        raise PlanError(f"there is no operator or module called {name} that a stage could begin with")

    # -- stages -------------------------------------------------------------------------------------

    def stages(self, cuts: Sequence[int], again: frozenset[str] = frozenset()) -> tuple[Stage, ...]:
        """Return the stages between cuts, in order.

        Args:
            cuts: ascending.
            again: activations that stages make themselves instead of receiving them.

        Raises:
            PlanError: the graph cannot be cut so; the message names the cut.
        """
        for name in again - self.can_be_made_again:
            raise PlanError(
                f"{name} depends on parameters or random numbers, so that it cannot be made again"
            )
        ends = (0, *cuts, len(self.graph.groups))
        for start, stop in pairwise(ends):
            where = self.graph.groups[min(start, len(self.graph.groups) - 1)].name
            if stop <= start:
                raise PlanError(f"the stage that begins with {where} is empty; give cuts in order, each once")
            if start and start not in self.cuts:
                raise PlanError(
                    f"a stage cannot begin with {where}: every stage needs trained parameters and hands a "
                    "gradient to the one before it"
                )
            if not self.learns(start, stop):
                raise PlanError(f"the stage that begins with {where} has no trained parameters; move its cut")
        return tuple(self.stage(start, stop, again) for start, stop in pairwise(ends))

    def stage(self, start: int, stop: int, again: frozenset[str] = frozenset()) -> Stage:
        """Return the stage of the groups from ``start`` up to ``stop``; it is made once."""
        key = start, stop, again
        if key not in self._made:
            self._made[key] = self._stage(start, stop, again)
        return self._made[key]

    def _stage(self, start: int, stop: int, again: frozenset[str]) -> Stage:
        arriving = self.crossing(start, again) if start else ()
        departing = self.crossing(stop, again) if stop < len(self.graph.groups) else ()
        own, again = self.graph.groups[start:stop], self._with_makers(again)
        before = {
            n for group in own for n in group.reads if n in again and self.place[self.maker[n].name] < start
        }
        return _StageBuilder(self.graph, [*self.makers_of(before), *own], arriving, departing).build()


class _StageBuilder:
    """Builds the graph of one stage from some groups of the whole graph."""

    def __init__(
        self, graph: GroupGraph, groups: Sequence[Group], arriving: Sequence[str], departing: Sequence[str]
    ):
        self.whole, self.source = graph, graph.atoms.graph
        self.kept = list(groups)
        self.arriving, self.departing = tuple(arriving), tuple(departing)

    def build(self) -> Stage:
        """Return the stage."""
        graph = self._operators()
        crossing = [op for op in graph.operators if op.target in (ARRIVE, DEPART)]
        known = self.whole.atoms
        spaces = {op.name: known.spaces[op.name] for op in graph.operators if op.name in known.spaces}
        spaces |= {op.name: self._space(op) for op in crossing}
        inner = {op.inputs()[0]: op.outputs[0] for op in crossing}
        inner |= {outer: name for name, outer in inner.items()}
        atoms = {n: known.atoms[n] if n in known.atoms else known.atoms[inner[n]] for n in graph.tensors}
        refined = AtomGraph(
            graph, spaces, atoms, {n: known.discovered[n] for n in known.discovered if n in spaces}
        )
        return Stage(self._groups(refined), self.arriving, self.departing)

    def _operators(self) -> OperatorGraph:
        source, tensors = self.source, dict[str, Tensor]()
        operators = [op for group in self.kept for op in group.operators]
        order = {op.name: number for number, op in enumerate(source.operators)}
        operators.sort(key=lambda op: order[op.name])
        for name in (*source.inputs, *(n for op in operators for n in (*op.inputs(), *op.outputs))):
            tensors[name] = source.tensors[name]
        arrivals, departures = [], []
        for number, name in enumerate(self.arriving):
            outer = f"arriving_{number}"  # an argument of what the graph is lowered to, and so an identifier
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
        """Return an index space with a loop for each atom of the crossing tensor."""
        name = op.outputs[0] if op.target == ARRIVE else op.inputs()[0]
        dims: list[LoopDim] = []
        labels: list[tuple[int, ...]] = []
        for number, sizes in enumerate(self.whole.atoms.atoms[name]):
            loops = tuple(range(len(dims), len(dims) + len(sizes)))
            several = len(sizes) > 1
            dims += [
                LoopDim(f"d{number}.{atom}" if several else f"d{number}", size, splittable=size > 1)
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
        found = GroupGraph(
            atoms,
            groups,
            tuple(name for name, by in readers.items() if len(by) > 1),
            tuple(name for name, by in users.items() if len(by) > 1),
            {op.name: group for group in groups for op in group.operators},
        )
        names = {group.name for group in groups}
        regions = tuple(region for region in find_regions(self.whole) if names.issuperset(region.groups))
        return replace(found, regions=tuple((region.name, region.groups) for region in regions))

    @staticmethod
    def _parameters(group: Group) -> tuple[str, ...]:
        """Return all parameters of a group in the order in which its operators read them."""
        own = {*group.parameters, *group.shared}
        return tuple(dict.fromkeys(n for op in group.operators for n in op.inputs() if n in own))

    def _crossing(self, op: Operator, atoms: AtomGraph) -> Group:
        """Return the group of what arrives or departs: in any placement."""
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
