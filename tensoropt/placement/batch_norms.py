"""Replace each batch norm that is cut along the batch by groups for sums, statistics and the rest.

Sums and the rest can run in pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tensoropt.graph import Operator, Tensor
from tensoropt.ops.families.batch_norm_steps import BatchNormSteps, batch_norm_steps, steps_before
from tensoropt.ops.index_space import IndexSpace, canonical, operand_placement
from tensoropt.sharding.atoms import AtomGraph, refine_in_place_of
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph


def steps_of_pieces(graph: GroupGraph, group: Group, strategy: AxisStrategy) -> BatchNormSteps | None:
    """Return the steps of a batch norm whose batch ``strategy`` cuts; None if it needs or can have none."""
    op, tensors = group.anchor, graph.atoms.graph.tensors
    steps = batch_norm_steps(op, tensors) if strategy.label.loop == "batch" else None
    # Statistics without a gradient would have the same placement whole as read by pieces.
    if steps is None or not tensors[op.args[0].name].requires_grad:
        return None
    # Other steps make the results beside the normalised input, for other groups only, or not at all.
    inside = {name for other in group.operators[1:] for name in other.inputs()}
    apart = inside.isdisjoint(op.outputs[1:]) and set(group.writes).isdisjoint(op.outputs[1:3])
    return steps if apart else None


def in_steps(graph: GroupGraph, names: Collection[str]) -> GroupGraph:
    """Return the graph with each named batch norm replaced by groups for sums, statistics and the rest."""
    if not names:
        return graph
    source = graph.atoms.graph
    steps: dict[str, BatchNormSteps] = {}
    for name in names:
        found = batch_norm_steps(source.by_name[name], source.tensors)
        assert found is not None, f"{name} is no batch norm in training"
        steps[name] = found
    dropped = {output for name in names for output in source.by_name[name].outputs[1:3]}
    tensors = {name: tensor for name, tensor in source.tensors.items() if name not in dropped}
    tensors.update((tensor.name, tensor) for each in steps.values() for tensor in each.tensors)
    operators = [o for op in source.operators for o in (steps[op.name][:3] if op.name in steps else (op,))]
    opened = replace(source, tensors=tensors, operators=tuple(operators))
    atoms = refine_in_place_of(graph.atoms, opened, [op for each in steps.values() for op in each[:3]])
    groups = tuple(
        new
        for group in graph.groups
        for new in (_groups(atoms, group, steps[group.name]) if group.name in steps else (group,))
    )
    # Sums and normalised values are made of the same input.
    read_twice = (each.sums.args[0].name for each in steps.values())
    activations = (name for name in read_twice if tensors[name].kind == "activation")
    return replace(
        graph,
        atoms=atoms,
        groups=groups,
        hubs=tuple(dict.fromkeys((*graph.hubs, *activations))),
        group_of={op.name: group for group in groups for op in group.operators},
    )


def _groups(atoms: AtomGraph, group: Group, steps: BatchNormSteps) -> tuple[Group, Group, Group]:
    sums, statistics = steps.tensors
    later = [name for name in group.writes if name in steps.statistics.outputs]
    rest = tuple(name for name in group.writes if name not in later)
    only_whole = (group.unsplit,)
    return (
        _group(atoms, group, (steps.sums,), (sums.name,), group.strategies, alone=True),
        _group(atoms, group, (steps.statistics,), (statistics.name, *later), only_whole, alone=True),
        _group(atoms, group, (steps.normalised, *group.operators[1:]), rest, group.strategies),
    )


def _group(
    atoms: AtomGraph,
    of: Group,
    operators: tuple[Operator, ...],
    writes: tuple[str, ...],
    strategies: Sequence[AxisStrategy],
    *,
    alone: bool = False,
) -> Group:
    """Return a group of ``operators``. Unless ``alone``, all but the first are split as in group ``of``."""
    tensors = atoms.graph.tensors
    names = dict.fromkeys(name for op in operators for name in op.inputs())
    made = {name for op in operators for name in op.outputs}
    anchor = operators[0]
    return Group(
        name=anchor.name,
        operators=operators,
        reads=tuple(n for n in names if tensors[n].kind == "activation" and n not in made),
        parameters=tuple(n for n in names if n in of.parameters),
        shared=tuple(n for n in names if n in of.shared),
        free=tuple(n for n in names if tensors[n].kind in ("input", "constant", "buffer")),
        writes=writes,
        strategies=tuple(_strategy(s, s.choices[of.name], anchor, atoms, alone) for s in strategies),
    )


def _strategy(
    old: AxisStrategy, choice: int, anchor: Operator, atoms: AtomGraph, alone: bool
) -> AxisStrategy:
    space, tensors = atoms.spaces[anchor.name], atoms.graph.tensors
    if choice >= 0:  # a loop, whose number may differ
        choice = [dim.name for dim in space.dims].index(old.label.dim)
    choices, placements = {anchor.name: choice}, _placements(space, tensors, choice)
    if not alone:
        choices, placements = {**old.choices, **choices}, {**old.placements, **placements}
    return AxisStrategy(old.label, choices, placements)


def _placements(space: IndexSpace, tensors: Mapping[str, Tensor], choice: int) -> dict[str, int]:
    return {
        operand.tensor: canonical(
            tensors[operand.tensor], operand_placement(space, operand, choice, written=written)
        )
        for operands, written in ((space.reads, False), (space.writes, True))
        for operand in operands
    }


def step_groups(graph: GroupGraph) -> dict[str, tuple[str, str]]:
    """Return batch norm -> the names of its groups for sums and for statistics, for each batch norm that
    :func:`in_steps` has replaced by three groups."""
    producer = graph.atoms.graph.producer
    before = {group.name: steps_before(group.anchor, producer) for group in graph.groups}
    return {name: (steps[0].name, steps[1].name) for name, steps in before.items() if steps is not None}
