"""Overlap the reduction of a linear operator's input gradient with the product for its weight gradient.

The operator and the backward of its input's resharding are one autograd function (:func:`linear_beside`),
whose backward runs both matrix products and the collective. :mod:`tensoropt.sharding.groups` chooses the
operators to which this applies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.sharding.reshard.redistribute import EdgeSpec, Rank, begin_reduction, redistribute, travel

_Pair = tuple[torch.Tensor, torch.Tensor]


def bring(runtime: Rank, spec: EdgeSpec, x: torch.Tensor) -> _Pair:
    """Reshard ``x`` outside autograd; return the result, and a tensor that passes its gradient to ``x``."""
    # A compiler orders kernels itself: it is given the edge and the product as they are.
    if torch.compiler.is_compiling():
        moved = redistribute(runtime, spec, x)
        return moved, moved
    pair: _Pair = _Bring.apply(x, runtime, spec)
    if spec.made_again:
        runtime.gathered(pair[0], x, spec)
    return pair


def linear_beside(
    runtime: Rank,
    spec: EdgeSpec,
    transposed: bool,
    link: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> _Pair:
    """Return the resharded input ``value`` for its other readers, and the linear operator's result.

    Args:
        spec: the resharding that made ``value``.
        transposed: whether the weight is stored as (outputs, inputs).
        link: the second result of :func:`bring`, which receives the reduced gradient of ``value``.
    """
    if torch.compiler.is_compiling():
        value = redistribute(runtime, spec, value) if not spec.forward else value
        return value, _linear(value, weight, bias, transposed=transposed)
    return _LinearBeside.apply(link, value.detach(), weight, bias, runtime, spec, transposed)


def _linear(
    value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
) -> torch.Tensor:
    # The very calls that were measured (tensoropt/sharding/groups.py lists them).
    if transposed:
        return F.linear(value, weight, bias)
    return torch.mm(value, weight) if bias is None else torch.addmm(bias, value, weight)


class _Bring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runtime: Rank, spec: EdgeSpec) -> _Pair:
        ctx.set_materialize_grads(False)
        value = travel(runtime, x, spec)
        value = value.view_as(value) if value is x else value
        ctx.mark_non_differentiable(value)
        # Only the shape and type of `x`, which need not stay alive until backward.
        return value, x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        return grad, None, None


class _LinearBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: torch.Tensor,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        runtime: Rank,
        spec: EdgeSpec,
        transposed: bool,
    ) -> _Pair:
        ctx.set_materialize_grads(False)
        ctx.runtime, ctx.spec, ctx.transposed = runtime, spec, transposed
        ctx.micro_batch = runtime.micro_batch
        rows = value.reshape(-1, value.shape[-1])
        flat = _linear(rows, weight, bias, transposed=transposed)
        result = flat.view(*value.shape[:-1], flat.shape[-1])
        ctx.shape = value.shape
        needs_value, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        # As in PyTorch's own product, each factor is kept for the gradient of the other one.
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_value else None)
        return value.view_as(value), result

    @staticmethod
    def backward(ctx: Any, passed: torch.Tensor | None, grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        needs_value, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Only once, as each access to a gathered weight regathers it.
        rows, weight = ctx.saved_tensors
        # As in `_Redistribute`: backward may run after the counter has moved on.
        ctx.runtime.micro_batch = ctx.micro_batch
        incoming = None if grad is None else grad.reshape(-1, grad.shape[-1])
        wait = None
        if needs_value:
            wait = begin_reduction(ctx.runtime, _gradient(ctx, incoming, weight, passed), ctx.spec)
        del weight
        of_weight = of_bias = None
        if incoming is not None and needs_weight:
            of_weight = incoming.t().mm(rows) if ctx.transposed else rows.t().mm(incoming)
        if incoming is not None and needs_bias:
            of_bias = incoming.sum(0)
        return None if wait is None else wait(), None, of_weight, of_bias, None, None, None


def _gradient(
    ctx: Any, incoming: torch.Tensor | None, weight: torch.Tensor, passed: torch.Tensor | None
) -> torch.Tensor:
    if incoming is None:
        assert passed is not None, "autograd passes at least one gradient"
        return passed.clone(memory_format=torch.contiguous_format)
    gradient = incoming.mm(weight if ctx.transposed else weight.t()).view(ctx.shape)
    return gradient if passed is None else gradient.add_(passed)
