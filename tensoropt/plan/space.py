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
    """The names of all choices of a strategy on one mesh at one micro-batch count.

    Attributes:
        mesh: the sizes and names of the axes.
        micro_batches: the micro-batch count.
        groups: for each group of operators its ``members``, its ``parameters`` (graph names), its
            ``configurations`` (for each, the loop dim that each axis splits, its *label*), its ``options``
            (for each configuration, the possible ways to store its parameters), and ``micro``, its label on
            the micro-batch axis. Empty for pipelines and placed plans.
        hubs, shared: the possible placements of tensors with several readers, and of tied parameters.
        keys: the model's own parameter name by graph name.
        notes: where the search was heuristic, in words.
        regions: the name of the repeated block of each group in a block that may be recomputed. A point's
            index for such a group counts its configurations twice: first not recomputed, then recomputed.
        sequence: each group's label for splitting the sequence, if it has one.
        moves: the tensors that may be gathered again in backward. A point's options end with an entry for
            each: 1 if it is gathered again.
        recipes: for each block and each part of it that may be recomputed, a character per group of the
            block: ``0`` if the group is recomputed, ``1`` if not.
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
        return math.prod(self.mesh.shape)

    def position(self, group: str, index: int) -> int:
        """Return the index in a group's ``configurations``, given a point's index, which counts them twice:
        not recomputed, then recomputed."""
        return index % len(self.groups[group]["configurations"])

    def labels(self, group: str, index: int) -> Sequence[str]:
        """Return the loop dim that each axis splits in a group's configuration ``index``."""
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
        """The names of all choices (of groups, hubs, tied parameters), in the order of a point's indices."""
        return variables(self.groups, self.hubs, self.shared)
