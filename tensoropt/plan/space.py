"""Searched spaces: one mesh and micro-batch count each, with the names of all choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tensoropt.costs.variables import variables
from tensoropt.plan.plan import MeshInfo


@dataclass(frozen=True)
class Space:
    """The searched space of one mesh and micro-batch count.

    Attributes:
        mesh: the sizes and names of the axes.
        micro_batches: the micro-batch count.
        groups: for each group ``micro`` (label on the micro-batch axis), ``members``, ``parameters`` (graph
            names), ``configurations`` (labels per axis) and ``options`` (per configuration and option, each
            parameter's stored placement). Empty for points with a record.
        hubs, shared: placement names of each configuration, by tensor.
        keys: the model's own parameter name by graph name.
        notes: where the search was heuristic.
        regions: group -> its repeated block, if that may be recomputed; the group's index counts its
            configurations once plain, then once recomputed.
        sequence: group -> its label for splitting the sequence, if any.
        moves: tensors that backward may gather again: after the options of its variables, a point has an
            option for each, 1 to gather it again.
        recipes: block -> recipe -> for each of the block's groups, ``1`` if the recipe runs it once, else
            ``0``.
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
        """The number of devices of its plans."""
        return math.prod(self.mesh.shape)

    def position(self, group: str, index: int) -> int:
        """Return the position in the group's lists of configuration ``index``."""
        return index % len(self.groups[group]["configurations"])

    def labels(self, group: str, index: int) -> Sequence[str]:
        """Return the label on each axis of a group's configuration ``index``."""
        labels: Sequence[str] = self.groups[group]["configurations"][self.position(group, index)]
        return labels

    def recomputed(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the blocks that a point recomputes at least in part."""
        again = self._again(choice)
        return tuple(dict.fromkeys(self.regions[name] for name, runs_again in again.items() if runs_again))

    def once(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the groups in recomputed blocks that a point runs once."""
        again, blocks = self._again(choice), set(self.recomputed(choice))
        return tuple(
            name for name, runs_again in again.items() if not runs_again and self.regions[name] in blocks
        )

    def gathered_again(self, options: Sequence[int]) -> tuple[str, ...]:
        """Return the tensors that these options gather again in backward."""
        own = options[len(self.variables) :]
        return tuple(name for name, again in zip(self.moves, own, strict=True) if again)

    def _again(self, choice: Sequence[int]) -> dict[str, bool]:
        return {
            name: index >= len(self.groups[name]["configurations"])
            # A point's first variables are groups, so zip ends before hubs and tied parameters.
            for name, index in zip(self.groups, choice, strict=False)
            if name in self.regions
        }

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The variables in the order of a point's indices; a hub and a group may share a name."""
        return variables(self.groups, self.hubs, self.shared)
