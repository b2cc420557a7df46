"""One rank's part of an operator, and the call that computes it, as plain data.

The description of an operator is one record that every stage uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import prod
from typing import Any, NamedTuple

import torch

from tensoropt.graph import Operator, OperatorGraph, Ref, TorchLiteral, map_refs
from tensoropt.ops.index_space import AtomGraph, IndexSpace, Operand, Rule, canonical, operand_placement
from tensoropt.ops.layouts import Layout, chunk, local_shape

MICRO_AXIS = 0
"""Axis 0 of every mesh is the micro-batch loop: a split in time, without communication."""

_KERNEL_NAMESPACES = frozenset({"kernels", "loss_kernels", "expert_kernels", "quantised_kernels"})
"""The first words of kernels' names, as they appear in profile stores and saved explorations."""


BY_VALUES = "all_to_all_v"
"""The kind of an all-to-all whose sizes depend on values (MPI's name): its bytes are an expectation."""
RING_SEND = "ring_send"
"""The kind of messages that every rank of a group sends to the next one, and the last one to the first."""


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective issued inside a kernel; ``count``: it sums a number that can be known before the step
    runs. The bytes of one of the kind :data:`BY_VALUES` are those of the busiest rank, those of a
    :data:`RING_SEND` those of one message.

    Attributes:
        beside: the share of the kernel's work in the same direction beside which this collective, together
            with the others that have a share, is under way; 0 if the kernel waits for it.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int
    backward: bool = False
    count: bool = False
    beside: float = 0.0


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
        return self.function.split(".")[0] in _KERNEL_NAMESPACES

    def arguments(self, tensors: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every :class:`Ref` replaced by ``tensors(name)``, and with literals
        resolved.
        """
        args = tuple(literal(map_refs(a, tensors)) for a in self.args)
        return args, {k: literal(map_refs(v, tensors)) for k, v in self.kwargs.items()}


def literal(value: Any) -> Any:
    """Return ``value`` with torch literals resolved."""
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
        zigzag: whether sequences are cut in zig-zag order.
    """

    op: Operator
    atoms: AtomGraph
    choices: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None
    zigzag: bool = False

    @property
    def space(self) -> IndexSpace:
        """The operator's index space, refined into atoms."""
        return self.atoms.spaces[self.op.name]

    def axes_of(self, loop: int) -> tuple[int, ...]:
        """Return the mesh axes with more than one part that split a loop."""
        return tuple(a for a, c in enumerate(self.choices) if c == loop and self.mesh[a] > 1)

    def split(self, loops: Sequence[int]) -> tuple[int, ...]:
        """Return the axes that split any of these loops."""
        return tuple(sorted({a for loop in loops for a in self.axes_of(loop)}))

    def steps(self, size: int, axes: Sequence[int]) -> int | tuple[int, ...]:
        """Return how far apart shards of a loop of this size begin that axes cut one after the other; for
        each axis where nested shards are unequal (:func:`tensoropt.ops.kernels.start_of`).
        """
        parts = prod(self.mesh[axis] for axis in axes)
        if len(axes) < 2 or size % parts == 0:
            return chunk(size, parts, 0)[1]
        steps = []
        for axis in axes:
            size = chunk(size, self.mesh[axis], 0)[1]
            steps.append(size)
        return tuple(steps)

    def layout(self, operand: Operand, *, written: bool) -> Layout:
        """Return the layout on the mesh of a tensor that the operator reads or writes."""
        tensor = self.atoms.graph.tensors[operand.tensor]
        return tuple(
            # Canonical, so that equivalent layouts of tensors without a gradient compare equal.
            canonical(tensor, operand_placement(self.space, operand, choice, written=written))
            for choice in self.choices
        )

    def shape(self, operand: Operand, *, written: bool) -> tuple[int, ...]:
        """Return the local shape of a tensor that the operator reads or writes."""
        layout = self.layout(operand, written=written)
        return local_shape(self.atoms.atoms[operand.tensor], layout, self.mesh, self.coordinate)

    def read_shape(self, index: int) -> tuple[int, ...]:
        """Return the local shape of the operand at this position."""
        return self.shape(self.space.reads[index], written=False)

    def write_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the local shape of the result at this position."""
        return self.shape(self.space.writes[index], written=True)

    def loop_named(self, prefix: str) -> list[int]:
        """Return the loops that a rule's loop of this name became: that loop, or one per atom."""
        return [
            i for i, d in enumerate(self.space.dims) if d.name == prefix or d.name.startswith(prefix + ".")
        ]

    def argument(self, index: int, name: str, default: Any) -> Any:
        """Return an argument of the whole operator's call, given by position or by name."""
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default)


_Localiser = Callable[[OperatorShard, LocalCall], LocalCall]
"""Maps (an operator's shard, the operator's own call) to the call that computes the shard."""
Kernel = Callable[..., Any]
"""Called as ``kernel(context, name, *static, *args, **kwargs)``; see :class:`LocalCall`."""
FlopCount = Callable[..., int]
"""A FLOP counter, called with an ATen call's arguments and its result as ``out_val``."""
Shape = Callable[[Ref], tuple[int, ...]]
_IndexLimits = Callable[[tuple[Any, ...], Shape], Iterable[tuple[str, tuple[int, int]]]]
"""Maps (arguments, shape of an operand) to the name and (lowest, highest + 1) of each operand that holds
indices."""
_Adjust = Callable[[Operator, OperatorGraph, dict[str, torch.Tensor], torch.Generator], None]


class CostClass(StrEnum):
    """Classes of operators that reach similar shares of a device's peak; profile stores contain the names."""

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
    """The precision in which an operator computes under mixed precision; an operator without one follows its
    operands."""

    NARROW = "bfloat16"
    WIDE = "float32"
    NARROW_INPUT = "bfloat16 input beside float32 parameters and statistics"


class Domain(StrEnum):
    """The values of an operand for which an operator is defined; for others it raises an error, or reads
    memory that is not its own.
    """

    UNIT = "between 0 and 1"
    DEFINITE = "positive definite matrices"
    PIVOTS = "rows of a matrix, from 1"


def in_domain(drawn: torch.Tensor, domain: Domain) -> torch.Tensor:
    """Return values of the domain, made of random ones."""
    if domain is Domain.UNIT:
        # Away from both ends, where logarithms are steep.
        return drawn.sigmoid() * 0.8 + 0.1
    if domain is Domain.PIVOTS:
        # The first row, which every piece of a matrix has.
        return torch.ones_like(drawn)
    return drawn @ drawn.mH + torch.eye(drawn.shape[-1], dtype=drawn.dtype, device=drawn.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The random operands on which an operator is well defined.

    Attributes:
        positive: whether floating-point operands lie in (0, 1) in the rule checker and in discovery.
        domains: the domains of operands, by their position among the inputs, in timings as well.
        limits: the range of the operands that hold indices.
        timed: whether timings also draw their indices within ``limits``. Otherwise they draw 0 and 1, as in
            the timings that profile stores contain.
        row_ends: (operand, rows): the operand, by its position among the inputs, that says where groups of
            the rows of another one end.
        adjust: changes the drawn values as the last step.
    """

    positive: bool = False
    domains: Mapping[int, Domain] = field(default_factory=dict)
    limits: _IndexLimits | None = None
    timed: bool = True
    row_ends: tuple[int, int] | None = None
    adjust: _Adjust | None = None


class LinearOperands(NamedTuple):
    """The operands of a linear operator, whose backward is one product each for its input and its weight.

    Attributes:
        read, weight, bias: their positions among its arguments.
        transposed: the weight is stored as (outputs, inputs); otherwise as (inputs, outputs).
    """

    read: int
    weight: int
    bias: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The description of an operator, or of several similar ones.

    Rules, localisers, ``random``, ``batch_statistics``, ``evaluated`` and ``counted_targets`` apply to
    ``targets``. Samples, classes and precision do not depend on the overload: they apply to every overload of
    the operators in ``targets``, and of those in ``without_rule``.

    Attributes:
        targets: ATen overloads, ``aten.linear.default``.
        without_rule: names, without namespace and overload, of operators that have no rule.
        rule: the index space; without one, discovery looks for it.
        localiser: gives the call that computes a shard; without one it is the same call on smaller tensors.
        kernels: the kernels that such a call may run, by their name in :attr:`LocalCall.function`. Profile
            stores and saved explorations contain these names, which must not change.
        samples: the random operands on which the rule checker, discovery and timings run it.
        cost_class: the class whose efficiencies apply to it and to ``kernels``, which stand for it.
        reads: how often one kernel reads its operands: twice where every result depends on all of them.
        launches: whether it launches work on a device, rather than only redescribing a tensor's layout.
        precision: the precision in which it computes under mixed precision.
        flops: FLOP counters of the calls that it dispatches to, by their schema's name
            (``aten::_grouped_mm``), if PyTorch does not count them.
        reserve: the numbers that cuDNN reserves per step, unit and layer in training, by overload; an
        estimate (:mod:`tensoropt.profiling.cuda_kernels`). random: its own call draws random numbers, so it
        is compared in its localised form. draws: whether a particular call draws random numbers, if PyTorch's
        tag says so for all calls. batch_statistics: a split batch needs the statistics of the whole;
        micro-batches, which cannot see each other, refuse it. evaluated: the call as in ``model.eval()``.
        counted_targets: a mean over targets that are not ignored, which are counted before the step.
        equal_shards: its kernel derives the place of a shard from the shard's own size, so that all have to
        be of one size. linear: its operands, if it is linear in its input and has no kernel of ours.
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
