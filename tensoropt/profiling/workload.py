"""Workloads: the computation of one rank for one group under one configuration, as plain data.

A group is a large operator with its small neighbours, and a configuration says which of its dims each mesh
axis splits. A workload can be hashed by content and pickled, and runs by exactly the executor's calls. All
operators of a group are timed as one chain, so that their strides, shared storages and caches count.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tensoropt.graph import DTYPE_BYTES, FLOATING, Ref, iter_refs, map_refs
from tensoropt.ops.calls import Domain, LocalCall, in_domain
from tensoropt.ops.kernels import ShardContext, SingleDevice
from tensoropt.ops.layouts import local_shape
from tensoropt.ops.localise import localise
from tensoropt.ops.overloads import OwnFunctionError
from tensoropt.ops.registry import bind, samples_of, timed_limits
from tensoropt.sharding.configurations import AxisSizes, Configuration
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.reshard.steps import edge_steps, resharding_elements

Order = tuple[int, ...]
"""The dims of a tensor, ordered by descending stride."""
_VERSION = 5
"""The version of the meaning of a workload, a part of every key."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One rank's share of a tensor, described so that a random tensor like it can be made.

    Attributes:
        shape, dtype: local shape; dtype by PyTorch's name.
        requires_grad: whether the tensor needs a gradient.
        high: the exclusive upper bound of random integers.
        ends: 0 unless the values are the end indices of each expert's rows (mixture of experts); then the
            number of rows of all experts, which are divided evenly.
        order: the order of its dims in memory (:func:`memory_orders`); None if contiguous.
        domain: the values that the operator requires, such as ``between 0 and 1``; "" for any.
        looped: whether the tensor is a parameter of an unrolled loop, and so stays in the caches.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    high: int = 2
    ends: int = 0
    order: Order | None = None
    looped: bool = False
    domain: Domain | Literal[""] = ""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Resolved(NamedTuple):
    """A result with partial sums that the group reduces and reshards before its next operator.

    Attributes:
        tensor: the name of the result.
        shape: the local shape after resharding.
        forward_elements, backward_elements: the most elements alive while the result, or its gradient, is
            resharded, besides the input.
    """

    tensor: str
    shape: tuple[int, ...]
    forward_elements: int
    backward_elements: int


@dataclass(frozen=True)
class Workload:
    """One rank's computation of one group.

    Attributes:
        inputs: (name, spec, role) of each tensor from outside; the role is ``read`` (an activation),
            ``parameter`` or ``free`` (a model input, constant or buffer).
        calls: (call, output names) in order; tensors are ``t0``, ``t1``,... by first use.
        writes: names of the tensors that leave the group.
        names: name in the workload -> name in the graph; not a part of the key.
    """

    inputs: tuple[tuple[str, TensorSpec, str], ...]
    calls: tuple[tuple[LocalCall, tuple[str, ...]], ...]
    resolved: Resolved | None
    writes: tuple[str, ...]
    names: Mapping[str, str]

    @cached_property
    def content(self) -> str:
        """The workload as text. Equal computations on tensors of equal memory layouts have equal text."""
        calls = [
            (c.function, repr(c.args), repr(sorted(c.kwargs.items())), repr(c.static), outs)
            for c, outs in self.calls
        ]
        inputs = [
            # The last fields are in the key only if they are set, which they are for few inputs.
            (n, s.shape, s.dtype, s.requires_grad, role, *filter(None, (s.ends, s.order, s.looped, s.domain)))
            for n, s, role in self.inputs
        ]
        return json.dumps([_VERSION, inputs, calls, self.resolved, self.writes])

    @cached_property
    def key(self) -> str:
        """The first 32 hex digits of the SHA-256 hash of the content."""
        # SHA-256 instead of hash(), because keys are kept in files and compared between processes. 128 bits
        # are kept.
        return hashlib.sha256(self.content.encode()).hexdigest()[:32]

    @property
    def dtype(self) -> str:
        """The narrowest floating-point dtype among the inputs."""
        dtypes = {spec.dtype for _, spec, _ in self.inputs if spec.dtype in FLOATING}
        return min(dtypes, key=lambda d: (DTYPE_BYTES[d], d), default="float32")

    @property
    def has_backward(self) -> bool:
        """Whether any input needs a gradient."""
        return any(spec.requires_grad for _, spec, _ in self.inputs)

    @cached_property
    def done(self) -> tuple[tuple[str, ...], ...]:
        """For each call, the names of the group's inner tensors that no later call reads."""
        lasting = {n for n, _, _ in self.inputs} | set(self.writes)
        last: dict[str, int] = {}
        for position, (call, outputs) in enumerate(self.calls):
            read = iter_refs((call.args, tuple(call.kwargs.values())))
            last.update(dict.fromkeys((*read, *outputs), position))
        return tuple(
            tuple(n for n, p in last.items() if p == position and n not in lasting)
            for position in range(len(self.calls))
        )

    def describe(self) -> str:
        """Return the name of the first call and the shapes of all inputs, for people."""
        call = self.calls[0][0]
        shapes = ", ".join("x".join(map(str, s.shape)) or "scalar" for _, s, _ in self.inputs)
        return f"{call.function.removesuffix('.default')}({shapes})"


def workload(
    graph: GroupGraph,
    configuration: Configuration,
    mesh: AxisSizes,
    orders: Mapping[str, Order] | None = None,
    *,
    contiguous: bool = False,
) -> Workload:
    """Return the workload of a group under a configuration, on the rank with the largest shards.

    Args:
        orders: the result of :func:`memory_orders`, computed if not given.
        contiguous: whether sequences are cut into contiguous parts, as in placed plans, not in zig-zag order.
    """
    atoms, group = graph.atoms, configuration.group
    orders = memory_orders(graph) if orders is None else orders
    tensors = atoms.graph.tensors
    # Short names by first use make workloads of equal layers equal.
    names = group.short_names

    def short(name: str) -> Ref:
        return Ref(names[name])

    calls, zigzag = [], atoms.may_zigzag(mesh) and not contiguous
    for op in group.operators:
        call = localise(configuration.placed(op.name, atoms, mesh, None, zigzag=zigzag))
        args = tuple(map_refs(a, short) for a in call.args)
        kwargs = {k: map_refs(v, short) for k, v in call.kwargs.items()}
        outputs = tuple(names[n] for n in op.outputs)
        calls.append((replace(call, args=args, kwargs=kwargs, name=""), outputs))
    roles = dict.fromkeys(group.reads, "read") | dict.fromkeys(group.free, "free")
    roles |= dict.fromkeys((*group.parameters, *group.shared), "parameter")
    specs: dict[str, TensorSpec] = {}
    for name in names:
        if name in roles:
            shape = local_shape(atoms.atoms[name], configuration.layout(name), mesh)
            specs[names[name]] = TensorSpec(
                shape,
                tensors[name].dtype,
                graph.learns(name, group.name),
                order=orders.get(name),
                looped=graph.users.get(name, 0) >= _LOOP,
            )
    for call, _ in calls:
        first = call.args[0] if call.args else None
        known = isinstance(first, Ref) and first.name in specs
        for name, high in timed_limits(call, lambda n: specs[n].shape) if known else ():
            if name in specs:
                specs[name] = replace(specs[name], high=high)
    for op in group.operators:
        samples, operands = samples_of(op.target), op.inputs()
        if samples.row_ends is not None:
            ends, rows = (operands[position] for position in samples.row_ends)
            if names[ends] in specs:
                specs[names[ends]] = replace(specs[names[ends]], ends=tensors[rows].shape[0])
        for position, domain in samples.domains.items():
            if position < len(operands) and (name := names[operands[position]]) in specs:
                specs[name] = replace(specs[name], domain=domain)
    resolved = None
    if configuration.resolved is not None:
        name, before, after = configuration.resolved
        forward, backward = edge_steps(atoms.atom_sizes(name), mesh, before, after)
        resolved = Resolved(
            names[name],
            local_shape(atoms.atoms[name], after, mesh),
            resharding_elements(forward, mesh),
            resharding_elements(backward, mesh),
        )
    inputs = tuple((names[n], specs[names[n]], roles[n]) for n in names if n in roles)
    writes = tuple(names[n] for n in group.writes)
    return Workload(inputs, tuple(calls), resolved, writes, {v: k for k, v in names.items()})


_LOOP = 3
"""The fewest groups sharing a parameter for which it is assumed to belong to an unrolled loop."""
_T = TypeVar("_T")
_ORDERS: dict[int, Mapping[str, Order]] = {}


def memory_orders(graph: GroupGraph) -> Mapping[str, Order]:
    """Return, by name, the order in memory of the dims of each activation that is not contiguous.

    A kernel's result may be laid out like its input: attention on transposed heads gives a result whose
    transposition back is a view. To find out, all groups run unsplit on fake tensors. Resharding preserves
    the order (:class:`tensoropt.sharding.reshard.redistribute.EdgeSpec`).
    """
    if id(graph) in _ORDERS:
        return _ORDERS[id(graph)]
    orders: dict[str, Order] = {}
    made: dict[str, list[Order | None]] = {}
    for group in graph.groups:
        whole = Configuration(group, (group.unsplit,))
        work = workload(graph, whole, (1,), orders)
        if work.key not in made:
            made[work.key] = _written_orders(work)
        orders.update((n, o) for n, o in zip(group.writes, made[work.key], strict=True) if o is not None)
    _ORDERS[id(graph)] = orders
    # An id may be reused after the graph is gone.
    weakref.finalize(graph, _ORDERS.pop, id(graph), None)
    return orders


def _written_orders(work: Workload) -> list[Order | None]:
    def found(tensors: dict[str, torch.Tensor]) -> list[Order | None]:
        try:
            run_workload(work, tensors, SingleDevice())
        except OwnFunctionError:
            # From a saved graph without its model; most functions preserve the order of their inputs.
            return [None] * len(work.writes)
        return [order_of(tensors[name]) for name in work.writes]

    with torch.no_grad():
        return on_fake_tensors(work, found)


def on_fake_tensors(
    work: Workload,
    use: Callable[[dict[str, torch.Tensor]], _T],
    *modes: AbstractContextManager[Any],
    meta: bool = False,
) -> _T:
    """Call ``use`` under ``modes`` with the workload's inputs, random fake tensors by name; return its
    result. If a kernel has to read values, the tensors are real.

    Args:
        meta: try the meta device first. It takes a quarter of the time, but lacks the kernels that attention
            and recurrent layers have on CPUs.
    """
    if meta:
        # The meta device raises this for requested values, and for operators without a meta kernel.
        with suppress(RuntimeError), ExitStack() as stack:
            for mode in (torch.device("meta"), *modes):
                stack.enter_context(mode)
            return use({name: random_tensor(spec) for name, spec, _ in work.inputs})
    with suppress(DataDependentOutputException, DynamicOutputShapeException), ExitStack() as stack:
        for mode in (FakeTensorMode(), *modes):
            stack.enter_context(mode)
        return use({name: random_tensor(spec) for name, spec, _ in work.inputs})
    return use({name: _tame(random_tensor(replace(spec, high=1))) for name, spec, _ in work.inputs})


def _tame(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value.detach().sigmoid().requires_grad_(value.requires_grad)


def order_of(value: torch.Tensor) -> Order | None:
    """Return a tensor's dims by descending stride; None if it is contiguous or an expanded view."""
    # Dims of size 1 may have any stride, and say nothing about a tensor's memory layout.
    wide, strides = [d for d in range(value.dim()) if value.shape[d] > 1], value.stride()
    if any(strides[d] == 0 for d in wide):
        return None
    inner = sorted(wide, key=lambda d: (-strides[d], d))
    return None if inner == wide else (*(d for d in range(value.dim()) if d not in wide), *inner)


def random_tensor(spec: TensorSpec, device: torch.device | None = None) -> torch.Tensor:
    """Return a random tensor that fits the spec; ``device``: by default the default device."""
    if spec.domain:
        drawn = random_tensor(replace(spec, domain="", requires_grad=False), device)
        return in_domain(drawn, spec.domain).requires_grad_(spec.requires_grad)
    if spec.order is not None:
        lying = replace(spec, shape=tuple(spec.shape[d] for d in spec.order), order=None, requires_grad=False)
        places = [spec.order.index(d) for d in range(len(spec.order))]
        return random_tensor(lying, device).permute(places).requires_grad_(spec.requires_grad)
    dtype = getattr(torch, spec.dtype)
    if spec.dtype in FLOATING or dtype.is_complex:
        value = torch.randn(spec.shape, dtype=dtype, device=device)
    elif spec.ends:
        count = spec.shape[0]
        ends = torch.arange(1, count + 1, device=device).mul(spec.ends)
        value = ends.div(count, rounding_mode="floor").to(dtype)
    elif spec.dtype == "bool":
        # An assumption: masks let most of their elements pass.
        value = torch.rand(spec.shape, device=device) < 0.9
    else:
        value = torch.randint(0, max(spec.high, 1), spec.shape, dtype=dtype, device=device)
    return value.requires_grad_(spec.requires_grad)


def makes_tensors(work: Workload) -> bool:
    """Return whether any call has no tensor among its operands, and so creates one on the default device."""
    return any(not any(iter_refs((call.args, tuple(call.kwargs.values())))) for call, _ in work.calls)


Reshard = Callable[[torch.Tensor, Sequence[int], int], torch.Tensor]
"""(tensor, shape, most elements alive in buffers and result) -> a tensor of that shape."""


class _Reshard(torch.autograd.Function):
    """A stand-in for resharding that allocates as much memory and moves no data."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, resolved: Resolved, use: Reshard) -> torch.Tensor:
        ctx.resolved, ctx.shape, ctx.use = resolved, x.shape, use
        return use(x, resolved.shape, resolved.forward_elements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.use(grad, ctx.shape, ctx.resolved.backward_elements), None, None


def _reshard(x: torch.Tensor, resolved: Resolved) -> torch.Tensor:
    return x.flatten()[: prod(resolved.shape)].clone().view(resolved.shape)


def run_workload(
    work: Workload,
    tensors: dict[str, torch.Tensor],
    context: ShardContext,
    *,
    buffers: Reshard | None = None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Run a workload's calls in order. Their results are added to ``tensors``, and tensors inside the group
    are removed after their last use.

    Args:
        buffers: called instead of the resharding inside the group, to allocate as much memory as in a step.
        after: called after each call, with the call's index.
    """
    for position, (call, outputs) in enumerate(work.calls):
        args, kwargs = call.arguments(tensors.__getitem__)
        result = bind(call, context)(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            tensors[outputs[0]] = result
        else:
            # Some operators return None among their results.
            kept = [r for r in result if isinstance(r, torch.Tensor)]
            tensors.update(zip(outputs, kept, strict=False))
        # These names would keep tensors alive that the executor has already released by now.
        del args, kwargs, result
        if work.resolved is not None and work.resolved.tensor in outputs:
            name, further = work.resolved.tensor, () if buffers is None else (buffers,)
            move = _reshard if buffers is None else _Reshard.apply
            tensors[name] = move(tensors[name], work.resolved, *further)
        for name in work.done[position]:
            tensors.pop(name, None)
        if after is not None:
            after(position)


def differentiable(
    work: Workload, tensors: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    leaves = [tensors[n] for n, spec, _ in work.inputs if spec.requires_grad]
    results = [tensors[n] for n in work.writes if tensors[n].requires_grad]
    return results, leaves
