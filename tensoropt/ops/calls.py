"""One rank's part of an operator, and the call that computes it, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensoropt.graph import Operator, TorchLiteral, map_refs
from tensoropt.ops.atom_graph import AtomGraph, canonical
from tensoropt.ops.index_space import IndexSpace, Operand, operand_placement
from tensoropt.ops.layouts import Layout, local_shape

MICRO_AXIS = 0
"""Axis 0 of every mesh is the micro-batch loop: a split in time, without communication."""

KERNEL_NAMESPACES = frozenset({"kernels", "loss_kernels", "expert_kernels"})
"""The first words of kernels' names, as they appear in profile stores and saved explorations."""


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective issued inside a kernel; ``count``: it sums a number that can be known before the step
    runs."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    backward: bool = False
    count: bool = False


@dataclass(frozen=True)
class LocalCall:
    """One rank's call, as plain data: it can be hashed, sent to another process and run there.

    ``function`` names an ATen overload (``aten.linear.default``) or a kernel (``kernels.dropout``); a kernel
    is called as ``kernel(context, name, *static, *args, **kwargs)``. ``args``/``kwargs`` hold a :class:`Ref`
    in place of each local tensor.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = ""
    static: tuple[Any, ...] = ()
    collectives: tuple[InnerCollective, ...] = field(default=())

    @property
    def is_kernel(self) -> bool:
        """Whether it runs a kernel of one of the families, rather than PyTorch's own operator."""
        return self.function.split(".")[0] in KERNEL_NAMESPACES

    def arguments(self, tensors: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every :class:`Ref` replaced by ``tensors(name)``, and with literals resolved."""
        args = tuple(literal(map_refs(a, tensors)) for a in self.args)
        return args, {k: literal(map_refs(v, tensors)) for k, v in self.kwargs.items()}


def literal(value: Any) -> Any:
    """``value`` with torch literals resolved."""
    if isinstance(value, TorchLiteral):
        return getattr(torch, value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(literal(item) for item in value)
    return value


@dataclass(frozen=True)
class OperatorShard:
    """One rank's part of an operator, or the largest part if no coordinate is given.

    Attributes:
        choices: for each mesh axis (the micro-batch axis first), a loop dim or a negative code.
        mesh: sizes of all axes, the micro-batch count first.
    """

    op: Operator
    atoms: AtomGraph
    choices: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None

    @property
    def space(self) -> IndexSpace:
        """The operator's index space, refined into atoms."""
        return self.atoms.spaces[self.op.name]

    def axes_of(self, loop: int) -> tuple[int, ...]:
        """The mesh axes with more than one part that split a loop."""
        return tuple(a for a, c in enumerate(self.choices) if c == loop and self.mesh[a] > 1)

    def split(self, loops: Sequence[int]) -> tuple[int, ...]:
        """The axes that split any of these loops."""
        return tuple(sorted({a for loop in loops for a in self.axes_of(loop)}))

    def layout(self, operand: Operand, *, written: bool) -> Layout:
        """The layout on the mesh of a tensor that the operator reads or writes."""
        tensor = self.atoms.graph.tensors[operand.tensor]
        return tuple(
            # Canonical, so that equivalent layouts of tensors without a gradient compare equal.
            canonical(tensor, operand_placement(self.space, operand, choice, written=written))
            for choice in self.choices
        )

    def shape(self, operand: Operand, *, written: bool) -> tuple[int, ...]:
        """The local shape of a tensor that the operator reads or writes."""
        layout = self.layout(operand, written=written)
        return local_shape(self.atoms.atoms[operand.tensor], layout, self.mesh, self.coordinate)

    def read_shape(self, index: int) -> tuple[int, ...]:
        """The local shape of the operand at this position."""
        return self.shape(self.space.reads[index], written=False)

    def write_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of the result at this position."""
        return self.shape(self.space.writes[index], written=True)

    def loop_named(self, prefix: str) -> list[int]:
        """The loops that a rule's loop of this name became: that loop, or one per atom."""
        return [
            i for i, d in enumerate(self.space.dims) if d.name == prefix or d.name.startswith(prefix + ".")
        ]

    def argument(self, index: int, name: str, default: Any) -> Any:
        """An argument of the whole operator's call, given by position or by name."""
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default)
