"""Context parallelism on one mesh axis: the strategy by which each group splits the sequence.

Parameters are whole on every rank. Attention computes the rank's queries against all keys and values, which
are gathered (Llama 3, arXiv 2407.21783, section 3.3.2) or sent around a ring (Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensoropt.graph import Tensor
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.ops.ring_attention import RING
from tensoropt.sharding.groups import PARTIAL_GRADIENT, WHOLE, AxisStrategy, Group, GroupGraph, batch_inputs

_ON_EVERY_RANK = (REPLICATE, PARTIAL_GRAD)
QUERIES = "queries"
"""The loop of attention that context parallelism splits, or ``RING`` if keys and values split too."""


def sequence_strategies(graph: GroupGraph, *, ring: bool = False) -> Mapping[str, AxisStrategy]:
    """Return each group's strategy for splitting the sequence, the second dim of inputs with a batch.

    A group that cannot split the sequence stays whole. Of several strategies, the one that reshards the
    fewest elements is returned.

    Args:
        ring: whether attention sends keys and values around a ring, where it can.
    """
    atoms, known = graph.atoms, dict[str, int]()
    tensors = atoms.graph.tensors
    batch = set(batch_inputs(atoms.graph))
    for name in atoms.graph.inputs:
        shape, factors = tensors[name].shape, atoms.atoms[name]
        # With a batch of one, inputs do not show which dim is the batch.
        leads = name in batch or (not batch and shape[:1] == (1,))
        follows = leads and len(shape) > 1 and shape[1] > 1
        known[name] = len(factors[0]) if follows else REPLICATE
    chosen = {}
    for group in graph.groups:
        strategies = [strategy for strategy in group.strategies if ring or strategy.label.loop != RING]
        strategy = chosen[group.name] = _following(group, strategies, known, tensors)
        for op in group.operators:
            for name in op.outputs:
                known[name] = strategy.placements[name]
    return chosen


def _following(
    group: Group, strategies: Sequence[AxisStrategy], known: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> AxisStrategy:
    sources = [*group.reads, *(name for name in group.free if tensors[name].kind == "input")]
    fed = any(known[name] >= 0 for name in sources)
    # Readers that follow can use whole results, whose gradients add up; nothing else needs to be split.
    order = {PARTIAL_GRADIENT: 0, WHOLE: 1} if not fed else {}
    parameters = (*group.parameters, *group.shared)
    unresolved = (s for s in strategies if s.resolve is None)
    fitting = (s for s in unresolved if all(s.placements[name] in _ON_EVERY_RANK for name in parameters))
    # The first of the best, so that a group stays whole if splitting it saves nothing.
    return min(
        (group.unsplit, *fitting),
        key=lambda s: (_moved(s, sources, known, tensors), order.get(s.label, 2)),
    )


def _moved(
    strategy: AxisStrategy, sources: list[str], known: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> int:
    ends = {name: (known[name], strategy.placements[name]) for name in sources}
    return sum(
        tensors[name].elements
        for name, (before, wanted) in ends.items()
        if before != wanted and (before not in _ON_EVERY_RANK or wanted == PARTIAL)
    )
