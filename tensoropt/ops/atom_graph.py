"""Index spaces refined into atoms: what everything above looks operators up in (made by ``atoms.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.graph import OperatorGraph, Tensor
from tensoropt.ops.index_space import IndexSpace
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Atoms


@dataclass(frozen=True)
class AtomGraph:
    """Index spaces refined into atoms.

    Attributes:
        graph: the operator graph.
        spaces: per operator name its index space; loop ``j`` of an operand is atom ``j`` of its tensor.
        atoms: per tensor name the atom sizes of each dim.
        discovered: per operator without a rule what running it in pieces showed.
    """

    graph: OperatorGraph
    spaces: Mapping[str, IndexSpace]
    atoms: Mapping[str, Atoms]
    discovered: Mapping[str, Any] = field(default_factory=dict)

    def discoveries(self) -> dict[str, str]:
        """Target -> what was found about it, for people."""
        targets = self.graph.by_name
        return {targets[name].target: str(found) for name, found in self.discovered.items()}

    def lost(self) -> dict[str, str]:
        """Target -> why it could not even be tried, for people."""
        targets = self.graph.by_name
        return {targets[name].target: found.refused for name, found in self.discovered.items() if found.lost}

    def atom_sizes(self, tensor: str) -> tuple[int, ...]:
        """Sizes of all atoms of a tensor, outermost first."""
        return tuple(size for dim in self.atoms[tensor] for size in dim)


def canonical(tensor: Tensor, code: int) -> int:
    """Without a gradient R/P is R; a placement that only speaks of the gradient says nothing."""
    return REPLICATE if code == PARTIAL_GRAD and not tensor.requires_grad else code
