"""Descriptions of operators, of one rank's shard of an operator, and of the call that computes the shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import prod
from typing import Any, NamedTuple

import torch

from tensoropt.graph import Operator, OperatorGraph, Ref, TorchLiteral, map_refs
from tensoropt.ops.index_space import AtomGraph, IndexSpace, Operand, Rule, canonical, operand_placement
from tensoropt.ops.layouts import Layout, chunk, local_shape

MICRO_AXIS = 0
"""The number of the micro-batch axis of every mesh, which splits a step in time."""

_KERNEL_NAMESPACES = frozenset({"kernels", "loss_kernels", "expert_kernels", "quantised_kernels"})
"""The namespaces of this project's kernels, as in profile stores and saved explorations."""


BY_VALUES = "all_to_all_v"
"""The kind of an all-to-all whose sizes depend on values (MPI's name); its size is an expectation."""
RING_SEND = "ring_send"
"""The kind of messages from every rank of a group to the next one, in a ring."""


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective that a kernel runs itself.

    Attributes:
        bytes: size in bytes of one rank's tensor. For :data:`BY_VALUES` it is that of the busiest rank, for
            :data:`RING_SEND` that of one message.
        count: whether it sums a number that could be counted before the step, such as a mean's number of
            targets.
        beside: share (0 to 1) of the kernel's work that overlaps with such collectives; 0 for none.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int
    backward: bool = False
    count: bool = False
    beside: float = 0.0


@dataclass(frozen=True)
class LocalCall:
    """One rank's call of an operator or kernel, as hashable, picklable data.

    ``function`` names an ATen overload (``aten.linear.default``) or a kernel of this project
    (``kernels.dropout``), called as ``kernel(context, name, *static, *args, **kwargs)``. A :class:`Ref` in
    ``args`` or ``kwargs`` stands for a local tensor.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = ""
    static: tuple[Any, ...] = ()
    collectives: tuple[InnerCollective, ...] = field(default=())

    @property
    def is_kernel(self) -> bool:
        """Whether the call runs one of this project's kernels, and not an operator of PyTorch."""
        return self.function.split(".")[0] in _KERNEL_NAMESPACES

    def arguments(self, tensors: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs), with ``tensors(name)`` in place of each :class:`Ref`, and with PyTorch's
        objects (such as dtypes) in place of their names."""
        args = tuple(literal(map_refs(a, tensors)) for a in self.args)
        return args, {k: literal(map_refs(v, tensors)) for k, v in self.kwargs.items()}


def literal(value: Any) -> Any:
    if isinstance(value, TorchLiteral):
        return getattr(torch, value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(literal(item) for item in value)
    return value


@dataclass(frozen=True)
class OperatorShard:
    """One rank's shard of an operator; without a coordinate, the largest shard.

    Attributes:
        choices: per mesh axis, the number of the loop that the axis splits, or a negative code for no loop.
        mesh: sizes of all axes; axis 0 is the number of micro-batches.
        zigzag: whether sequences are cut in zig-zag order (two chunks per rank, for equal causal work).
    """

    op: Operator
    atoms: AtomGraph
    choices: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None
    zigzag: bool = False

    @property
    def space(self) -> IndexSpace:
        return self.atoms.spaces[self.op.name]

    def split(self, loops: Collection[int]) -> tuple[int, ...]:
        """Return the mesh axes of size above 1 that split any of ``loops``."""
        return tuple(a for a, c in enumerate(self.choices) if c in loops and self.mesh[a] > 1)

    def steps(self, size: int, axes: Sequence[int]) -> int | tuple[int, ...]:
        """Return the distance between the starts of shards of a loop with ``size`` iterations, or one
        distance per axis if nested axes cut the loop unevenly."""
        parts = prod(self.mesh[axis] for axis in axes)
        if len(axes) < 2 or size % parts == 0:
            return chunk(size, parts, 0)[1]
        steps = []
        for axis in axes:
            size = chunk(size, self.mesh[axis], 0)[1]
            steps.append(size)
        return tuple(steps)

    def layout(self, operand: Operand, *, written: bool) -> Layout:
        tensor = self.atoms.graph.tensors[operand.tensor]
        return tuple(
            # Canonical, so that equivalent layouts of tensors without a gradient compare equal.
            canonical(tensor, operand_placement(self.space, operand, choice, written=written))
            for choice in self.choices
        )

    def shape(self, operand: Operand, *, written: bool) -> tuple[int, ...]:
        layout = self.layout(operand, written=written)
        return local_shape(self.atoms.atoms[operand.tensor], layout, self.mesh, self.coordinate)

    def read_shape(self, index: int) -> tuple[int, ...]:
        return self.shape(self.space.reads[index], written=False)

    def write_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.shape(self.space.writes[index], written=True)

    def loop_named(self, prefix: str) -> list[int]:
        """Return the numbers of the loops that a rule calls ``prefix``: one, or one per atom (factor)."""
        return [
            i for i, d in enumerate(self.space.dims) if d.name == prefix or d.name.startswith(prefix + ".")
        ]

    def argument(self, index: int, name: str, default: Any) -> Any:
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default)


_Localiser = Callable[[OperatorShard, LocalCall], LocalCall]
"""A function from a shard and the operator's own call to the call that computes the shard."""
Kernel = Callable[..., Any]
"""A function called as ``kernel(context, name, *static, *args, **kwargs)``; see :class:`LocalCall`."""
FlopCount = Callable[..., int]
"""A function that counts FLOP from an ATen call's arguments and its result ``out_val``."""
Shape = Callable[[Ref], tuple[int, ...]]
_IndexLimits = Callable[[tuple[Any, ...], Shape], Iterable[tuple[str, tuple[int, int]]]]
"""A function from arguments and shapes to name and (lowest, highest + 1) of each index operand."""
_Adjust = Callable[[Operator, OperatorGraph, dict[str, torch.Tensor], torch.Generator], None]


class CostClass(StrEnum):
    """Classes of operators that reach similar shares of a device's peak. Profile stores save these names."""

    MATRIX = "matrix product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NORM = "norm"
    LOOKUP = "lookup"
    LOSS = "loss"
    POOLING = "pooling"
    ELEMENT_WISE = "element-wise"


class Precision(Enum):
    """The dtype in which an operator computes under mixed precision. An operator that declares none computes
    in the widest dtype of its activations."""

    NARROW = "bfloat16"
    WIDE = "float32"
    NARROW_INPUT = "bfloat16 input beside float32 parameters and statistics"


class Domain(StrEnum):
    """The values that an operand must have so that the operator neither fails nor reads invalid memory."""

    UNIT = "between 0 and 1"
    DEFINITE = "positive definite matrices"
    PIVOTS = "rows of a matrix, from 1"


def in_domain(drawn: torch.Tensor, domain: Domain) -> torch.Tensor:
    if domain is Domain.UNIT:
        # Away from both ends, where logarithms are steep.
        return drawn.sigmoid() * 0.8 + 0.1
    if domain is Domain.PIVOTS:
        # The first row, which every piece of a matrix has.
        return torch.ones_like(drawn)
    return drawn @ drawn.mH + torch.eye(drawn.shape[-1], dtype=drawn.dtype, device=drawn.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Constraints on random operands, under which an operator is well defined.

    Attributes:
        positive: whether floating-point operands are drawn from (0, 1), except in timings.
        domains: values that an input must have, by its position; also in timings.
        limits: function that returns the range of each index operand.
        timed: whether timings draw indices from the whole range of ``limits``; otherwise only 0 and 1.
        row_ends: positions of two inputs: the end of each group of rows, and the rows.
        adjust: function that changes the drawn values in place at the end.
    """

    positive: bool = False
    domains: Mapping[int, Domain] = field(default_factory=dict)
    limits: _IndexLimits | None = None
    timed: bool = True
    row_ends: tuple[int, int] | None = None
    adjust: _Adjust | None = None


class LinearOperands(NamedTuple):
    """The positions of a linear operator's arguments; ``transposed`` if the weight is (outputs, inputs)."""

    read: int
    weight: int
    bias: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The description of an operator, or of several similar ones.

    ``samples``, ``cost_class``, ``precision``, ``launches`` and ``draws`` apply to every overload of
    ``targets`` and ``without_rule``; other attributes apply to ``targets`` only.

    Attributes:
        targets: ATen overloads, such as ``aten.linear.default``.
        without_rule: operators that have no rule, as names without namespace and overload.
        rule: function that describes the loops; without one, running the operator in pieces finds its splits.
        localiser: function that returns the call for a shard; by default the same call on smaller tensors.
        kernels: kernels that such calls use, by the names in profile stores and saved explorations.
        samples: constraints on random operands for rule checks, discovery of splits, and timings.
        cost_class: class of similar efficiency, for the operator and ``kernels``.
        reads: number of times that a kernel reads its operands; 2 if each result depends on all elements.
        launches: whether a call launches a kernel on a device.
        precision: dtype under mixed precision; None for the widest dtype of its activations.
        flops: FLOP counters that PyTorch lacks, by schema (``aten::_grouped_mm``).
        reserve: by overload, the estimated number of values that cuDNN keeps for backward per time step,
            hidden unit and layer (:mod:`tensoropt.profiling.cuda_kernels`).
        random: whether PyTorch's call draws random numbers; rule checks then compare with the unsplit kernel.
        draws: function that tells whether a call draws random numbers; None to rely on PyTorch's tag.
        batch_statistics: whether it uses the whole batch's statistics; training then refuses micro-batches.
        evaluated: function that returns the call in eval mode.
        counted_targets: whether it may be a mean over the targets that are not ignored; the number of such
            targets is then counted before the step.
        equal_shards: whether shards must have equal sizes, because the kernel derives a shard's start from
            them.
        linear: positions of the arguments, if it is linear in its input and needs no kernel of this project.
    """

    targets: tuple[str, ...] = ()
    without_rule: tuple[str, ...] = ()
    rule: Rule | None = None
    localiser: _Localiser | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    samples: Samples | None = None
    cost_class: CostClass | None = None
    reads: int = 1
    launches: bool = True
    precision: Precision | None = None
    flops: Mapping[str, FlopCount] = field(default_factory=dict)
    reserve: Mapping[str, int] = field(default_factory=dict)
    random: bool = False
    draws: Callable[[Operator], bool] | None = None
    batch_statistics: bool = False
    evaluated: Callable[[Operator, LocalCall], LocalCall] | None = None
    counted_targets: bool = False
    equal_shards: bool = False
    linear: LinearOperands | None = None


def aten(names: str, rule: Rule | None = None, **fields: Any) -> OpSpec:
    """Return the description of several ATen overloads, named in one text: ``mm.default bmm.default``.

    Args:
        fields: other fields of :class:`OpSpec`.
    """
    return OpSpec(targets=tuple(f"aten.{name}" for name in names.split()), rule=rule, **fields)
