"""All operators of a graph, each in every way its rule can split it, through the rule checker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensoropt.graph import FLOATING, Operator, OperatorGraph
from tensoropt.ops import registry
from tensoropt.ops.calls import MICRO_AXIS, OperatorShard
from tensoropt.ops.index_space import NONE, Operand, canonical, operand_placement
from tensoropt.ops.layouts import PARTIAL, chunk
from tensoropt.ops.localise import localise
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.atoms import AtomGraph, refine_graph
from tensoropt.sharding.discovery.discover import discover
from tests.sharding.rule_check import Mismatch, check_choices


@dataclass
class Report:
    """What :func:`check_graph` found.

    Attributes:
        unknown: target -> number of operators without a rule, and of which discovery found nothing.
        discovered: target -> number of operators without a rule that discovery can split.
        mismatches: claims that do not hold.
    """

    unknown: Counter[str] = field(default_factory=Counter)
    discovered: Counter[str] = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"no rule: {target} ({count})" for target, count in self.unknown.most_common()]
        return "\n".join([*lines, *(f"wrong: {mismatch}" for mismatch in self.mismatches)])


def check_operator(op: Operator, atoms: AtomGraph, choice: int, parts: int = 2) -> Mismatch | None:
    """Whether splitting ``op`` by ``choice`` over ``parts`` ranks gives what the whole operator gives.

    Args:
        choice: a loop dim of the operator's refined space, or NONE, PARTIAL, PARTIAL_GRAD.

    Returns:
        None when outputs and gradients recombine, else the first claim that does not hold.
    """
    return check_choices(op, atoms, (NONE, choice), (1, parts))


def is_offered(op: Operator, atoms: AtomGraph, choice: int) -> bool:
    """Whether the choice exists: a tensor read twice must lie in one way only."""
    space, seen = atoms.spaces[op.name], dict[str, int]()
    for operand in space.reads:
        code = canonical(
            atoms.graph.tensors[operand.tensor], operand_placement(space, operand, choice, written=False)
        )
        if seen.setdefault(operand.tensor, code) != code:
            return False
    return True


def missing_splits(op: Operator, graph: OperatorGraph) -> Iterator[str]:
    """What discovery can split and the operator's rule does not."""
    space = registry.index_space(op, graph)
    names = tuple(dict.fromkeys(op.inputs()))
    if not space.known or not names:
        return
    cut = {
        (operand.tensor, dim)
        for operand in space.reads
        for dim, loops in enumerate(operand.dims)
        if any(space.dims[loop].splittable for loop in loops)
    }
    for split in discover(op, graph).splits:
        if not any((names[i], d) in cut for i, d in enumerate(split.reads) if d is not None):
            yield f"{op.target}: {split}"


def check_graph(
    graph: OperatorGraph | AtomGraph,
    parts: Sequence[int] = (2, 4),
    thorough: bool = False,
    seen: set[Any] | None = None,
) -> Report:
    """Check every operator of a graph once per signature, in every way its rule can split it.

    Args:
        parts: numbers of ranks tried where they divide; loops that may be uneven are cut unevenly as well.
        thorough: also two axes at once, nested on one loop and on two different ones. Kernels are
            always checked on two axes and on the micro-batch axis, because they see coordinates.
        seen: signatures that were checked before, to which those of this graph are added.
    """
    atoms = graph if isinstance(graph, AtomGraph) else refine_graph(graph)
    report, seen = Report(), set[Any]() if seen is None else seen
    for op in atoms.graph.operators:
        space = atoms.spaces[op.name]
        if not space.known:
            report.unknown[op.target] += 1
        if space.discovered:
            report.discovered[op.target] += 1
        loops = [i for i, dim in enumerate(space.dims) if dim.splittable and is_offered(op, atoms, i)]
        signature = _signature(op, atoms)
        if signature in seen:
            continue
        seen.add(signature)
        found = [check_choices(op, atoms, *each) for each in _splits(op, atoms, loops, parts, thorough)]
        report.mismatches += [mismatch for mismatch in found if mismatch is not None]
    return report


def _splits(
    op: Operator, atoms: AtomGraph, loops: list[int], parts: Sequence[int], thorough: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    space, graph = atoms.spaces[op.name], atoms.graph
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((NONE, NONE), (1, 2))]

    def divides(loop: int, count: int) -> bool:
        return space.dims[loop].size % count == 0

    for loop in loops:
        found += [((NONE, loop), (1, count)) for count in parts if divides(loop, count)]
        dim = space.dims[loop]
        if dim.uneven or dim.small_parts:
            unequal = [n for n in (3, 5, 7, 2) if dim.size % n and chunk(dim.size, n, n - 1)[1] > 0]
            found += [((NONE, loop), (1, count)) for count in unequal[:1]]
        # A kernel sees coordinates and axes; other calls see smaller tensors only, for which one axis is
        # enough.
        kernel = localise(OperatorShard(op, atoms, (NONE, loop), (1, 2))).is_kernel and divides(loop, 2)
        if kernel and _follows_micro_batches(op, atoms, loop):
            found.append(((loop, NONE), (2, 1)))
            if dim.small_parts and dim.size % 3 and chunk(dim.size // 2, 3, 2)[1] > 0:
                found.append(((loop, loop), (2, 3)))
        if kernel or thorough:
            found += [
                ((NONE, loop, other), (1, 2, 2))
                for other in loops
                if (divides(loop, 4) if other == loop else divides(loop, 2) and divides(other, 2))
            ]
    operands: tuple[Operand, ...] = space.reads
    activations = all(
        graph.tensors[o.tensor].kind == "activation" and graph.tensors[o.tensor].dtype in FLOATING
        for o in operands
    )
    if space.linear and activations and operands:
        found.append(((NONE, PARTIAL), (1, 2)))
    return found


def _follows_micro_batches(op: Operator, atoms: AtomGraph, loop: int) -> bool:
    """Pieces in time cannot talk to each other, and batch statistics refuse them."""
    call = localise(OperatorShard(op, atoms, (loop, NONE), (2, 1)))
    return not spec_of(op.target).batch_statistics and not any(MICRO_AXIS in c.axes for c in call.collectives)


def _signature(op: Operator, atoms: AtomGraph) -> Any:
    """Everything that decides what is checked, without names."""
    tensors, number = atoms.graph.tensors, dict[str, int]()

    def described(name: str) -> Any:
        t = tensors[name]
        index = number.setdefault(name, len(number))
        constant = name if t.kind == "constant" else ""
        return index, t.shape, t.dtype, t.kind == "activation", t.requires_grad, atoms.atoms[name], constant

    names = [described(n) for n in (*op.inputs(), *op.outputs)]
    static = repr((op.args, sorted(op.kwargs.items())))
    # The longest first, so that a name that is part of another one is not replaced inside it.
    for name in sorted(number, key=len, reverse=True):
        static = static.replace(f"'{name}'", str(number[name]))
    space = atoms.spaces[op.name]
    operands = [(o.dims, o.added, o.synced) for o in (*space.reads, *space.writes)]
    return op.target, static, repr(names), space.dims, repr(operands)
