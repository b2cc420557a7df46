"""The judge: plays a strategy's step on a device timeline and follows every tensor's lifetime.

Forward in execution order, backward in reverse, then the optimizer. All ranks of a sharded strategy do
the same; the largest shard is played. Time is additive (the executor overlaps nothing but the last
gradient buckets); memory is what the search added up plus what lives only for a while: activations
between groups, gradients, gathered parameters, each group's own peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tensoropt.costs.facts import Facts
from tensoropt.costs.parameters import OPTIMIZER_STATE
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.strategy import Strategy


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes alive at one moment, by kind."""

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    transient: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class Simulation:
    """Memory curve of one step on the rank with the largest shards."""

    curve: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        return max(self.curve, key=lambda p: p.total)


class _Play:
    def __init__(self, strategy: Strategy, facts: Mapping[str, Facts], optimizer: str):
        self.strategy = strategy
        self.facts = facts
        self.training = strategy.graph.atoms.graph.training
        self.groups = strategy.graph.groups
        self.short = {g.name: g.short_names for g in self.groups}
        self.curve: list[MemoryPoint] = []
        self.parameters = self.gradients = self.state = 0
        for name, layout in strategy.stored.items():
            tensor = strategy.tensor(name)
            size = prod(strategy.local_shape(name, layout)) * tensor.element_bytes
            self.parameters += size
            if self.training and tensor.requires_grad:
                self.gradients += size
                self.state += size * OPTIMIZER_STATE[optimizer]
        self.last_reader = self._last_readers()

    def _bytes(self, name: str, layout: Layout) -> int:
        return prod(self.strategy.local_shape(name, layout)) * self.strategy.tensor(name).element_bytes

    def _last_readers(self) -> dict[str, int]:
        """Index of the last group that reads an activation made by another."""
        found: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            for name in group.reads:
                found[name] = index
        return found

    def _note(self, moment: str, kept: int, transient: int) -> None:
        self.curve.append(
            MemoryPoint(moment, self.parameters, self.gradients, self.state, int(kept), int(transient))
        )

    def _gathered(self, index: int) -> int:
        """Bytes of parameters gathered for a group while it runs."""
        group, total = self.groups[index], 0
        configuration = self.strategy.configurations[group.name]
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            if use != self.strategy.stored[name]:
                total += self._bytes(name, use)
        return total

    def _kept_reads(self, index: int) -> dict[tuple[str, Layout], int]:
        """Tensors a group reads that backward needs, as (tensor, layout) -> bytes."""
        group = self.groups[index]
        facts, short = self.facts[group.name], self.short[group.name]
        layout = self.strategy.configurations[group.name].layout
        return {(n, layout(n)): self._bytes(n, layout(n)) for n in group.reads if short[n] in facts.reads_kept}

    def _own_kept(self, name: str, layout: Layout) -> bool:
        """Whether the producer already keeps this tensor in this layout."""
        group = self.strategy.graph.group_of[self.strategy.graph.atoms.graph.producer[name].name]
        kept = self.short[group.name][name] in self.facts[group.name].writes_kept
        return kept and self.strategy.made[name] == layout

    def run(self) -> Simulation:
        kept: dict[object, int] = {}
        passing: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            facts = self.facts[group.name]
            layout = self.strategy.configurations[group.name].layout
            for key, size in self._kept_reads(index).items():
                if not self._own_kept(*key):
                    kept[key] = size
            moved = sum(
                self._bytes(n, layout(n)) for n in group.reads if layout(n) != self.strategy.source_layout(n)
            )
            alive = sum(size for n, size in passing.items() if (n, self.strategy.made[n]) not in kept)
            peak = facts.forward_peak_bytes + self._gathered(index) + moved
            self._note(f"forward {group.name}", sum(kept.values()), alive + peak)
            if self.training:
                kept[group.name] = facts.kept_bytes
            for name in group.writes:
                short = self.short[group.name][name]
                if short not in facts.writes_kept and name in self.last_reader:
                    passing[name] = self._bytes(name, layout(name))
            passing = {n: s for n, s in passing.items() if self.last_reader.get(n, -1) > index}
        if self.training:
            self._backward(kept)
            self._note("optimizer", 0, 0)
        return Simulation(tuple(self.curve))

    def _backward(self, kept: dict[object, int]) -> None:
        pending: dict[str, int] = {}
        first_use: dict[object, int] = {}
        for index in range(len(self.groups)):
            for key in self._kept_reads(index):
                first_use.setdefault(key, index)
        for index in range(len(self.groups) - 1, -1, -1):
            group = self.groups[index]
            configuration = self.strategy.configurations[group.name]
            incoming = sum(pending.values())
            peak = self.facts[group.name].backward_peak_bytes + self._gathered(index)
            self._note(f"backward {group.name}", sum(kept.values()), incoming + peak)
            kept.pop(group.name, None)
            for name in group.writes:
                pending.pop(name, None)
            for name in group.reads:
                if self.strategy.tensor(name).requires_grad:
                    pending[name] = self._bytes(name, configuration.layout(name))
            for key, first in first_use.items():
                if first == index:
                    kept.pop(key, None)


def simulate(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> Simulation:
    """Play one step. ``facts``: per group name the facts of its configuration."""
    return _Play(strategy, facts, optimizer).run()
