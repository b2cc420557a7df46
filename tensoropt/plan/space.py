"""The space searched for one mesh and one micro-batch count, by the names of its choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tensoropt.costs.variables import variables
from tensoropt.plan.plan import MeshInfo
from tensoropt.units import counted


@dataclass(frozen=True, repr=False)
class Space:
    """The searched space of one mesh and micro-batch count, by names.

    Attributes:
        mesh: the sizes and names of the axes.
        micro_batches: the micro-batch count.
        groups: per group ``micro`` (label on the micro-batch axis), ``members``, ``parameters`` (graph
            names), ``configurations`` (labels per axis) and ``options`` (per configuration, per option,
            per parameter the stored placement names). None of points that have a record.
        hubs, shared: per tensor the placement names of each configuration.
        keys: parameter name in the graph -> the model's own name.
        notes: what was heuristic.
        regions: group -> the repeated block of which it may be recomputed; such a group's index counts its
            configurations once plain, then once more recomputed.
        sequence: group -> the label with which it follows the sequence; of those that do. Empty in
            explorations that were saved without.
        moves: the tensors that backward may gather again: a point has an option for each of them behind those
            of its variables, 1 if it does.
        recipes: block -> recipe -> for each of the block's groups in order, ``1`` if it runs once by the
            recipe, else ``0``.
    """

    mesh: MeshInfo
    micro_batches: int
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hubs: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    shared: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    regions: Mapping[str, str] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    moves: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices that its plans run on."""
        return math.prod(self.mesh.shape)

    def position(self, group: str, index: int) -> int:
        """Return the position, in the group's lists, of a point's configuration ``index``."""
        return index % len(self.groups[group]["configurations"])

    def labels(self, group: str, index: int) -> Sequence[str]:
        """Return, for each axis, what configuration ``index`` of a group splits."""
        labels: Sequence[str] = self.groups[group]["configurations"][self.position(group, index)]
        return labels

    def recomputed(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the blocks of which a point recomputes any part."""
        again = self._again(choice)
        return tuple(dict.fromkeys(self.regions[name] for name, runs_again in again.items() if runs_again))

    def once(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the groups of these blocks that a point runs once."""
        again, blocks = self._again(choice), set(self.recomputed(choice))
        return tuple(
            name for name, runs_again in again.items() if not runs_again and self.regions[name] in blocks
        )

    def gathered_again(self, options: Sequence[int]) -> tuple[str, ...]:
        """Return the tensors that a point with these options gathers again in backward."""
        own = options[len(self.variables) :]
        return tuple(name for name, again in zip(self.moves, own, strict=True) if again)

    def _again(self, choice: Sequence[int]) -> dict[str, bool]:
        return {
            name: index >= len(self.groups[name]["configurations"])
            # Groups are the first of a point's variables, so that zip stops before hubs and tied parameters.
            for name, index in zip(self.groups, choice, strict=False)
            if name in self.regions
        }

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The variables in the order of a point's indices; a hub and a group may share a tensor's name."""
        return variables(self.groups, self.hubs, self.shared)

    def __repr__(self) -> str:
        hubs = counted(len(self.hubs), "tensor with several readers", "tensors with several readers")
        return (
            f"Space(mesh {self.mesh.label}, {counted(self.micro_batches, 'micro-batch', 'micro-batches')}: "
            f"{counted(len(self.groups), 'group')}, {hubs}, {counted(len(self.shared), 'tied parameter')})"
        )
