"""The description of an operator, in one record that every stage uses.

A family module (:mod:`tensoropt.ops.families`) describes its operators completely in its ``SPECS``:

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

Omitted fields have defaults that are right for most operators: an operator without a rule is run in pieces to
learn how it splits, and one without a localiser runs the same call on smaller tensors.
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
"""Maps (an operator's shard, the operator's own call) to the call that computes the shard."""
Kernel = Callable[..., Any]
"""Called as ``kernel(context, name, *static, *args, **kwargs)``; see :class:`LocalCall`."""
FlopCount = Callable[..., int]
"""A FLOP counter, called with an ATen call's arguments and its result as ``out_val``."""
Shape = Callable[[Ref], tuple[int, ...]]
IndexLimits = Callable[[tuple[Any, ...], Shape], Iterable[tuple[str, tuple[int, int]]]]
"""Maps (arguments, shape of an operand) to the name and (lowest, highest + 1) of each operand that holds
indices."""
Adjust = Callable[[Operator, OperatorGraph, dict[str, torch.Tensor], torch.Generator], None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The random operands on which an operator is well defined.

    Attributes:
        positive: whether floating-point operands lie in (0, 1).
        limits: the range of the operands that hold indices.
        timed: whether timings also draw their indices within ``limits``. Otherwise they draw 0 and 1, as in
            the timings that profile stores contain.
        row_ends: (operand, rows): the operand, by its position among the inputs, that says where groups of
            the rows of another one end.
        adjust: changes the drawn values as the last step.
    """

    positive: bool = False
    limits: IndexLimits | None = None
    timed: bool = True
    row_ends: tuple[int, int] | None = None
    adjust: Adjust | None = None


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
        cost_class: the class whose fitted roofline efficiencies apply to it.
        kernel_class: the same for ``kernels``.
        launches: whether it launches work on a device, rather than only redescribing a tensor's layout.
        precision: the precision in which it computes under mixed precision.
        flops: FLOP counters of the calls that it dispatches to, by their schema's name
            (``aten::_grouped_mm``), if PyTorch does not count them.
        reserve: how many numbers cuDNN reserves for every step, unit and layer of it in training, by
            overload; an estimate (:mod:`tensoropt.profiling.cuda_recurrent`).
        random: its own call draws random numbers, so it is compared in its localised form.
        draws: whether a particular call draws random numbers, if PyTorch's tag says so for all calls.
        batch_statistics: a split batch needs the statistics of the whole; micro-batches, which cannot see
            each other, refuse it.
        evaluated: the call as in ``model.eval()``.
        counted_targets: a mean over targets that are not ignored, which are counted before the step.
        linear: its operands, if it is linear in its input and has no kernel of ours.
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
