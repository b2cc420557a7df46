"""The ends of a pipeline's stages: operators for tensors that arrive and depart."""

from __future__ import annotations

from typing import Any

import torch

from tensoropt.ops.calls import LocalCall, OperatorShard, OpSpec
from tensoropt.ops.index_space import Builder
from tensoropt.ops.kernels import ShardContext

ARRIVE, DEPART = "tensoropt.arrive.default", "tensoropt.depart.default"
"""The targets of a received tensor, and of one that is sent."""


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        whole = value.contiguous()  # as messages are
        # The same memory, but not a view: schedules that split a backward detach results in place.
        alias: torch.Tensor = whole.new_empty(0).set_(whole)  # type: ignore[call-overload]
        ctx.save_for_backward(alias)
        return alias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def arrive(context: ShardContext, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the received tensor."""
    arrived: torch.Tensor = _Arrive.apply(value)
    return arrived


def depart(context: ShardContext, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the sent tensor, always as a separate result."""
    departed: torch.Tensor = _Depart.apply(value)
    return departed


def passed(b: Builder) -> None:
    """Split every dim."""
    loops = b.loops(b.output().shape)
    b.read(b.arg(0), loops)
    b.write(loops)
    b.linear = True


def _arriving(shard: OperatorShard, call: LocalCall) -> LocalCall:
    return LocalCall("kernels.arrive", call.args, {}, call.name)


def _departing(shard: OperatorShard, call: LocalCall) -> LocalCall:
    return LocalCall("kernels.depart", call.args, {}, call.name)


SPECS = (
    OpSpec(
        targets=(ARRIVE,),
        rule=passed,
        localiser=_arriving,
        kernels={"kernels.arrive": arrive},
        launches=False,
    ),
    OpSpec(
        targets=(DEPART,),
        rule=passed,
        localiser=_departing,
        kernels={"kernels.depart": depart},
        launches=False,
    ),
)
