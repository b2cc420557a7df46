"""Configurations: how each mesh axis splits one group of operators, and the layouts of its tensors.

A mesh is ``(micro-batches, axis sizes...)``. Along the micro-batch axis, every group is split along the batch
dim of the inputs (:func:`micro_batch_strategies`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tensoropt.graph import Operator, OperatorGraph
from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.families.losses import is_mean
from tensoropt.ops.index_space import NONE, LoopDim
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, chunk
from tensoropt.ops.localise import draws_numbers
from tensoropt.ops.registry import spec_of
from tensoropt.sharding import groups
from tensoropt.sharding.atoms import AtomGraph

AxisSizes = tuple[int, ...]
"""The number of micro-batches, then the size of each mesh axis."""
UNEVEN_LEAST = 8
"""The fewest elements per shard of a dim that is split unevenly: the largest shard is then at most 1/8 above
the mean. An assumption."""


@dataclass(frozen=True)
class Configuration:
    """The strategies of one group of operators, one per mesh axis, the micro-batch axis first."""

    group: groups.Group = field(repr=False)
    strategies: tuple[groups.AxisStrategy, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the strategies, as in plans, of each mesh axis, micro-batches excluded."""
        return tuple(str(s.label) for s in self.strategies[1:])

    def layout(self, tensor: str) -> Layout:
        return tuple(s.placements[tensor] for s in self.strategies)

    def choices(self, op: str) -> tuple[int, ...]:
        """Return, for each mesh axis, the index of the operator's loop that the axis splits. If it splits
        none, this is a negative code: ``NONE``, ``PARTIAL`` or ``PARTIAL_GRAD``."""
        return tuple(s.choices[op] for s in self.strategies)

    @cached_property
    def resolved(self) -> tuple[str, Layout, Layout] | None:
        """The partial sum reduced inside the group as (tensor, layout before, layout after), or None."""
        names = {s.resolve[0] for s in self.strategies if s.resolve}
        if not names:
            return None
        # Only an anchor with a single output is resolved (`_anchor_strategies` in groups.py).
        (name,) = names
        after = self.layout(name)
        # The anchor's own output on a resolving axis is a partial sum.
        before = tuple(PARTIAL if s.resolve else code for s, code in zip(self.strategies, after, strict=True))
        return name, before, after

    def placed(
        self,
        op_name: str,
        atoms: AtomGraph,
        mesh: AxisSizes,
        coordinate: tuple[int, ...] | None,
        *,
        zigzag: bool = False,
    ) -> OperatorShard:
        """Return the shard of an operator that the rank at ``coordinate`` computes, by default the largest;
        ``zigzag``: whether sequences are cut in zig-zag order."""
        op = atoms.graph.by_name[op_name]
        return OperatorShard(op, atoms, self.choices(op_name), mesh, coordinate, zigzag)


def fits(
    atoms: AtomGraph,
    group: groups.Group,
    strategies: tuple[groups.AxisStrategy, ...],
    mesh: AxisSizes,
    *,
    small_parts: bool = True,
) -> bool:
    """Return whether mesh axes can split the loops of a group's operators by these strategies.

    A loop must be divisible by the sizes of the axes that split it; a single axis may split some loops
    unevenly. With ``small_parts``, uneven shards of samples, positions and heads may have any size but 0.
    """
    for op in group.operators:
        parts: dict[int, list[int]] = {}
        dims = atoms.spaces[op.name].dims
        for size, strategy in zip(mesh, strategies, strict=True):
            choice = strategy.choices[op.name]
            if choice >= 0 and size > 1:
                for loop in dims[choice].along or (choice,):
                    parts.setdefault(loop, []).append(size)
        in_time = strategies[0].choices[op.name] if mesh[0] > 1 else NONE
        for loop, sizes in parts.items():
            # By one axis only: if axes nest, resharding derives sizes from those that the outer axes leave,
            # by exact division.
            uneven = dims[loop].uneven and len(sizes) == 1 and dims[loop].size >= UNEVEN_LEAST * sizes[0]
            if dims[loop].size % prod(sizes) == 0 or uneven:
                continue
            if not (small_parts and _in_small_parts(dims[loop], sizes, in_time == loop)):
                return False
    # The target of a scattered partial sum is not a loop that the anchor splits, so the check above has not
    # covered it.
    for name in {s.resolve[0] for s in strategies if s.resolve}:
        space, codes = atoms.spaces[group.name], [strategy.placements[name] for strategy in strategies]
        (written,) = (operand for operand in space.writes if operand.tensor == name)
        for code in {code for code in codes if code >= 0}:
            dim = space.dims[written.loops[code]]
            sizes = [size for size, other in zip(mesh, codes, strict=True) if other == code and size > 1]
            in_time = codes[0] == code and mesh[0] > 1
            if dim.size % prod(sizes) and not _in_small_parts(dim, sizes, in_time):
                return False
    return True


def _in_small_parts(loop: LoopDim, sizes: list[int], in_time: bool) -> bool:
    """Return whether axes of ``sizes`` may cut a loop unevenly; ``in_time``: the first is micro-batches."""
    micro_batches = sizes[0] if in_time else 1
    parts = sizes[in_time:]
    if not loop.small_parts or len(parts) != 1 or loop.size % micro_batches:
        return False
    return chunk(loop.size // micro_batches, parts[0], parts[0] - 1)[1] > 0


def enumerate_configurations(
    atoms: AtomGraph, group: groups.Group, mesh: AxisSizes, micro: groups.AxisStrategy
) -> tuple[Configuration, ...]:
    """Return all configurations of a group on a mesh, including the unsplit one.

    If the outermost atom (factor) of a loop divides by the number of ranks, the inner ones are not split, as
    shards would only be less contiguous. Loops that combine batch and sequence are an exception.

    Args:
        micro: the group's strategy on the micro-batch axis.
    """
    total = prod(mesh[1:])
    by_loop: dict[str, int | None] = {}
    kept = []
    for strategy in group.strategies:
        loop, atom = strategy.label.loop, strategy.label.atom
        # Strategies list the outermost atom of a loop first (`_anchor_strategies` goes through the dims in
        # order).
        outermost = by_loop.setdefault(loop, atom)
        if atom != outermost:
            outer = groups.Label(loop, outermost).dim
            index = next(s.choices[group.name] for s in group.strategies if s.label.dim == outer)
            # Rows often combine batch and sequence, as do other loops whose outermost atom is the batch (a
            # loss has one), and cutting either may suit the result's readers.
            dim = atoms.spaces[group.name].dims[index]
            combined = loop.startswith("rows") or outer == micro.label.dim or dim.along
            if dim.size % total == 0 and not combined:
                continue
        kept.append(strategy)
    # All combinations, not only those that differ beyond the order of axes, because axes differ in their
    # links.
    ways = ((micro, *choice) for choice in itertools.product(kept, repeat=len(mesh) - 1))
    return tuple(Configuration(group, way) for way in ways if fits(atoms, group, way, mesh))


class MicroBatchRefused(Exception):  # noqa: N818 - an answer, not an error
    """Raised for a model that cannot run in micro-batches; the message says why."""


def batch_placements(graph: groups.GroupGraph) -> dict[str, int]:
    """Return model input -> its placement along micro-batches: split (0) if its first dim is the batch."""
    batch = groups.batch_inputs(graph.atoms.graph)
    return {name: 0 if name in batch else REPLICATE for name in graph.atoms.graph.inputs}


def micro_batch_strategies(graph: groups.GroupGraph) -> Mapping[str, groups.AxisStrategy]:
    """Return each group's strategy on the micro-batch axis: to compute a part of the batch at a time.

    Raises:
        MicroBatchRefused: an operator mixes samples, keeps batch statistics or has no rule; a mean loss's
            targets depend on parameters; or a buffer's new value depends on the batch.
    """
    _check_targets(graph.atoms.graph)
    strategies = _BatchFollowing(graph).choose()
    _check_buffers(graph, strategies)
    return strategies


def _check_buffers(graph: groups.GroupGraph, micro: Mapping[str, groups.AxisStrategy]) -> None:
    source = graph.atoms.graph
    placed = {name: code for strategy in micro.values() for name, code in strategy.placements.items()}
    varies = {name for name, code in batch_placements(graph).items() if code != REPLICATE}
    made_by: dict[str, Operator] = {}
    for op in source.operators:
        if draws_numbers(op) or not varies.isdisjoint(op.inputs()):
            varies.update(op.outputs)
            made_by.update(dict.fromkeys(op.outputs, op))
    for name, new in source.mutations.items():
        key = source.tensors[name].key
        if new in varies:
            maker = made_by.get(new)
            where = f" ({maker.source})" if maker is not None and maker.source else ""
            raise MicroBatchRefused(
                f"the new value of the buffer {key} depends on the whole batch{where}, and a micro-batch has "
                "only a part of it"
            )
        if placed.get(new, REPLICATE) not in (REPLICATE, PARTIAL_GRAD):
            raise MicroBatchRefused(
                f"the new value of the buffer {key} has a row per sample, and a micro-batch only some rows"
            )


def _check_targets(source: OperatorGraph) -> None:
    for op in source.operators:
        if not spec_of(op.target).counted_targets or not is_mean(op):
            continue
        waiting, seen = [name for name in op.inputs() if name != op.inputs()[0]], set[str]()
        while waiting:
            name = waiting.pop()
            if source.tensors[name].kind == "parameter":
                raise MicroBatchRefused(
                    f"the targets of {op.name} ({op.target}) depend on parameters ({name}), so they cannot "
                    "be counted before the first micro-batch"
                )
            maker = source.producer.get(name)
            new = [n for n in (maker.inputs() if maker is not None else ()) if n not in seen]
            seen.update(new)
            waiting += new


def batch_strategies(
    graph: groups.GroupGraph, *, everywhere: bool = True
) -> Mapping[str, groups.AxisStrategy]:
    """Return each group's strategy for data parallelism, which splits the batch dim over devices.

    Batch norms are allowed: their statistics are reduced over the devices.

    Args:
        everywhere: whether every group must be split; otherwise a group that cannot be, such as one that
            multiplies all pairs of samples, stays whole.

    Raises:
        MicroBatchRefused: an operator mixes samples or has no rule.
    """
    return _BatchFollowing(graph, in_time=False, everywhere=everywhere).choose()


class _BatchFollowing:
    """The search for strategies that split the batch; groups without a batch dim adapt to their readers."""

    def __init__(self, graph: groups.GroupGraph, *, in_time: bool = True, everywhere: bool = True):
        self.graph = graph
        self.in_time = in_time
        self.everywhere = everywhere
        self.tensors = graph.atoms.graph.tensors
        self.known: dict[str, int] = dict(batch_placements(graph))
        self.chosen: dict[str, groups.AxisStrategy] = {}
        self.waiting: dict[str, groups.Group] = {}

    def choose(self) -> Mapping[str, groups.AxisStrategy]:
        for group in self.graph.groups:
            whole = (REPLICATE, PARTIAL_GRAD)
            # A source that is not known yet is made by a group that waits, and counts as whole.
            fed = [n for n in self._sources(group) if self.known.get(n, REPLICATE) not in whole]
            if not fed:
                self.waiting.update(dict.fromkeys(group.writes, group))
            elif not self._decide(group, {}):
                self._leave_whole(group)
        # The remaining groups have no reader with a preference, so any strategy will do.
        for group in self.graph.groups:
            if any(group is waiting for waiting in self.waiting.values()) and not self._decide(group, {}):
                self._leave_whole(group)
        for name in self.graph.atoms.graph.outputs:
            # Nothing makes a parameter or a buffer that is a result.
            if self.everywhere and self.tensors[name].elements > 1 and self.known.get(name) != 0:
                raise MicroBatchRefused(
                    f"the first dim of output {name} is not the batch, so it cannot be joined from parts"
                )
        return self.chosen

    def _leave_whole(self, group: groups.Group) -> None:
        if self.everywhere:
            raise MicroBatchRefused(
                f"{group.name} ({group.anchor.target}) cannot compute one part of the batch at a time"
            )
        self._choose(group, group.unsplit)

    def _sources(self, group: groups.Group) -> list[str]:
        return [*group.reads, *(n for n in group.free if self.tensors[n].kind == "input")]

    def _decide(self, group: groups.Group, wanted: Mapping[str, int]) -> bool:
        if group.name in self.chosen:
            return all(self.chosen[group.name].placements[n] == code for n, code in wanted.items())
        # If no reader asks for a split, prefer whole tensors, with gradients that add up over micro-batches.
        # `sorted` is stable: the other strategies keep their order, outermost atoms first.
        order = {groups.PARTIAL_GRADIENT: 0, groups.WHOLE: 1}
        for strategy in sorted(group.strategies, key=lambda s: order.get(s.label, 2)):
            if strategy.resolve is None and self._agrees(group, strategy, wanted):
                self._choose(group, strategy)
                return True
        return False

    def _agrees(self, group: groups.Group, strategy: groups.AxisStrategy, wanted: Mapping[str, int]) -> bool:
        places = strategy.placements
        if any(places[n] != code for n, code in wanted.items()):
            return False
        for n in group.parameters:
            # A bias inside a contraction is added once, not in every micro-batch.
            if places[n] not in (REPLICATE, groups.canonical(self.tensors[n], PARTIAL_GRAD)):
                return False
            # A step's parameters outlive its micro-batches: their gradients always add up.
            if places[n] == REPLICATE and self.tensors[n].requires_grad:
                return False
        # Asking for a source decides the group that makes it; all of this is undone if another source
        # disagrees.
        saved = (dict(self.known), dict(self.chosen), dict(self.waiting))
        for n in self._sources(group):
            waiting = self.waiting.get(n)
            if waiting is not None and self._decide(waiting, {n: places[n]}):
                continue
            if self.known.get(n) != places[n]:
                self.known, self.chosen, self.waiting = saved
                return False
        return True

    def _choose(self, group: groups.Group, strategy: groups.AxisStrategy) -> None:
        in_training = self.in_time and self.graph.atoms.graph.training
        for op in group.operators:
            if in_training and spec_of(op.target).batch_statistics and strategy.choices[op.name] >= 0:
                raise MicroBatchRefused(
                    f"{op.name} normalises over the whole batch, and a micro-batch has only a part of it"
                )
            for name in op.outputs:
                self.known[name] = strategy.placements[name]
                self.waiting.pop(name, None)
        self.chosen[group.name] = strategy
