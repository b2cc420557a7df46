"""The graph of a placed plan: operators that each run on one device, and the tensors between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from tensoropt.errors import PlanError, TensorOptError
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, local_shape
from tensoropt.ops.localise import localise
from tensoropt.placement.batch_norms import in_steps, step_groups, steps_of_pieces
from tensoropt.sharding import configurations
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph


class GroupSplit(NamedTuple):
    """A cut of an operator group into pieces: the name of the loop that is cut, and the number of pieces."""

    label: str
    pieces: int


Splits = Mapping[str, GroupSplit]
"""Name of an operator group -> its cut into pieces."""

_WHOLE = None
"""The ``code`` of a :class:`Value` that is a whole tensor."""


class OperatorKind(StrEnum):
    """Kinds of placed operators; a ``VARIABLE`` stores a parameter and hands it out to other operators."""

    GROUP = "group"
    PIECE = "piece"
    SPLIT = "split"
    JOIN = "join"
    VARIABLE = "variable"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph, or one piece of it.

    Attributes:
        code: the index of the dim factor (atom) that is cut; ``PARTIAL`` for a term of a sum; None if whole.
        count, index: the number of pieces, and the index of this piece.
    """

    tensor: str
    code: int | None = _WHOLE
    count: int = 1
    index: int = 0

    @property
    def name(self) -> str:
        if self.code is _WHOLE:
            return self.tensor
        cut = "sum" if self.code == PARTIAL else f"atom {self.code}"
        return f"{self.tensor}[{self.index + 1}/{self.count} of {cut}]"

    @property
    def pieces(self) -> tuple[Value, ...]:
        """All pieces of the same cut, in order."""
        return tuple(replace(self, index=index) for index in range(self.count))


@dataclass(frozen=True)
class PlacedOperator:
    """An operator group, a piece of one, or an operator that splits, joins or stores; it runs on one device.

    Attributes:
        name: a unique name; a whole operator group has the group's name.
        reads, writes: the tensors, or pieces of tensors, that the operator reads and makes.
        configuration: the dims that it splits over a mesh of (micro-batches, number of pieces).
        index, count: the index of this piece, and the number of pieces.
        parameters: the parameters that it stores on its device.
        micro_batches: the number of times that it runs per step.
    """

    name: str
    kind: OperatorKind
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    group: Group | None = field(default=None, repr=False)
    configuration: configurations.Configuration | None = field(default=None, repr=False)
    index: int = 0
    count: int = 1
    parameters: tuple[str, ...] = ()
    micro_batches: int = 1

    @property
    def mesh(self) -> tuple[int, int]:
        return (self.micro_batches, self.count)


@dataclass(frozen=True)
class PlacedGraph:
    """Placed operators in an order of execution.

    Attributes:
        groups: the graph of operator groups, where a batch norm that is cut consists of three.
        holder: parameter -> the name of the operator that stores it.
        batch_codes: tensor -> the index of the dim factor (atom) that micro-batches cut; negative if none.
        steps: name of the group that computes a batch norm's sums or statistics -> the batch norm's name.
    """

    groups: GroupGraph
    splits: Splits
    operators: tuple[PlacedOperator, ...]
    holder: Mapping[str, str]
    micro_batches: int = 1
    batch_codes: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.groups.atoms.graph.tensors

    @cached_property
    def values(self) -> Mapping[str, Value]:
        return {value.name: value for op in self.operators for value in op.writes}

    @cached_property
    def references(self) -> tuple[tuple[int, ...], ...]:
        """For each parameter or buffer with several users, the indices of these operators, owner first."""
        owners: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        new_of = {new: name for name, new in self.groups.atoms.graph.mutations.items()}
        for number, op in enumerate(self.operators):
            free = op.group.free if op.group is not None else ()
            for name in dict.fromkeys((*(value.tensor for value in op.reads), *free)):
                readers.setdefault(name, []).append(number)
            own = op.parameters if op.kind == OperatorKind.VARIABLE else ()
            made = (new_of[value.tensor] for value in op.writes if value.tensor in new_of)
            owners.update((name, number) for name in (*own, *made))
        found = (tuple(dict.fromkeys((owner, *readers.get(name, ())))) for name, owner in owners.items())
        return tuple(operators for operators in found if len(operators) > 1)

    def whole_of(self, operator: int) -> str | None:
        """Return the name of an operator's group in the model; None if it only splits, joins or stores."""
        group = self.operators[operator].group
        return self.steps.get(group.name, group.name) if group is not None else None

    def shape(self, value: Value) -> tuple[int, ...]:
        atoms = self.groups.atoms.atoms[value.tensor]
        if value.code is _WHOLE or value.code < 0:
            code = self.batch_codes.get(value.tensor, REPLICATE)
            return local_shape(atoms, (code,), (self.micro_batches,))
        return local_shape(atoms, (value.code,), (value.count,), (value.index,))

    def bytes(self, value: Value) -> int:
        """Return the size in bytes of a tensor or piece on its device, in one micro-batch."""
        return prod(self.shape(value)) * self.tensors[value.tensor].element_bytes


def split_choices(graph: GroupGraph, group: Group, most: int) -> tuple[GroupSplit, ...]:
    """Return the possible cuts of an operator group into at most ``most`` pieces.

    Cuts are left out if an operator's pieces would have to reduce (add up) values among them while they run.
    Two such cuts are possible all the same. A loss whose pieces only add up numbers of targets gets these
    before the step. A batch norm is replaced by three operators, between which its pieces' sums are added.
    """
    choices = []
    for strategy in group.strategies:
        if _pieces_stand_alone(graph, group, strategy):
            for count in range(2, most + 1):
                if _divides(graph, group, strategy, count):
                    choices.append(GroupSplit(str(strategy.label), count))
    return tuple(choices)


def _pieces_stand_alone(graph: GroupGraph, group: Group, strategy: AxisStrategy) -> bool:
    # A strategy that resolves a partial sum needs the other pieces, and one that splits nothing makes none.
    if strategy.resolve or not strategy.label.splits:
        return False
    spaces = graph.atoms.spaces
    if any(c >= 0 and spaces[name].dims[c].along for name, c in strategy.choices.items()):
        return False
    codes, operators, reads, writes = strategy.placements, group.operators, group.reads, group.writes
    if steps := steps_of_pieces(graph, group, strategy):
        # Running statistics are read and made whole, beside the pieces.
        operators = operators[1:]
        inside = {name for op in operators for name in op.inputs()}
        reads = tuple(n for n in reads if n in inside or n not in steps.statistics.inputs())
        writes = tuple(n for n in writes if n not in steps.statistics.outputs)
    parameters = {*group.parameters, *group.shared}
    if any(codes[n] < 0 and codes[n] != PARTIAL_GRAD for n in reads):
        return False
    if any(codes[n] < 0 and codes[n] not in (PARTIAL_GRAD, PARTIAL) for n in parameters):
        return False
    if any(codes[n] < 0 and codes[n] != PARTIAL for n in writes):
        return False
    configuration = configurations.Configuration(group, (group.unsplit, strategy))
    # Two pieces represent any number: which collectives a call needs does not depend on how many there are.
    # Collectives that only count targets are allowed, because counts are known before the step.
    calls = (localise(configuration.placed(op.name, graph.atoms, (1, 2), None)) for op in operators)
    return all(inner.count for call in calls for inner in call.collectives)


def _divides(graph: GroupGraph, group: Group, strategy: AxisStrategy, count: int) -> bool:
    return configurations.fits(graph.atoms, group, (group.unsplit, strategy), (1, count), small_parts=False)


def placed_graph(
    graph: GroupGraph,
    splits: Mapping[str, tuple[str, int]] | None = None,
    micro_batches: int = 1,
    apart: Collection[str] = (),
) -> PlacedGraph:
    """Return the placed graph of a model, with some operator groups cut, or with the batch in micro-batches.

    Args:
        splits: operator group -> (label of the loop that is cut, number of pieces).
        micro_batches: the number of micro-batches, each of consecutive samples.
        apart: parameters that become operators of their own although only one operator reads them.

    Raises:
        TensorOptError: there is no such group, or it has no such cut; the message lists the possible ones.
        PlanError: the model cannot run in so many micro-batches, or several are combined with ``splits``.
    """
    if micro_batches > 1 and splits:
        first = next(iter(splits))
        raise PlanError(
            f"a placed plan of {micro_batches} micro-batches cannot cut operators into pieces as well, but "
            f"{first} is cut; use 1 micro-batch, or leave operators whole"
        )
    given = {name: GroupSplit(*how) for name, how in (splits or {}).items()}
    graph = in_steps(graph, _cut_batch_norms(graph, given))
    cut, steps = dict(given), dict[str, str]()
    for name, (sums, statistics) in step_groups(graph).items():
        steps |= {sums: name, statistics: name}
        if name in given:
            cut[sums] = given[name]
    return replace(_GraphBuilder(graph, cut, micro_batches, apart).build(), splits=given, steps=steps)


def _cut_batch_norms(graph: GroupGraph, splits: Splits) -> list[str]:
    return [
        group.name
        for group in graph.groups
        if group.name in splits
        and any(
            str(strategy.label) == splits[group.name].label and steps_of_pieces(graph, group, strategy)
            for strategy in group.strategies
        )
    ]


def _batch_strategies(graph: GroupGraph, micro_batches: int) -> Mapping[str, AxisStrategy]:
    if micro_batches == 1:
        return {group.name: group.unsplit for group in graph.groups}
    try:
        strategies = configurations.micro_batch_strategies(graph)
    except configurations.MicroBatchRefused as refusal:
        raise PlanError(f"{micro_batches} micro-batches are refused: {refusal}; use 1 micro-batch") from None
    tensors = graph.atoms.graph.tensors
    for name, code in configurations.batch_placements(graph).items():
        if code == 0 and (samples := tensors[name].shape[0]) % micro_batches:
            raise PlanError(
                f"{micro_batches} micro-batches do not divide the {samples} samples of {name}; use a divisor"
            )
    return strategies


class _GraphBuilder:
    def __init__(self, graph: GroupGraph, splits: Splits, micro_batches: int, apart: Collection[str]):
        self.graph, self.splits = graph, splits
        self.micro, self.micro_batches = _batch_strategies(graph, micro_batches), micro_batches
        self.configurations: dict[str, configurations.Configuration] = {}
        self.operators: list[PlacedOperator] = []
        self.made: set[Value] = set()
        self.cut: dict[str, Value] = {}
        self.holder: dict[str, str] = {}
        names = {g.name for g in graph.groups}
        for name in splits:
            if name not in names:
                raise TensorOptError(f"cannot split '{name}': the model has no operator group of this name")
        self.users = self._users()
        # A parameter that several operators read, or pieces of one, can lie with only one of them: it becomes
        # an operator that hands it out to all.
        self.variables = {
            p
            for p, groups in self.users.items()
            if p in apart or len(groups) > 1 or any(g.name in splits for g in groups)
        }

    def _users(self) -> dict[str, list[Group]]:
        users: dict[str, list[Group]] = {}
        for group in self.graph.groups:
            for name in (*group.parameters, *group.shared):
                users.setdefault(name, []).append(group)
        return users

    def _count(self, group: Group) -> int:
        return self.splits[group.name].pieces if group.name in self.splits else 1

    def configuration(self, group: Group) -> configurations.Configuration:
        if group.name not in self.configurations:
            strategy = group.unsplit
            if group.name in self.splits:
                strategy = self._strategy(group, *self.splits[group.name])
            self.configurations[group.name] = configurations.Configuration(
                group, (self.micro[group.name], strategy)
            )
        return self.configurations[group.name]

    def _strategy(self, group: Group, label: str, count: int) -> AxisStrategy:
        for strategy in group.strategies:
            if (
                str(strategy.label) == label
                and count > 1
                and _pieces_stand_alone(self.graph, group, strategy)
                and _divides(self.graph, group, strategy, count)
            ):
                return strategy
        labels = dict.fromkeys(label for label, _ in split_choices(self.graph, group, max(count, 2)))
        ways = f"it can be split along {', '.join(labels)}" if labels else "it cannot be split"
        raise TensorOptError(f"cannot split '{group.name}' along {label} into {count}; {ways}")

    # -- values -----------------------------------------------------------------------------------

    def _value(self, group: Group, name: str, index: int) -> Value:
        """Return the part of a tensor that piece ``index`` of an operator group reads or makes."""
        count = self._count(group)
        if count == 1:
            return Value(name)
        code = self.configuration(group).layout(name)[1]
        if code < 0 and code != PARTIAL:
            return Value(name)
        return Value(name, code, count, index)

    def _read(self, group: Group, name: str, index: int) -> tuple[Value, ...]:
        value = self._value(group, name, index)
        if value.code == PARTIAL:
            # A term of a sum, such as a bias, is added once: by the first piece.
            return (Value(name),) if index == 0 else ()
        return (value,)

    # -- operators --------------------------------------------------------------------------------

    def build(self) -> PlacedGraph:
        for group in self.graph.groups:
            for name in (*group.parameters, *group.shared):
                if name in self.variables and name not in self.holder:
                    self._variable(name)
            self._group(group)
        self._outputs()
        codes: dict[str, int] = {}
        for group in self.graph.groups if self.micro_batches > 1 else ():
            codes.update((name, self.micro[group.name].placements[name]) for name in group.writes)
        operators = tuple(self.operators)
        return PlacedGraph(self.graph, self.splits, operators, self.holder, self.micro_batches, codes)

    def _variable(self, name: str) -> None:
        wanted: dict[Value, None] = {}
        for group in self.users[name]:
            for index in range(self._count(group)):
                wanted |= dict.fromkeys(self._read(group, name, index))
        self.holder[name] = f"variable {name}"
        self._add(self.holder[name], OperatorKind.VARIABLE, (), wanted, parameters=(name,))

    def _add(
        self, name: str, kind: OperatorKind, reads: Iterable[Value], writes: Iterable[Value], **more: Any
    ) -> None:
        op = PlacedOperator(name, kind, tuple(reads), tuple(writes), micro_batches=self.micro_batches, **more)
        self.operators.append(op)
        self.made.update(op.writes)

    def _group(self, group: Group) -> None:
        count, configuration = self._count(group), self.configuration(group)
        own = tuple(p for p in group.parameters if p not in self.variables)
        self.holder.update(dict.fromkeys(own, group.name))
        names = [*group.reads, *(p for p in (*group.parameters, *group.shared) if p in self.variables)]
        for index in range(count):
            for name in names:
                for value in self._read(group, name, index):
                    self._make(value)
        for index in range(count):
            self._add(
                group.name if count == 1 else f"{group.name}[{index + 1}/{count}]",
                OperatorKind.GROUP if count == 1 else OperatorKind.PIECE,
                (value for name in names for value in self._read(group, name, index)),
                (self._value(group, name, index) for name in group.writes),
                group=group,
                configuration=configuration,
                index=index,
                count=count,
                parameters=own,
            )
        for name in group.writes:
            self.cut[name] = self._value(group, name, 0)

    def _make(self, value: Value) -> None:
        if value in self.made:
            return
        whole = Value(value.tensor)
        # A tensor is joined from its maker's pieces once, however many readers are cut differently.
        if whole not in self.made:
            source = self.cut[value.tensor]
            self._add(f"join {value.tensor}", OperatorKind.JOIN, source.pieces, (whole,), count=source.count)
        if value != whole:
            name = f"split {value.tensor} along atom {value.code} in {value.count}"
            self._add(name, OperatorKind.SPLIT, (whole,), value.pieces, count=value.count)

    def _outputs(self) -> None:
        graph = self.graph.atoms.graph
        for name in (*graph.outputs, *graph.mutations.values()):
            if name in self.cut:
                self._make(Value(name))
