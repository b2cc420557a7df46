"""The one registry of operators: every family's specs, and what the stages ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from tensoropt.graph import Operator, OperatorGraph
from tensoropt.ops.builder import Builder, Opaque
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.context import ShardContext
from tensoropt.ops.families import (
    attention,
    convolution,
    embedding,
    experts,
    generators,
    indexing,
    losses,
    matrix,
    norms,
    pointwise,
    pooling,
    rearranging,
    recurrent,
    reductions,
    scans,
    stages,
    views,
    writes,
)
from tensoropt.ops.index_space import IndexSpace
from tensoropt.ops.kernels import SHARED_KERNELS
from tensoropt.ops.overloads import packet_of, resolve_overload
from tensoropt.ops.spec import CostClass, FlopCount, Kernel, OpSpec, Precision, Samples

Value = TypeVar("Value")

FAMILIES = (
    matrix, convolution, attention, embedding, losses, norms, scans, reductions, pooling, pointwise, views,
    rearranging, indexing, writes, recurrent, experts, generators, stages,
)  # fmt: skip
SPECS: tuple[OpSpec, ...] = tuple(spec for family in FAMILIES for spec in family.SPECS)


def _by_target() -> dict[str, OpSpec]:
    found: dict[str, OpSpec] = {}
    for spec in SPECS:
        for target in spec.targets:
            assert target not in found, f"two specs speak of {target}"
            found[target] = spec
    return found


def _by_packet(field: Callable[[OpSpec], Value | None]) -> dict[str, Value]:
    """A field of the specs by operator without overload; overloads must not contradict each other."""
    found: dict[str, Value] = {}
    for spec in SPECS:
        value = field(spec)
        if value is None:
            continue
        for packet in (*map(packet_of, spec.targets), *spec.without_rule):
            assert found.setdefault(packet, value) == value, f"two specs contradict each other on {packet}"
    return found


def _kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = dict(SHARED_KERNELS)
    for spec in SPECS:
        for name, kernel in spec.kernels.items():
            assert found.setdefault(name, kernel) is kernel, f"two kernels are called {name}"
    return found


BY_TARGET: Mapping[str, OpSpec] = _by_target()
KERNELS: Mapping[str, Kernel] = _kernels()
_SAMPLES = _by_packet(lambda spec: spec.samples)
_PRECISION = _by_packet(lambda spec: spec.precision)
_COST_CLASS = _by_packet(lambda spec: spec.cost_class) | {
    packet_of(name): spec.kernel_class for spec in SPECS if spec.kernel_class for name in spec.kernels
}
_NO_LAUNCH = frozenset(_by_packet(lambda spec: None if spec.launches else True))
_DRAWS = _by_packet(lambda spec: spec.draws)
_FLOPS = {name: count for spec in SPECS for name, count in spec.flops.items()}
_KERNEL_SAMPLES = {name: spec.samples for spec in SPECS if spec.samples for name in spec.kernels}
_NOTHING_SAID = OpSpec()


def spec_of(target: str) -> OpSpec:
    """What is said of this overload; a spec of defaults where nobody said anything."""
    return BY_TARGET.get(target, _NOTHING_SAID)


def index_space(op: Operator, graph: OperatorGraph) -> IndexSpace:
    """The index space of one operator; the fallback without loops when no rule describes it."""
    builder = Builder(op, graph)
    rule = spec_of(op.target).rule
    # Not known: whoever asks may let discovery look for splits.
    if rule is None:
        return builder.build(known=False)
    try:
        rule(builder)
    except Opaque:
        # A fresh builder, as the rule may have given up half-way.
        return Builder(op, graph).build(known=False)
    return builder.build()


def samples_of(target: str) -> Samples:
    """Which random operands an operator is well defined on."""
    return _SAMPLES.get(packet_of(target), Samples())


def timed_limits(call: LocalCall, shape: Callable[[str], tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Per operand of a local call that holds indices its name, and above what they must stay.

    Args:
        shape: local shape of an operand, by name.
    """
    samples = _KERNEL_SAMPLES.get(call.function) if call.is_kernel else samples_of(call.function)
    if samples is None or samples.limits is None or not samples.timed:
        return
    for name, (_, end) in samples.limits(call.args, lambda ref: shape(ref.name)):
        yield name, end


def precision_of(target: str) -> Precision | None:
    """What an operator computes in under mixed precision; None for one that follows its operands."""
    return _PRECISION.get(packet_of(target))


def cost_class_of(function: str) -> CostClass | None:
    """The class of a call's function, operator or kernel, for the roofline; None for one without."""
    return _COST_CLASS.get(packet_of(function))


def launches(function: str) -> bool:
    """Whether a call of this function launches work on a device."""
    return packet_of(function).rstrip("_") not in _NO_LAUNCH


def flops_of(schema: str) -> FlopCount | None:
    """What counts the FLOP of a call of this schema (``aten::mkldnn_rnn_layer``); None if it is not said."""
    return _FLOPS.get(schema)


def reserve_of(target: str) -> int | None:
    """Numbers that cuDNN reserves for every step, unit and layer; None of what is no layer of its."""
    return spec_of(target).reserve.get(target)


def draws_of(target: str) -> Callable[[Operator], bool] | None:
    """What tells whether a call of the operator draws random numbers, where PyTorch's tag is not enough."""
    return _DRAWS.get(packet_of(target))


def evaluated(op: Operator, call: LocalCall) -> LocalCall:
    """The call without what only training does: dropout, batch statistics."""
    change = spec_of(op.target).evaluated
    return call if change is None else change(op, call)


@cache
def resolve_function(name: str) -> Callable[..., Any]:
    """The ATen overload (``aten.linear.default``) or the kernel (``kernels.dropout``) of this name.

    Raises:
        AttributeError: there is none.
    """
    if not LocalCall(name, (), {}).is_kernel:
        return resolve_overload(name)
    if name not in KERNELS:
        raise AttributeError(f"there is no kernel called {name}")
    return KERNELS[name]


def bind(call: LocalCall, context: ShardContext) -> Callable[..., Any]:
    """The callable of ``(*args, **kwargs)`` alone that runs a local call in a rank's context."""
    function = resolve_function(call.function)
    if not call.is_kernel:
        return function
    head = (context, call.name, *call.static)

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*head, *args, **kwargs)

    # fx and profilers show calls by this name.
    bound.__name__ = function.__name__
    return bound
