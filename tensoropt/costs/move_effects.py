"""Tensors in their layouts: their bytes, and the effects of moving them from one layout to another.

Working sets: the memory that a group needs while it runs, in addition to what is kept.

The search adds memory up, but only the largest working set at any moment counts. Searching under caps on it
finds plans that a sum cannot distinguish.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tensoropt.costs.cost_graph import Allowed, VariableTable
from tensoropt.costs.effects import OUTPUT, OUTPUT_BACK, Effect, WeightProduct, When
from tensoropt.costs.prices import NO_WORK, Prices, Queues, Send
from tensoropt.costs.tables import CostTables
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import Layout, local_shape
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, memory_orders
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import Group, is_one_reduction, reader_product
from tensoropt.sharding.reshard.steps import (
    Step,
    edge_steps,
    forward_placements,
    gradient_placements,
    move_pattern,
    permuted_atoms,
    permuted_steps,
    resharding_elements,
    resharding_steps,
)
from tensoropt.sharding.strategy import output_layout

Both = tuple[tuple[Step, ...], tuple[Step, ...]]
"""(forward, backward) steps of a resharding."""


class MoveEffects:
    """The effects of moves on one mesh.

    Args:
        prices: the source of seconds (:func:`~tensoropt.costs.prices.free_prices` to track bytes only).
    """

    def __init__(self, prices: Prices):
        self.prices, self.graph, self.mesh = prices, prices.graph, prices.mesh
        self.tensors: Mapping[str, Tensor] = self.graph.atoms.graph.tensors
        self.training = prices.training
        self.orders = memory_orders(self.graph)
        # Cached per instance, that is per mesh and prices, which the key does not contain.
        self._elements: dict[tuple[str, Layout], int] = {}
        self._steps: dict[object, Both] = {}
        self._moved: dict[object, Effect] = {}
        self._one_way: dict[tuple[int, int], dict[object, tuple[float, float, float, bool]]] = {}

    # -- sizes ------------------------------------------------------------------------------------

    def elements(self, name: str, layout: Layout) -> int:
        """The number of elements in the largest shard of a tensor in a layout."""
        key = name, layout
        if key not in self._elements:
            self._elements[key] = prod(local_shape(self.graph.atoms.atoms[name], layout, self.mesh))
        return self._elements[key]

    def bytes(self, name: str, layout: Layout) -> int:
        """The bytes of that shard, in the dtype that readers see."""
        return self.elements(name, layout) * self.tensors[name].element_bytes

    def stored_bytes(self, name: str, layout: Layout) -> int:
        """The bytes of a parameter between steps, or of its gradient."""
        return self.elements(name, layout) * self.tensors[name].stored_element_bytes

    def learns(self, name: str) -> bool:
        """Whether a gradient of the tensor is computed."""
        return self.training and self.tensors[name].requires_grad

    # -- moves ------------------------------------------------------------------------------------

    def steps(self, name: str, source: Layout, target: Layout) -> Both:
        """(forward, backward) steps from one layout to another; no backward steps without a gradient."""
        # Layers repeat, and all tensors with the same moves share them.
        atoms, learns = self.graph.atoms.atom_sizes(name), self.learns(name)
        key = atoms, learns, source, target
        if key not in self._steps:
            forward, backward = edge_steps(atoms, self.mesh, source, target) if source != target else ((), ())
            self._steps[key] = forward, backward if learns else ()
        return self._steps[key]

    def moved(
        self,
        when: When,
        name: str,
        source: Layout,
        target: Layout,
        *,
        workspace_bytes: int = 0,
    ) -> Effect:
        """A tensor's move from ``source`` to ``target``; in backward, its gradient's move back."""
        tensor, atoms = self.tensors[name], self.graph.atoms.atom_sizes(name)
        # Layers repeat: the same move of a similar tensor costs the same.
        key = (when, atoms, tensor.element_bytes, tensor.requires_grad, source, target, workspace_bytes)
        if key not in self._moved:
            ways = self.steps(name, source, target)
            back = when.phase == "backward"
            # If nothing moves in the other direction, autograd still passes the tensor on. That time is
            # counted here, because an edge without any steps does not exist at all.
            passes = not ways[not back] and self.learns(name)
            self._moved[key] = self.stepped(
                when, name, ways[back], passes=passes, workspace_bytes=workspace_bytes
            )
        return self._moved[key]

    def stepped(
        self, when: When, name: str, steps: Sequence[Step], *, passes: bool = False, workspace_bytes: int = 0
    ) -> Effect:
        """One direction of a move, as an effect.

        Args:
            passes: autograd passes the tensor on in the other direction, where nothing moves.
        """
        nothing: tuple[Queues, tuple[Send, ...]] = NO_WORK, ()
        local, sends = self.prices.steps(steps, self.tensors[name].element_bytes) if steps else nothing
        return Effect(
            when,
            workspace_bytes=workspace_bytes,
            local_s=local.device_s,
            host_s=local.host_s,
            source=self.overheads_source,
            sends=sends,
            moves=True,
            passing=self.prices.passing if steps and passes else NO_WORK,
        )

    def moving_s(
        self,
        name: str,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        products_s: Sequence[float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The seconds (sources, targets) that the search counts for moving a tensor, and for moving its
        gradient back.

        They equal those of :meth:`moved` to the last bit, for all pairs at once: a table has up to millions.

        Args:
            products_s: per target, the seconds of the product that overlaps with a gradient's reduction.
        """
        forward_s, goes = self._one_way_s(
            name, [*map(forward_placements, sources)], [*map(forward_placements, targets)]
        )
        if not self.learns(name):
            return forward_s, np.zeros_like(forward_s)
        back_s, comes = (
            part.T
            for part in self._one_way_s(
                name, [*map(gradient_placements, targets)], [*map(gradient_placements, sources)], products_s
            )
        )
        pass_s = max(self.prices.passing)
        return forward_s + np.where(goes & ~comes, pass_s, 0.0), back_s + np.where(comes & ~goes, pass_s, 0.0)

    def _one_way_s(
        self,
        name: str,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        products_s: Sequence[float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The seconds (sources, targets) from one-directional placements to others, and whether anything is
        done on the way; a single reduction overlaps with the product of its source, if there is one."""
        atoms, element_bytes = self.graph.atoms.atom_sizes(name), self.tensors[name].element_bytes
        known = self._one_way.setdefault((prod(atoms), element_bytes), {})
        # Layouts that differ only in the other direction are merged: far fewer remain.
        rows, cols = ({p: i for i, p in enumerate(dict.fromkeys(ends))} for ends in (sources, targets))
        found = []
        for source, target in itertools.product(rows, cols):
            key = move_pattern(atoms, self.mesh, source, target)
            cost = known.get(key)
            if cost is None:
                steps = resharding_steps(atoms, self.mesh, source, target)
                cost = known[key] = self._steps_s(steps, element_bytes)
            found.append(cost)
        at = np.ix_([rows[p] for p in sources], [cols[p] for p in targets])
        device_s, host_s, reduced_s, moves = (
            np.array(part).reshape(len(rows), len(cols))[at] for part in zip(*found, strict=True)
        )
        if products_s is not None:
            device_s = device_s - self.prices.hidden_s(reduced_s, np.array(products_s)[:, None])
        return np.maximum(device_s, host_s), moves

    def _steps_s(self, steps: Sequence[Step], element_bytes: int) -> tuple[float, float, float, bool]:
        """The seconds of steps on the device and on its host, as additive() counts them; the seconds of the
        collective of a single reduction; and whether there are any steps."""
        if not steps:
            return 0.0, 0.0, 0.0, False
        local, sends = self.prices.steps(steps, element_bytes)
        reduced_s = sum(send.seconds for send in sends) if is_one_reduction(steps, self.mesh) else 0.0
        return self.prices.amid_work(local.device_s, sends), local.host_s, reduced_s, True

    def product(self, group: Group, name: str, work: Workload, facts: Facts) -> WeightProduct | None:
        """The product that may overlap with the reduction of the gradient of a tensor that a group reads.

        Args:
            work, facts: those of the group's configuration.
        """
        linear = reader_product(self.graph.atoms.graph, group, name)
        if linear is None:
            return None
        weight = group.short_names[linear.weight]
        size = next(spec.bytes for short, spec, _ in work.inputs if short == weight)
        # Facts recorded before the runs were recorded lack them.
        most = max((run.peak_bytes for run in facts.backward_runs if weight in run.reads), default=None)
        spare = 0 if most is None else max(facts.backward_peak_bytes - most, 0)
        return WeightProduct(self.prices.compute.weight_gradient_s(work, facts), size, spare)

    def output(self, name: str, source: Layout) -> tuple[Effect, Effect]:
        """Effects of a result of the model: it is made whole on every rank, and its gradient comes back."""
        whole = output_layout(source)
        return self.moved(OUTPUT, name, source, whole), self.moved(OUTPUT_BACK, name, source, whole)

    @property
    def overheads_source(self) -> str:
        """The source of the seconds of copies, casts and issuing."""
        return self.prices.compute.source

    def resharding_bytes(self, steps: Sequence[Step], name: str) -> int:
        """The most bytes that a resharding has alive in addition to its input."""
        if (order := self.orders.get(name)) is not None:
            # Buffers depend on which dim is outermost in memory: gathering along that one needs no copy, and
            # resharding lays out tensors as the unsplit model does.
            steps = permuted_steps(steps, permuted_atoms(self.graph.atoms.atoms[name], order))
        return resharding_elements(steps, self.mesh) * self.tensors[name].element_bytes


# An assumption: every cap is one more search of the space.
_CAPS = 2
_WORTH = 0.02
"""The share of the leanest plan's memory that a cap must be able to save to be worth a search."""


@dataclass(frozen=True)
class WorkingSets:
    """The bytes that groups need while they run.

    Attributes:
        of: per group and configuration, an array over its options.
    """

    of: Mapping[str, Sequence[np.ndarray]]

    def caps(self, choice: Mapping[str, int], options: Mapping[object, int], memory: float) -> list[float]:
        """The caps worth a search, ascending: from the least that some group needs to just below what this
        strategy needs; none if that is a small part of its ``memory``."""
        floor = max((min(float(a.min()) for a in each if a.size) for each in self.of.values()), default=0.0)
        used = max((float(self.of[g][choice[g]][options.get(g, 0)]) for g in self.of), default=0.0)
        if used - floor <= _WORTH * memory:
            return []
        # Geometric steps are an assumption. The last of them is what the strategy itself needs: under it the
        # same strategy would result, so it is left out.
        return [float(cap) for cap in np.geomspace(max(floor, 1.0), used, _CAPS + 1)[:-1]]

    def within(self, cap_bytes: float) -> Allowed:
        """What a graph is restricted to under a cap: the options whose groups need no more while they run."""

        def allowed(variable: VariableTable, index: int) -> np.ndarray | None:
            needed = self.of.get(variable.key)
            return None if needed is None else needed[index] <= cap_bytes

        return allowed


def working_sets(tables: CostTables) -> WorkingSets:
    """The working sets of all groups of the tables, in bytes of one rank."""
    known: dict[int, list[np.ndarray]] = {}
    found, sizes = {}, MoveEffects(tables.prices)
    for group in tables.graph.groups:
        # Equal layers share this tuple (TableBuilder._group), so each kind of layer is computed once.
        key = id(tables.of[group.name].options)
        if key not in known:
            known[key] = _of_group(tables, sizes, group)
        found[group.name] = known[key]
    return WorkingSets(found)


def _of_group(tables: CostTables, sizes: MoveEffects, group: Group) -> list[np.ndarray]:
    facts = tables.templates[group.name].facts
    return [
        np.array([_bytes(sizes, tables.configuration(group, i), facts[i % len(facts)], o) for o in options])
        for i, options in enumerate(tables.of[group.name].options)
    ]


def _bytes(sizes: MoveEffects, configuration: Configuration, facts: Facts, stored: Sequence[Layout]) -> float:
    """The larger of forward and backward: inputs and results, with parameters gathered."""
    group = configuration.group
    reads = sum(sizes.bytes(n, configuration.layout(n)) for n in group.reads)
    gathered = sum(
        size
        for n, layout in zip(group.parameters, stored, strict=True)
        # Only parameters that are larger at their use than in storage are gathered; those stored as used
        # count with the parameters.
        if (size := sizes.bytes(n, configuration.layout(n))) > sizes.bytes(n, layout)
    )
    forward = max(facts.forward_peak_bytes, facts.forward_parameters_peak_bytes + gathered)
    backward = max(facts.backward_peak_bytes, facts.backward_parameters_peak_bytes + gathered)
    return float(max(reads + forward, backward if sizes.training else 0))
