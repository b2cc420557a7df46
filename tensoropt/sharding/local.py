"""Operator + choice per mesh axis -> the call that computes one shard.

Most operators run the same ATen call on smaller tensors. For the others sizes and offsets are
rewritten from local shapes, means divide by global counts, and what needs its neighbours or its
coordinate goes through a kernel. They register themselves from :mod:`tensoropt.sharding.shards`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch

from tensoropt.graph import Operator, TorchLiteral, map_refs
from tensoropt.sharding import expert_kernels, kernels, loss_kernels
from tensoropt.sharding.atom_graph import AtomGraph, canonical
from tensoropt.sharding.index_space import IndexSpace, Operand, operand_placement
from tensoropt.sharding.placement import Layout, local_shape

MICRO_AXIS = 0
"""Axis 0 of every mesh here is the micro-batch loop: a split in time, without communication."""


_KERNELS = {"kernels": kernels, "loss_kernels": loss_kernels, "expert_kernels": expert_kernels}


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective issued inside a kernel; ``count``: of a number that can be known before the step runs."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    backward: bool = False
    count: bool = False


@dataclass(frozen=True)
class LocalCall:
    """One rank's call, as plain data: it can be hashed, sent to another process and run there.

    ``function`` names an ATen overload (``aten.linear.default``) or a kernel (``kernels.dropout``); a
    kernel is called as ``kernel(context, name, *static, *args, **kwargs)``. ``args``/``kwargs`` hold
    :class:`Ref` where local tensors go.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = ""
    static: tuple[Any, ...] = ()
    collectives: tuple[InnerCollective, ...] = field(default=())

    @property
    def is_kernel(self) -> bool:
        return self.function.split(".")[0] in _KERNELS

    def bind(self, context: kernels.ShardContext) -> Callable[..., Any]:
        """The callable of ``(*args, **kwargs)`` alone."""
        function = resolve_function(self.function)
        if not self.is_kernel:
            return function
        head = (context, self.name, *self.static)

        def bound(*args: Any, **kwargs: Any) -> Any:
            return function(*head, *args, **kwargs)

        bound.__name__ = function.__name__
        return bound

    def arguments(self, tensors: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with every :class:`Ref` replaced by ``tensors(name)`` and literals resolved."""
        args = tuple(literal(map_refs(a, tensors)) for a in self.args)
        return args, {k: literal(map_refs(v, tensors)) for k, v in self.kwargs.items()}


@cache
def resolve_function(name: str) -> Callable[..., Any]:
    """The ATen overload or kernel of this name."""
    namespace, packet, *rest = name.split(".")
    if namespace in _KERNELS:
        return getattr(_KERNELS[namespace], packet)
    (overload,) = rest
    if not hasattr(getattr(torch.ops, namespace), packet) and namespace in _REGISTERED_BY:
        importlib.import_module(_REGISTERED_BY[namespace])
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


_REGISTERED_BY = {"transformers": "transformers.integrations.moe"}
"""Namespace of operators -> the module whose import makes them; a process that only measures has no model."""


def literal(value: Any) -> Any:
    """``value`` with torch literals resolved."""
    if isinstance(value, TorchLiteral):
        return getattr(torch, value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(literal(item) for item in value)
    return value


@dataclass(frozen=True)
class Placed:
    """An operator with its choices, on a mesh, at a rank's coordinate (or the largest shard).

    Attributes:
        choices: per mesh axis (the micro-batch axis first) a loop dim or a negative code.
        mesh: sizes of all axes, the micro-batch count first.
    """

    op: Operator
    atoms: AtomGraph
    choices: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None

    @property
    def space(self) -> IndexSpace:
        return self.atoms.spaces[self.op.name]

    def axes_of(self, loop: int) -> tuple[int, ...]:
        return tuple(a for a, c in enumerate(self.choices) if c == loop and self.mesh[a] > 1)

    def split(self, loops: Sequence[int]) -> tuple[int, ...]:
        """Axes that split any of these loops."""
        return tuple(sorted({a for loop in loops for a in self.axes_of(loop)}))

    def layout(self, operand: Operand, *, written: bool) -> Layout:
        tensor = self.atoms.graph.tensors[operand.tensor]
        return tuple(
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
        return [
            i for i, d in enumerate(self.space.dims) if d.name == prefix or d.name.startswith(prefix + ".")
        ]

    def argument(self, index: int, name: str, default: Any) -> Any:
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default)


Localiser = Callable[[Placed, LocalCall], LocalCall]
_LOCALISERS: dict[str, Localiser] = {}


def localiser(*targets: str) -> Callable[[Localiser], Localiser]:
    def register(function: Localiser) -> Localiser:
        for target in targets:
            _LOCALISERS[target] = function
        return function

    return register


def localise(placed: Placed) -> LocalCall:
    """The call that computes this rank's shard of the operator."""
    op = placed.op
    base = LocalCall(op.target, op.args, op.kwargs, op.name)
    special = _LOCALISERS.get(op.target)
    if special is not None:
        return special(placed, base)
    if any(operand.means for operand in placed.space.writes):
        return _averaged(placed, base)
    if draws_numbers(op):
        return LocalCall("kernels.seeded", op.args, op.kwargs, op.name, (op.target,))
    return base


def _averaged(placed: Placed, call: LocalCall) -> LocalCall:
    """Outputs that are averages over split loops are divided, so that the parts add up."""
    parts = [prod(placed.mesh[a] for a in placed.split(o.means)) for o in placed.space.writes]
    if all(count == 1 for count in parts):
        return call
    return replace(call, function="kernels.divided", static=(call.function, tuple(parts)))


def draws_numbers(op: Operator) -> bool:
    """Whether the operator's own call draws random numbers, which no two ranks would draw alike."""
    if torch.Tag.nondeterministic_seeded not in getattr(resolve_function(op.target), "tags", ()):
        return False
    if op.target.split(".")[1] in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(op.args[5] and op.args[6])  # dropout between its layers
    return True


# What registers itself above, last because it imports this module.
from tensoropt.sharding import shards  # noqa: E402, F401
