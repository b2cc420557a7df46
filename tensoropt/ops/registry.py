"""The registry of operators: the descriptions of all families, and functions that look them up."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from tensoropt.graph import Operator, OperatorGraph, iter_refs
from tensoropt.ops import families
from tensoropt.ops.calls import CostClass, FlopCount, Kernel, LocalCall, OpSpec, Precision, Samples
from tensoropt.ops.families import experts, routed_experts
from tensoropt.ops.index_space import Builder, IndexSpace, Opaque, need_not_ask
from tensoropt.ops.kernels import SHARED_KERNELS, ShardContext
from tensoropt.ops.overloads import packet_of, resolve_overload

_Value = TypeVar("_Value")

_FAMILIES = [import_module(f"{families.__name__}.{m.name}") for m in iter_modules(families.__path__)]
_SPECS: tuple[OpSpec, ...] = tuple(spec for family in _FAMILIES for spec in family.SPECS)


def _by_packet(field: Callable[[OpSpec], _Value | None]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for spec in _SPECS:
        value = field(spec)
        if value is None:
            continue
        for packet in (*map(packet_of, spec.targets), *spec.without_rule):
            assert values.setdefault(packet, value) == value, f"two specs contradict each other on {packet}"
    return values


_BY_TARGET = {target: spec for spec in _SPECS for target in spec.targets}
assert len(_BY_TARGET) == sum(len(spec.targets) for spec in _SPECS), "two specs describe one overload"
KERNELS: Mapping[str, Kernel] = SHARED_KERNELS | {n: k for spec in _SPECS for n, k in spec.kernels.items()}
assert all(KERNELS[n] is k for of in (SHARED_KERNELS, *(s.kernels for s in _SPECS)) for n, k in of.items()), (
    "two kernels have one name"
)
_SAMPLES = _by_packet(lambda spec: spec.samples)
_PRECISION = _by_packet(lambda spec: spec.precision)
_COST_CLASS = _by_packet(lambda spec: spec.cost_class) | {
    packet_of(name): spec.cost_class for spec in _SPECS if spec.cost_class for name in spec.kernels
}
_READS = {name: spec.reads for spec in _SPECS for name in (*spec.targets, *spec.kernels)}
_EXPERTS = frozenset(
    target for family in (experts, routed_experts) for spec in family.SPECS for target in spec.targets
)
_NO_LAUNCH = frozenset(_by_packet(lambda spec: None if spec.launches else True))
_DRAWS = _by_packet(lambda spec: spec.draws)
_FLOPS = {name: count for spec in _SPECS for name, count in spec.flops.items()}
_KERNEL_SAMPLES = {name: spec.samples for spec in _SPECS if spec.samples for name in spec.kernels}
_NOTHING_SAID = OpSpec()


def spec_of(target: str) -> OpSpec:
    """Return the description of an overload; default values if no family describes it."""
    return _BY_TARGET.get(target, _NOTHING_SAID)


def index_space(op: Operator, graph: OperatorGraph) -> IndexSpace:
    """Return the loops and operands of one operator; without a rule, the operator has no loops."""
    builder = Builder(op, graph)
    rule = spec_of(op.target).rule
    # Not known: callers may let discovery look for splits.
    if rule is None:
        return builder.build(known=False)
    try:
        rule(builder)
    except Opaque:
        # A new builder, because the rule may have given up half-way.
        return Builder(op, graph).build(known=False)
    unread = (name for name in _unread(op, builder.consulted) if not need_not_ask(rule, name))
    if any(unread) or builder.leaves_out_a_result():
        return Builder(op, graph).build()
    return builder.build()


def _unread(op: Operator, consulted: Container[int | str]) -> list[str]:
    """Return the names of an ATen operator's arguments that its rule has not read, except tensors and values
    at their default; none for other operators.

    Args:
        consulted: positions and names of the arguments that the rule has read.
    """
    if not op.target.startswith("aten."):
        return []
    found = []
    schema = resolve_overload(op.target)._schema  # type: ignore[attr-defined]
    for position, argument in enumerate(schema.arguments):
        default = argument.default_value
        value = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name, default)
        asked = position in consulted or argument.name in consulted
        if not asked and value != default and not any(iter_refs((value,))):
            found.append(argument.name)
    return found


def samples_of(target: str) -> Samples:
    return _SAMPLES.get(packet_of(target), Samples())


def timed_limits(call: LocalCall, shape: Callable[[str], tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield (name, upper bound) of each operand of indices that timings draw from the whole range. ``shape``
    is a function from a tensor's name to its local shape."""
    samples = _KERNEL_SAMPLES.get(call.function) if call.is_kernel else samples_of(call.function)
    if samples is None or samples.limits is None or not samples.timed:
        return
    for name, (_, end) in samples.limits(call.args, lambda ref: shape(ref.name)):
        yield name, end


def precision_of(target: str) -> Precision | None:
    """Return an operator's dtype under mixed precision; None for the widest dtype of its activations."""
    return _PRECISION.get(packet_of(target))


def cost_class_of(function: str) -> CostClass | None:
    """Return the cost class (operators of similar efficiency) of an operator or kernel, or None."""
    return _COST_CLASS.get(packet_of(function))


def is_dense_transformer(targets: Iterable[str]) -> bool:
    """Return whether operators include attention, but no experts, convolutions or recurrent layers."""
    names = set(targets)
    classes = set(map(cost_class_of, names))
    of_others = {CostClass.CONVOLUTION, CostClass.RECURRENT} & classes
    return CostClass.ATTENTION in classes and not of_others and names.isdisjoint(_EXPERTS)


def reads_of(function: str) -> int:
    """Return how often the kernel of a function reads its operands."""
    return _READS.get(function, 1)


def launches(function: str) -> bool:
    """Return whether a call of a function launches a kernel on a device."""
    return packet_of(function).rstrip("_") not in _NO_LAUNCH


def flops_of(schema: str) -> FlopCount | None:
    """Return the FLOP counter of a schema (``aten::mkldnn_rnn_layer``), or None."""
    return _FLOPS.get(schema)


def reserve_of(target: str) -> int | None:
    """Return how many values cuDNN keeps for backward per time step, unit and layer, or None."""
    return spec_of(target).reserve.get(target)


def draws_of(target: str) -> Callable[[Operator], bool] | None:
    """Return a function that tells which calls draw random numbers; None if PyTorch's tag tells it."""
    return _DRAWS.get(packet_of(target))


def evaluated(op: Operator, call: LocalCall) -> LocalCall:
    """Return the call that replaces an operator's local call in eval mode."""
    change = spec_of(op.target).evaluated
    return call if change is None else change(op, call)


@cache
def resolve_function(name: str) -> Callable[..., Any]:
    """Return the ATen overload or the kernel (``kernels.dropout``); AttributeError if there is none."""
    if not LocalCall(name, (), {}).is_kernel:
        return resolve_overload(name)
    if name not in KERNELS:
        raise AttributeError(f"there is no kernel called {name}")
    return KERNELS[name]


def bind(call: LocalCall, context: ShardContext) -> Callable[..., Any]:
    """Return a function of ``(*args, **kwargs)`` that runs a local call on the rank of ``context``."""
    function = resolve_function(call.function)
    if not call.is_kernel:
        return function
    head = (context, call.name, *call.static)

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*head, *args, **kwargs)

    # fx and profilers show calls under this name.
    bound.__name__ = function.__name__
    return bound
