"""What is said of an operator, in one record that every stage asks.

A family module (:mod:`tensoropt.ops.families`) says everything about its operators in its ``SPECS``:

===================  ============================================================================
asked by             fields
===================  ============================================================================
capture              ``precision``
sharding             ``rule``, ``localiser``, ``kernels``, ``samples``, ``random``, ``draws``,
                     ``batch_statistics``
profiling            ``samples``, ``flops``
costs                ``cost_class``, ``kernel_class``, ``launches``, ``linear``
engine               ``evaluated``, ``counted_targets``
===================  ============================================================================

What is left out has a default that is right for most operators: an operator without a rule is run in pieces
to find how it splits, one without a localiser runs the same call on smaller tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import torch

from tensoropt.graph import Operator, OperatorGraph, Ref
from tensoropt.ops.builder import Rule
from tensoropt.ops.calls import LocalCall, OperatorShard

Localiser = Callable[[OperatorShard, LocalCall], LocalCall]
"""(an operator's shard, the operator's own call) -> the call that computes the shard."""
Kernel = Callable[..., Any]
"""Called as ``kernel(context, name, *static, *args, **kwargs)``; see :class:`LocalCall`."""
FlopCount = Callable[..., int]
"""Called with an ATen call's arguments and its result as ``out_val``."""
Shape = Callable[[Ref], tuple[int, ...]]
IndexLimits = Callable[[tuple[Any, ...], Shape], Iterable[tuple[str, tuple[int, int]]]]
"""(arguments, shape of an operand) -> per operand that holds indices its name and (lowest, highest + 1)."""
Adjust = Callable[[Operator, OperatorGraph, dict[str, torch.Tensor], torch.Generator], None]


class CostClass(StrEnum):
    """Kinds of operators that reach alike shares of a device's peak; the names stand in profile stores."""

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
    """What an operator computes in under mixed precision; one without follows its operands."""

    NARROW = "bfloat16"
    WIDE = "float32"
    NARROW_INPUT = "bfloat16 input beside float32 parameters and statistics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Which random operands an operator is well defined on.

    Attributes:
        positive: floating operands lie in (0, 1).
        limits: the range of the operands that hold indices.
        timed: whether timings draw their indices within ``limits`` too. Where they do not they draw 0 and 1,
            as the timings that profile stores hold were taken.
        row_ends: (operand, rows): the operand, by its position among the inputs, that says where groups of
            the rows of another one end.
        adjust: what is changed of the drawn values at last.
    """

    positive: bool = False
    limits: IndexLimits | None = None
    timed: bool = True
    row_ends: tuple[int, int] | None = None
    adjust: Adjust | None = None


class LinearOperands(NamedTuple):
    """Operands of a linear operator, whose backward is a product for each of what it reads and its weight.

    Attributes:
        read, weight, bias: their positions among its arguments.
        transposed: the weight lies as (outputs, inputs), and as (inputs, outputs) otherwise.
    """

    read: int
    weight: int
    bias: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """All that is said of an operator, or of several that are alike.

    Rules, localisers, ``random``, ``batch_statistics``, ``evaluated`` and ``counted_targets`` are said of
    ``targets``. Samples, classes and precision do not depend on the overload: they are said of every overload
    of the operators in ``targets``, and of those in ``without_rule``.

    Attributes:
        targets: ATen overloads, ``aten.linear.default``.
        without_rule: names of operators, without namespace and overload, that nobody wrote a rule for.
        rule: the index space; without one, discovery looks for it.
        localiser: the call that computes a shard; without one it is the same call on smaller tensors.
        kernels: what such a call may run, by the name it has in :attr:`LocalCall.function`. These names
            stand in profile stores and saved explorations, and must not change.
        samples: which random operands it is run on by the rule checker, by discovery and by timings.
        cost_class: which fitted efficiencies of the roofline hold for it.
        kernel_class: the same for ``kernels``.
        launches: whether it launches work on a device, rather than only saying anew how a tensor lies.
        precision: what it computes in under mixed precision.
        flops: FLOP of the calls that it dispatches to, by their schema's name (``aten::_grouped_mm``), where
            PyTorch does not count them.
        reserve: numbers that cuDNN reserves for every step, unit and layer of it in training, by overload; an
            estimate (:mod:`tensoropt.profiling.cuda_recurrent`).
        random: its own call draws random numbers, so that what it is compared with is its localised form.
        draws: whether this call of it draws random numbers, where PyTorch's tag says so of all.
        batch_statistics: a split batch needs the statistics of the whole; micro-batches, which do not know
            each other, refuse it.
        evaluated: the call as ``model.eval()`` makes it.
        counted_targets: a mean over targets that are not ignored, which are counted before the step.
        linear: its operands, where it is linear in what it reads and has no kernel of ours.
    """

    targets: tuple[str, ...] = ()
    without_rule: tuple[str, ...] = ()
    rule: Rule | None = None
    localiser: Localiser | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    samples: Samples | None = None
    cost_class: CostClass | None = None
    kernel_class: CostClass | None = None
    launches: bool = True
    precision: Precision | None = None
    flops: Mapping[str, FlopCount] = field(default_factory=dict)
    reserve: Mapping[str, int] = field(default_factory=dict)
    random: bool = False
    draws: Callable[[Operator], bool] | None = None
    batch_statistics: bool = False
    evaluated: Callable[[Operator, LocalCall], LocalCall] | None = None
    counted_targets: bool = False
    linear: LinearOperands | None = None
