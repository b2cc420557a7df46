"""The judge: plays a strategy's step on a device timeline and follows every tensor's lifetime.

Forward in execution order, backward in reverse, then the optimizer. All ranks of a sharded strategy do
the same; the largest shard is played. Time is additive (the executor overlaps nothing but the last
gradient buckets); memory is what the search added up plus what lives only for a while: activations
between groups, gradients, gathered parameters, buffers of reshardings, each group's own peak, the
optimizer's temporaries. Inputs, constants and buffers, the same for every strategy, are left out.

A tensor is followed by its storage: an edge whose forward moves nothing gives its reader the very
storage of its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tensoropt.costs.facts import Facts
from tensoropt.costs.parameters import OPTIMIZER_STATE
from tensoropt.sharding.groups import Group
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.resharding import Step
from tensoropt.sharding.strategy import Edge, Strategy

OPTIMIZER_TRANSIENT = {"sgd": 0, "momentum": 0, "adam": 1}
"""Values per parameter element that a multi-tensor step makes for a while (``foreach=True``: Adam's
denominators, of all parameters at once)."""

Storage = tuple[str, str]
"""(tensor, ``made`` | ``home`` | the group that reads a copy of its own)."""


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
        self.curve: list[MemoryPoint] = []
        self.parameters = self.gradients = self.state = self.optimizing = 0
        for name, layout in strategy.stored.items():
            tensor = strategy.tensor(name)
            size = self._bytes(name, layout)
            self.parameters += size
            if self.training and tensor.requires_grad:
                self.gradients += size
                self.state += size * OPTIMIZER_STATE[optimizer]
                self.optimizing += size * OPTIMIZER_TRANSIENT[optimizer]
        self.reads = [{n: self._read(n, group) for n in group.reads} for group in self.groups]
        self.last_reader = self._last_readers()

    # -- tensors ----------------------------------------------------------------------------------

    def _bytes(self, name: str, layout: Layout) -> int:
        return prod(self.strategy.local_shape(name, layout)) * self.strategy.tensor(name).element_bytes

    def _steps(self, name: str, source: Layout, target: Layout) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        return self.strategy.steps(Edge(name, source, target, "", "activation"))

    def _home(self, name: str) -> Storage:
        """Where readers find a tensor."""
        moved = self._steps(name, self.strategy.made[name], self.strategy.source_layout(name))[0]
        return name, "home" if moved else "made"

    def _read(self, name: str, group: Group) -> Storage:
        layout = self.strategy.configurations[group.name].layout(name)
        moved = self._steps(name, self.strategy.source_layout(name), layout)[0]
        return (name, group.name) if moved else self._home(name)

    def _size(self, storage: Storage) -> int:
        name, where = storage
        if where == "made":
            return self._bytes(name, self.strategy.made[name])
        if where == "home":
            return self._bytes(name, self.strategy.hubs[name])
        return self._bytes(name, self.strategy.configurations[where].layout(name))

    def _last_readers(self) -> dict[str, int]:
        """Index of the last group that reads an activation made by another; results are never let go."""
        found: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            for name in group.reads:
                found[name] = index
        graph = self.strategy.graph.atoms.graph
        for name in (*graph.outputs, *graph.mutations.values()):
            found[name] = len(self.groups)
        return found

    def _producer_keeps(self, storage: Storage) -> bool:
        """Whether the tensor lies in what its producer keeps."""
        name, where = storage
        group = self.strategy.graph.group_of[self.strategy.graph.atoms.graph.producer[name].name]
        return where == "made" and group.short_names[name] in self.facts[group.name].writes_kept

    def _kept_reads(self, index: int) -> list[Storage]:
        """What a group reads and backward needs."""
        group = self.groups[index]
        needed = self.facts[group.name].reads_kept
        found = (self.reads[index][n] for n in group.reads if group.short_names[n] in needed)
        return [storage for storage in found if not self._producer_keeps(storage)]

    # -- what lives for a while -------------------------------------------------------------------

    def _resharding(self, steps: Sequence[Step], name: str) -> int:
        """The most that is alive of a resharding beside its input."""
        parts = {s: prod(self.strategy.mesh[a] for a in s.axes) for s in steps}
        peak = 0
        for i, s in enumerate(steps):
            before, after = prod(s.before), prod(s.after)
            copies = any(size > 1 for size in s.before[: max(s.atom, 0)])
            made = after
            if s.kind == "all_gather":
                made = parts[s] * before * (1 + copies)
            elif s.kind == "reduce_scatter":
                made = after + before * copies
            elif s.kind == "all_to_all":
                made = 2 * before + after
            peak = max(peak, made + (before if i else 0))
        return peak * self.strategy.tensor(name).element_bytes

    def _gathered(self, index: int, *, again: bool) -> tuple[int, int]:
        """Bytes of parameters gathered for a group (``again``: for its backward), and of buffers in this."""
        group, total, buffers = self.groups[index], 0, 0
        configuration, facts = self.strategy.configurations[group.name], self.facts[group.name]
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            steps = self._steps(name, self.strategy.stored[name], use)[0]
            gathers = any(s.kind == "all_gather" for s in steps)
            if steps and not (again and gathers and group.short_names[name] not in facts.parameters_kept):
                total += self._bytes(name, use)
                buffers = max(buffers, self._resharding(steps, name) - self._bytes(name, use))
        return total, max(buffers, 0)

    def _note(self, moment: str, kept: int, transient: int) -> None:
        self.curve.append(
            MemoryPoint(moment, self.parameters, self.gradients, self.state, int(kept), int(transient))
        )

    # -- the step ---------------------------------------------------------------------------------

    def run(self) -> Simulation:
        kept: dict[Storage, int] = {}
        passing: dict[Storage, int] = {}
        for index, group in enumerate(self.groups):
            self._forward(index, group, kept, passing)
        if self.training:
            self._backward(kept)
            self._note("optimizer", 0, self.optimizing)
        return Simulation(tuple(self.curve))

    def _forward(
        self, index: int, group: Group, kept: dict[Storage, int], passing: dict[Storage, int]
    ) -> None:
        facts = self.facts[group.name]
        own = {s: self._size(s) for s in self.reads[index].values() if s[1] == group.name}
        alive = dict(passing) | own
        for name in group.reads:
            layout = self.strategy.configurations[group.name].layout(name)
            steps = self._steps(name, self.strategy.source_layout(name), layout)[0]
            if steps:
                others = sum(size for s, size in alive.items() if s not in kept and s != (name, group.name))
                moved = others + self._resharding(steps, name)
                self._note(f"resharding {name} for {group.name}", sum(kept.values()), moved)
        if self.training:
            kept.update((s, self._size(s)) for s in self._kept_reads(index))
            kept[group.name, "inside"] = facts.kept_bytes
        gathered, buffers = self._gathered(index, again=False)
        transient = sum(size for s, size in alive.items() if s not in kept)
        self._note(
            f"forward {group.name}",
            sum(kept.values()),
            transient + gathered + max(facts.forward_peak_bytes, buffers),
        )
        for name in group.writes:
            storages = {self._home(name)} if name in self.last_reader else set()
            if self._home(name)[1] == "home":
                made = self._bytes(name, self.strategy.made[name])
                steps = self._steps(name, self.strategy.made[name], self.strategy.hubs[name])[0]
                moved = transient + made + self._resharding(steps, name)
                self._note(f"home of {name}", sum(kept.values()), moved)
            passing.update((s, self._size(s)) for s in storages if not self._producer_keeps(s))
        for storage in [s for s in passing if self.last_reader[s[0]] <= index]:
            del passing[storage]

    def _backward(self, kept: dict[Storage, int]) -> None:
        pending: dict[str, int] = {}
        first_use: dict[Storage, int] = {}
        for index in range(len(self.groups)):
            for storage in self._kept_reads(index):
                first_use.setdefault(storage, index)
        for index in range(len(self.groups) - 1, -1, -1):
            group = self.groups[index]
            for name in group.writes:
                self._home_gradient(name, kept, pending)
                pending.pop(name, None)
            waiting = sum(pending.values())
            gathered, buffers = self._gathered(index, again=True)
            peak = gathered + max(self.facts[group.name].backward_peak_bytes, buffers)
            self._note(f"backward {group.name}", sum(kept.values()), waiting + peak)
            kept.pop((group.name, "inside"), None)
            for storage in [s for s, first in first_use.items() if first == index]:
                kept.pop(storage, None)
            self._gradients(group, kept, pending)

    def _gradients(self, group: Group, kept: Mapping[Storage, int], pending: dict[str, int]) -> None:
        """The gradients of a group's reads go to where their tensors come from, and add up there."""
        configuration = self.strategy.configurations[group.name]
        made = {n: self._bytes(n, configuration.layout(n)) for n in group.reads if self._learns(n)}
        for name in made:
            layout, source = configuration.layout(name), self.strategy.source_layout(name)
            steps = self._steps(name, source, layout)[1]
            alive = sum(made.values()) + sum(pending.values())
            if steps:
                self._note(
                    f"resharding the gradient of {name} from {group.name}",
                    sum(kept.values()),
                    alive + self._resharding(steps, name),
                )
            made[name] = 0
            pending[name] = self._bytes(name, source)

    def _home_gradient(self, name: str, kept: Mapping[Storage, int], pending: Mapping[str, int]) -> None:
        """The gradient of a hub goes from its home to its producer."""
        if name not in self.strategy.hubs or name not in pending:
            return
        steps = self._steps(name, self.strategy.made[name], self.strategy.hubs[name])[1]
        if steps:
            alive = sum(pending.values()) + self._resharding(steps, name)
            self._note(f"gradient of the home of {name}", sum(kept.values()), alive)

    def _learns(self, name: str) -> bool:
        return self.strategy.tensor(name).requires_grad


def simulate(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> Simulation:
    """Play one step. ``facts``: per group name the facts of its configuration."""
    return _Play(strategy, facts, optimizer).run()
