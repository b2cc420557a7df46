"""Searched spaces: one mesh with one micro-batch count each, and the names of all choices on it."""

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
    """The choices of a strategy on one mesh at one micro-batch count, by name.

    Attributes:
        mesh: the sizes and names of the axes.
        micro_batches: the micro-batch count.
        groups: for each group of operators ``micro`` (label on the micro-batch axis), ``members``,
            ``parameters`` (graph names), ``configurations`` (labels per axis) and ``options`` (per
            configuration and option, each parameter's stored placement). Empty for points with a record.
        hubs, shared: the possible placements of tensors with several readers, and of tied parameters.
        keys: the model's own parameter name by graph name.
        notes: where the search was heuristic, in words.
        regions: the repeated block of each group in a block that may be recomputed; the group's index counts
            its configurations once plain, then once recomputed.
        sequence: each group's label for splitting the sequence, if it has one.
        moves: the tensors that backward may gather again. A point's options have an entry for each after
            those of its variables: 1 to gather it again.
        recipes: for each block and recipe (part to recompute), a character per group of the block: ``1`` if
            the group is not recomputed, else ``0``.
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
        """The number of devices of the mesh."""
        return math.prod(self.mesh.shape)

    def position(self, group: str, index: int) -> int:
        """Return the position of configuration ``index``, plain or recomputed, in the group's lists."""
        return index % len(self.groups[group]["configurations"])

    def labels(self, group: str, index: int) -> Sequence[str]:
        """Return the label on each axis for a group's configuration ``index``."""
        labels: Sequence[str] = self.groups[group]["configurations"][self.position(group, index)]
        return labels

    def recomputed(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the blocks that a point recomputes at least in part."""
        again = self._again(choice)
        return tuple(dict.fromkeys(self.regions[name] for name, runs_again in again.items() if runs_again))

    def once(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the groups in recomputed blocks that a point does not recompute."""
        again, blocks = self._again(choice), set(self.recomputed(choice))
        return tuple(
            name for name, runs_again in again.items() if not runs_again and self.regions[name] in blocks
        )

    def gathered_again(self, options: Sequence[int]) -> tuple[str, ...]:
        """Return the tensors that are gathered again in backward, by a point's options."""
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
        """The names of a strategy's variables, in the order of a point's indices."""
        return variables(self.groups, self.hubs, self.shared)
