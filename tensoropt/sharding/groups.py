"""Groups of operators that share one configuration, and the strategies by which each can be split.

An operator that only moves or rescales data joins its producer's group, if the group can then be split in as
many ways as before (TensorFlow's Placer, heuristic B). A parameter that one operator uses belongs to that
operator's group (the Placer's reference rule).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tensoropt.graph import Operator, OperatorGraph, Ref
from tensoropt.ops.index_space import NONE, AtomGraph, IndexSpace, operand_placement
from tensoropt.ops.index_space import canonical as canonical
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, placement_code, placement_name
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.reshard.steps import ReshardingStep


@dataclass(frozen=True, slots=True)
class Label:
    """A strategy's name in plans: the loop that a mesh axis splits, and where its partial sum is reduced.

    The text is ``loop``, ``loop.atom`` or ``loop@placement``.

    Attributes:
        loop: a loop of the group's first operator (anchor), or ``none``, ``partial`` or ``partial_grad``.
        atom: the index of the loop's factor (atom) that is split, outermost first; None if it has only one.
        resolve: the placement code to which the anchor's partial output is reduced, or None.
    """

    loop: str
    atom: int | None = None
    resolve: int | None = None

    def __str__(self) -> str:
        return self.dim if self.resolve is None else f"{self.dim}@{placement_name(self.resolve)}"

    @property
    def dim(self) -> str:
        """The name of the anchor's loop or of its factor (atom) that is split: ``loop`` or ``loop.atom``."""
        return self.loop if self.atom is None else f"{self.loop}.{self.atom}"

    @property
    def splits(self) -> bool:
        return self.loop not in _NO_LOOP

    def resolved(self, code: int) -> Label:
        """Return the label of the same split whose partial sum is reduced to the placement ``code``."""
        return replace(self, resolve=code)

    @classmethod
    def parse(cls, text: str) -> Label:
        """Return the label of a text in a plan; ValueError if the atom or the placement is malformed."""
        dim, _, resolve = text.partition("@")
        loop, _, atom = dim.partition(".")
        return cls(loop, int(atom) if atom else None, placement_code(resolve) if resolve else None)


WHOLE, PASSED_ON, PARTIAL_GRADIENT = Label("none"), Label("partial"), Label("partial_grad")
"""Labels of strategies that split no loop: nothing is split; operands and results are partial sums; all ranks
compute everything, and gradients are partial sums."""
_NO_LOOP = frozenset(label.loop for label in (WHOLE, PASSED_ON, PARTIAL_GRADIENT))


_MAX_ATOMS_PER_LOOP = 2
"""The most factors (atoms) of a loop that may be split; two, for more ranks than key/value heads."""


@dataclass(frozen=True)
class AxisStrategy:
    """How one mesh axis splits the operators and tensors of a group.

    Attributes:
        label: its name, in terms of the group's first operator (anchor).
        choices: operator -> the index of the loop that is split, or NONE, PARTIAL, PARTIAL_GRAD.
        placements: tensor -> its placement code, after ``resolve``.
        resolve: (tensor, code) if the anchor's partial output is reduced inside the group.
    """

    label: Label
    choices: Mapping[str, int]
    placements: Mapping[str, int]
    resolve: tuple[str, int] | None = None


@dataclass
class _Draft:
    operators: list[Operator]
    strategies: list[AxisStrategy]
    reads: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Group:
    """Operators that share one configuration.

    Attributes:
        name: the first operator's name.
        operators: in execution order; the first one, the anchor, names the group's strategies.
        reads: activations that other groups make.
        parameters: parameters that only this group uses.
        shared: parameters that other groups use, too (tied).
        free: inputs, constants and buffers; every rank has all of them, so that taking a shard costs nothing.
        writes: tensors that other groups read or the model returns.
        strategies: the possible splits on one mesh axis.
    """

    name: str
    operators: tuple[Operator, ...]
    reads: tuple[str, ...]
    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    free: tuple[str, ...]
    writes: tuple[str, ...]
    strategies: tuple[AxisStrategy, ...]

    @property
    def anchor(self) -> Operator:
        """The group's first operator. A strategy's label names the loop of this operator that it splits."""
        return self.operators[0]

    @cached_property
    def unsplit(self) -> AxisStrategy:
        # Every anchor's list begins with it, and a follower that could not follow it would not have joined.
        return next(s for s in self.strategies if s.label == WHOLE)

    @cached_property
    def short_names(self) -> Mapping[str, str]:
        """Tensor -> ``t0``, ``t1``, ... in order of first use; equal for groups of equal structure."""
        order: dict[str, str] = {}
        for op in self.operators:
            for name in (*op.inputs(), *op.outputs):
                order.setdefault(name, f"t{len(order)}")
        return order


@dataclass(frozen=True)
class GroupGraph:
    """The operator graph in groups, for each of which the search chooses a configuration.

    Attributes:
        groups: in execution order of their first operators (anchors).
        hubs: activations with several readers; the search chooses one layout for all readers to start from.
        shared: tied parameters; the search chooses the layout in which each is stored.
        regions: for a part of a graph, (name, groups) of its repeated blocks; None for a whole graph, where
            :func:`tensoropt.sharding.regions.find_regions` finds them.
    """

    atoms: AtomGraph
    groups: tuple[Group, ...]
    hubs: tuple[str, ...]
    shared: tuple[str, ...]
    group_of: Mapping[str, Group]
    regions: tuple[tuple[str, tuple[str, ...]], ...] | None = None

    @cached_property
    def uses(self) -> tuple[tuple[str, Group], ...]:
        """Pairs (parameter, group that reads it), in execution order."""
        return tuple((name, group) for group in self.groups for name in (*group.parameters, *group.shared))

    @cached_property
    def users(self) -> Mapping[str, int]:
        """Tied parameter -> the number of groups that use it."""
        return Counter(name for group in self.groups for name in group.shared)

    def learns(self, name: str, group: str) -> bool:
        """Return whether a group gives a gradient to a tensor that it reads."""
        tensor = self.atoms.graph.tensors[name]
        return tensor.requires_grad and (tensor.kind != "parameter" or (name, group) not in self.idle_uses)

    @cached_property
    def idle_uses(self) -> frozenset[tuple[str, str]]:
        """Pairs (parameter, group) in which the group gives the parameter no gradient."""
        tensors = self.atoms.graph.tensors
        return frozenset(
            (name, group.name)
            for name, group in self.uses
            if not any(
                tensors[made].requires_grad
                for op in group.operators
                if name in op.inputs()
                for made in op.outputs
            )
        )


class _Grouping:
    """One pass over the operators, in which each joins a group under construction (draft) or starts one.

    Attributes:
        known_hubs: tensors with several readers, from an earlier pass.
        draft_of: operator -> its draft.
        independent: operators whose results do not depend on the batch.
    """

    def __init__(self, atoms: AtomGraph, known_hubs: frozenset[str] = frozenset()):
        self.atoms = atoms
        self.graph = atoms.graph
        self.known_hubs = known_hubs
        self.drafts: list[_Draft] = []
        self.draft_of: dict[str, _Draft] = {}
        self.independent = _input_independent(atoms)

    def colocate(self) -> GroupGraph:
        for op in self.graph.operators:
            if not self._join(op):
                # Operators come in execution order, so the producer of every operand already has its draft.
                draft = _Draft([op], self._anchor_strategies(op), self._external(op, None))
                self.drafts.append(draft)
                self.draft_of[op.name] = draft
        return self._finish()

    # -- joining ----------------------------------------------------------------------------------

    def _activations(self, op: Operator) -> list[str]:
        return [n for n in dict.fromkeys(op.inputs()) if self.graph.tensors[n].kind == "activation"]

    def _external(self, op: Operator, draft: _Draft | None) -> set[str]:
        producer = self.graph.producer
        return {n for n in self._activations(op) if self.draft_of.get(producer[n].name) is not draft}

    def _join(self, op: Operator) -> bool:
        space = self.atoms.spaces[op.name]
        if not space.cheap or not space.known:
            return False
        feeders = [self.draft_of[self.graph.producer[n].name] for n in self._activations(op)]
        if not feeders:
            return False
        # The latest: the longest chain, whose group most likely reads the other producers' results. If there
        # are several feeders, the group must already read those results, see below.
        draft = feeders[-1]
        hubs = self.known_hubs.intersection(self._activations(op))
        if hubs and not space.linear:
            # A chain that starts on a tensor that others read as well (x*x of an RMS norm) forms a separate
            # group instead of following the producer; later links join the chain that reads the tensor.
            chains = [d for d in feeders if hubs <= d.reads]
            if not chains:
                return False
            draft = chains[0]
        # The group must already read every other operand, otherwise the edge would be new.
        if self._external(op, draft) - draft.reads:
            return False
        if self._adds_loops(op, space, draft):
            return False
        followed = [s for s in (self._follow(s, op) for s in draft.strategies) if s is not None]
        lost = _ways(draft.strategies) - _ways(followed)
        # A chain of cheap operators may lose ways to split (a norm's own dim); a heavy anchor may not.
        if lost and (not self.atoms.spaces[draft.operators[0].name].cheap or len(draft.reads) > 1):
            return False
        # A follower that leaves no way to split would decide for its anchor.
        if len(_ways(followed)) < 2:
            return False
        draft.operators.append(op)
        draft.strategies = followed
        self.draft_of[op.name] = draft
        return True

    def _adds_loops(self, op: Operator, space: IndexSpace, draft: _Draft) -> bool:
        """Return whether an operator adds a loop, or copies of operands, that its group could not split."""
        made = {n for o in draft.operators for n in o.outputs}
        known = made | draft.reads
        fed = {loop for operand in space.reads if operand.tensor in known for loop in operand.loops}
        added = {loop for operand in space.writes for loop in operand.loops} - fed
        if not any(space.dims[loop].splittable for loop in added):
            return False
        copies = added.isdisjoint(loop for operand in space.reads for loop in operand.loops)
        learns = any(self.graph.tensors[n].requires_grad for n in op.outputs)
        return draft.operators[0].name in self.independent or (copies and learns)

    def _follow(self, strategy: AxisStrategy, op: Operator) -> AxisStrategy | None:
        """Return the strategy extended to ``op``, or None if ``op`` cannot be split to match."""
        space = self.atoms.spaces[op.name]
        choice = None
        for operand in space.reads:
            if operand.tensor not in strategy.placements:
                continue
            code = strategy.placements[operand.tensor]
            candidate = _choice_for(space, operand.tensor, code)
            if candidate is None:
                return None
            # A broadcast operand without the split dim gives NONE; another operand may give more.
            if choice is None or choice == NONE:
                choice = candidate
        if choice is None:
            return None
        # A follower that is not linear in all its operands, or adds a parameter, ends the partial sum.
        if choice == PARTIAL and not self._passes_partial(space):
            return None
        placements = self._placements(space, choice)
        if placements is None:
            return None
        for name, code in placements.items():
            if strategy.placements.get(name, code) != code:
                return None
        return replace(
            strategy,
            choices={**strategy.choices, op.name: choice},
            placements={**strategy.placements, **placements},
        )

    # -- strategies -------------------------------------------------------------------------------

    def _passes_partial(self, space: IndexSpace) -> bool:
        kinds = {self.graph.tensors[o.tensor].kind for o in space.reads}
        return space.linear and kinds == {"activation"}

    def _placements(self, space: IndexSpace, choice: int) -> dict[str, int] | None:
        """Return tensor -> placement under a choice; None if a tensor needs two, or an input is partial."""
        placements: dict[str, int] = {}
        for operands, written in ((space.reads, False), (space.writes, True)):
            for operand in operands:
                tensor = self.graph.tensors[operand.tensor]
                code = canonical(tensor, operand_placement(space, operand, choice, written=written))
                if placements.setdefault(operand.tensor, code) != code:
                    return None
                if code == PARTIAL and not written and tensor.kind != "activation" and not operand.added:
                    return None
        return placements

    def _anchor_strategies(self, op: Operator) -> list[AxisStrategy]:
        space = self.atoms.spaces[op.name]
        choices: list[tuple[Label, int]] = [(WHOLE, NONE)]
        choices += [(Label.parse(dim.name), i) for i, dim in enumerate(space.dims) if dim.splittable]
        if self._passes_partial(space) and any(self.graph.tensors[n].requires_grad for n in op.inputs()):
            choices.append((PASSED_ON, PARTIAL))
        learns = any(self.graph.tensors[n].requires_grad for n in op.outputs)
        if op.name in self.independent and learns and space.additive:
            # Nothing of the batch enters, so every rank computes the same value; readers that split the batch
            # give it partial gradients, which add up, as for a parameter.
            choices.append((PARTIAL_GRADIENT, PARTIAL_GRAD))
        strategies = []
        for label, choice in choices:
            placements = self._placements(space, choice)
            if placements is None:
                continue
            strategy = AxisStrategy(label, {op.name: choice}, placements)
            strategies.append(strategy)
            if choice >= 0 and len(op.outputs) == 1 and placements[op.outputs[0]] == PARTIAL:
                strategies += self._resolved(strategy, op.outputs[0])
        return strategies

    def _resolved(self, strategy: AxisStrategy, output: str) -> list[AxisStrategy]:
        codes, position = [REPLICATE], 0
        for dim in self.atoms.atoms[output]:
            codes += [position + i for i in range(min(len(dim), _MAX_ATOMS_PER_LOOP))]
            position += len(dim)
        return [
            replace(
                strategy,
                label=strategy.label.resolved(code),
                placements={**strategy.placements, output: code},
                resolve=(output, code),
            )
            for code in codes
        ]

    # -- result -----------------------------------------------------------------------------------

    def _finish(self) -> GroupGraph:
        readers, users = Counter[str](), Counter[str]()
        for draft in self.drafts:
            for name in dict.fromkeys(n for op in draft.operators for n in op.inputs()):
                kind = self.graph.tensors[name].kind
                if kind == "activation" and self.draft_of[self.graph.producer[name].name] is not draft:
                    readers[name] += 1
                elif kind == "parameter":
                    users[name] += 1
        # A buffer's new value leaves the graph as an output does.
        final = set(self.graph.outputs) | set(self.graph.mutations.values())
        groups = tuple(self._group(draft, readers, users, final) for draft in self.drafts)
        group_of = {op.name: g for g in groups for op in g.operators}
        hubs = tuple(name for name, count in readers.items() if count > 1)
        shared = tuple(name for name, count in users.items() if count > 1)
        return GroupGraph(self.atoms, groups, hubs, shared, group_of)

    def _group(self, draft: _Draft, readers: Counter[str], users: Counter[str], final: set[str]) -> Group:
        tensors = self.graph.tensors
        names = list(dict.fromkeys(n for op in draft.operators for n in op.inputs()))
        made = [n for op in draft.operators for n in op.outputs]
        parameters = [n for n in names if tensors[n].kind == "parameter"]
        return Group(
            name=draft.operators[0].name,
            operators=tuple(draft.operators),
            reads=tuple(n for n in names if tensors[n].kind == "activation" and n not in made),
            parameters=tuple(n for n in parameters if users[n] == 1),
            shared=tuple(n for n in parameters if users[n] > 1),
            free=tuple(n for n in names if tensors[n].kind in ("input", "constant", "buffer")),
            writes=tuple(n for n in made if n in readers or n in final),
            strategies=_useful(draft.strategies),
        )


def _choice_for(space: IndexSpace, tensor: str, code: int) -> int | None:
    if code < 0:
        return code
    loop = next(operand.loops[code] for operand in space.reads if operand.tensor == tensor)
    return loop if space.dims[loop].splittable else None


def _ways(strategies: Iterable[AxisStrategy]) -> set[str]:
    return {s.label.loop for s in strategies if s.label != PASSED_ON}


def _useful(strategies: list[AxisStrategy]) -> tuple[AxisStrategy, ...]:
    # A resolution serves followers that cannot read a partial sum. If all of them can, the edge behind the
    # group reduces it.
    partial = {s.label.dim for s in strategies if s.resolve is None}
    atoms: dict[str, list[str]] = {}
    kept = []
    for s in strategies:
        atom = s.label.dim
        seen = atoms.setdefault(s.label.loop, [])
        if atom not in seen:
            seen.append(atom)
        if seen.index(atom) < _MAX_ATOMS_PER_LOOP and (s.resolve is None or atom not in partial):
            kept.append(s)
    return tuple(kept)


def batch_inputs(graph: OperatorGraph) -> tuple[str, ...]:
    """Return the inputs whose first dim is the batch: as long as the first input's first dim."""
    inputs = [graph.tensors[name] for name in graph.inputs]
    batch = next((t.shape[0] for t in inputs if t.shape), 0)
    # With a batch of one, every dim of size 1 would be mistaken for it, and there is nothing to split.
    return tuple(t.name for t in inputs if t.shape and t.shape[0] == batch and batch > 1)


def _input_independent(atoms: AtomGraph) -> frozenset[str]:
    graph = atoms.graph
    dependent = set(batch_inputs(graph))
    independent = set()
    for op in graph.operators:
        if dependent.intersection(op.inputs()):
            dependent.update(op.outputs)
        else:
            independent.add(op.name)
    return frozenset(independent)


def group_operators(atoms: AtomGraph) -> GroupGraph:
    """Partition the operators of a graph into groups that share one configuration."""
    return _Grouping(atoms, frozenset(_Grouping(atoms).colocate().hubs)).colocate()


@dataclass(frozen=True)
class LinearProduct:
    """A linear operator and its operands.

    Attributes:
        operator, group: the names of the operator and of its group.
        read, weight, bias: names of its operands; "" if there is no bias.
        transposed: whether the weight's shape is (outputs, inputs), not (inputs, outputs).
    """

    operator: str
    group: str
    read: str
    weight: str
    bias: str
    transposed: bool


def products_beside(graph: GroupGraph) -> Mapping[str, LinearProduct]:
    """Return activation -> its first reader, if that is linear: its weight's gradient can hide a reduction of
    the activation's gradient."""
    source = graph.atoms.graph
    if not source.training:
        return {}
    readers: dict[str, Group] = {}
    for group in graph.groups:
        for name in group.reads:
            readers.setdefault(name, group)
    leaving = {*source.outputs, *source.mutations.values()}
    learning = {n: g for n, g in readers.items() if n not in leaving and source.tensors[n].requires_grad}
    products = {name: reader_product(source, group, name) for name, group in learning.items()}
    return {name: product for name, product in products.items() if product is not None}


def reader_product(source: OperatorGraph, group: Group, name: str) -> LinearProduct | None:
    """Return a group's linear operator if it is the group's only reader of a tensor, else None."""
    product = _linear_product(source, group.anchor, group.name)
    if product is None or product.read != name:
        return None
    return product if sum(op.inputs().count(name) for op in group.operators) == 1 else None


def _linear_product(source: OperatorGraph, op: Operator, group: str) -> LinearProduct | None:
    places = spec_of(op.target).linear
    # Other arguments scale its operands.
    if places is None or set(op.kwargs) - {"bias"}:
        return None
    arguments = (*op.args, *op.kwargs.values())
    operands = [arguments[place] if place < len(arguments) else None for place in places[:3]]
    read, weight, bias = (operand.name if isinstance(operand, Ref) else "" for operand in operands)
    if not read or not weight:
        return None
    tensors = source.tensors
    parameter = tensors[weight]
    learns = parameter.kind == "parameter" and parameter.requires_grad
    if not learns or len(parameter.shape) != 2 or len(tensors[read].shape) < 2:
        return None
    if bias and (len(tensors[bias].shape) != 1 or bias in (read, weight)):
        return None
    return LinearProduct(op.name, group, read, weight, bias, places.transposed)


def is_one_reduction(backward: Sequence[ReshardingStep], mesh: Sequence[int]) -> bool:
    """Return whether a gradient's resharding is a single reduction over several ranks."""
    if len(backward) != 1 or backward[0].kind not in ("all_reduce", "reduce_scatter"):
        return False
    return any(axis > 0 and mesh[axis] > 1 for axis in backward[0].axes)


def takes_over_hub(
    own: tuple[Sequence[ReshardingStep], Sequence[ReshardingStep]], *, again: bool, inside: bool
) -> bool:
    """Return whether the first reader of a hub can return the sum of all its readers' gradients.

    A hub is a tensor with several readers, which all start from one layout of it. If its first reader returns
    the sum, the reader's weight gradient can overlap with the reduction of that sum.

    Args:
        own: the (forward, backward) resharding steps from the hub's layout to that of the first reader.
        again: whether the first reader is recomputed.
        inside: whether the hub is made in the first reader's recomputed block.
    """
    # A recomputed reader would pass the hub on once more to readers outside its region.
    return not own[0] and not own[1] and (inside or not again)
