"""Index spaces refined into atoms, in which higher stages look operators up (made by ``atoms.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.graph import OperatorGraph, Tensor
from tensoropt.ops.index_space import IndexSpace
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Atoms


@dataclass(frozen=True)
class AtomGraph:
    """The index spaces of a graph, refined into atoms.

    Attributes:
        graph: the operator graph.
        spaces: the index space of each operator, by name; loop ``j`` of an operand is atom ``j`` of its
            tensor.
        atoms: the atom sizes of each dim, by tensor name.
        discovered: for each operator without a rule, the result of running it in pieces.
    """

    graph: OperatorGraph
    spaces: Mapping[str, IndexSpace]
    atoms: Mapping[str, Atoms]
    discovered: Mapping[str, Any] = field(default_factory=dict)

    def discoveries(self) -> dict[str, str]:
        """Map each target to what discovery learned about it, in words."""
        targets = self.graph.by_name
        return {targets[name].target: str(found) for name, found in self.discovered.items()}

    def lost(self) -> dict[str, str]:
        """Map each target to the reason why it could not even be tried, in words."""
        targets = self.graph.by_name
        return {targets[name].target: found.refused for name, found in self.discovered.items() if found.lost}

    def atom_sizes(self, tensor: str) -> tuple[int, ...]:
        """The sizes of all atoms of a tensor, outermost first."""
        return tuple(size for dim in self.atoms[tensor] for size in dim)


def canonical(tensor: Tensor, code: int) -> int:
    """The canonical placement code: without a gradient R/P is R, because only the gradient would differ."""
    return REPLICATE if code == PARTIAL_GRAD and not tensor.requires_grad else code
