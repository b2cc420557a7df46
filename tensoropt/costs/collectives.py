"""What a strategy will send, from the cost side: kind, axes, bytes and how often in one step.

Compared by ``verify`` with what the executor really issues; nothing here asks the executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tensoropt.graph import DTYPE_BYTES
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.local import localise
from tensoropt.sharding.reshard.steps import COLLECTIVES, Step
from tensoropt.sharding.strategy import Strategy, made_again


class Collective(NamedTuple):
    """One collective of one rank; ``axes`` are the mesh's own, counted from 0."""

    kind: str
    axes: tuple[int, ...]
    bytes: int


def predicted_collectives(strategy: Strategy, facts: Mapping[str, Facts]) -> Counter[Collective]:
    """Collectives of one training step (or inference call), with their counts.

    Args:
        facts: per group name the facts of its configuration (which gathered parameters backward needs).
    """
    found: Counter[Collective] = Counter()
    mesh, micro = strategy.mesh, strategy.micro_batches
    training = strategy.graph.atoms.graph.training

    def add(kind: str, axes: Iterable[int], size: int, times: int) -> None:
        real = tuple(a - 1 for a in axes if a > 0 and mesh[a] > 1)
        if real and times:
            found[Collective(kind, real, size)] += times

    def add_steps(steps: Iterable[Step], element_bytes: int, times: int) -> None:
        for step in steps:
            if step.kind in COLLECTIVES:
                add(step.kind, step.axes, step.payload(mesh) * element_bytes, times)

    short = {g.name: g.short_names for g in strategy.graph.groups}
    seen: set[object] = set()
    for edge in strategy.edges():
        if edge in seen:  # readers in one group share the node
            continue
        seen.add(edge)
        forward, backward = strategy.steps(edge)
        size = strategy.tensor(edge.tensor).element_bytes
        forwards, times = strategy.forwards_of(edge), strategy.times(edge)
        add_steps(forward, size, times * forwards)
        if not training:
            continue
        add_steps(backward, size, times)
        if forwards == 1 and edge.kind == "parameter" and made_again(strategy.tensor(edge.tensor), forward):
            again = facts[edge.reader].parameters_kept.get(short[edge.reader][edge.tensor], 0)
            add_steps(forward, size, micro * again)
    for group in strategy.graph.groups:
        configuration = strategy.configurations[group.name]
        for op in group.operators:
            for c in localise(configuration.placed(op.name, strategy.graph.atoms, mesh, None)).collectives:
                if training or not c.backward:
                    times = 1 if c.backward else strategy.forwards(group.name)
                    add(c.kind, c.axes, c.bytes, micro * times)
    if training:
        for bucket in gradient_buckets(strategy):
            add("all_reduce", bucket.axes, bucket.elements * DTYPE_BYTES[bucket.dtype], 1)
    return found
