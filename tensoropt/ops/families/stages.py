"""The ends of a pipeline's stages: operators for tensors that are received and sent."""

from __future__ import annotations

from typing import Any

import torch

from tensoropt.ops.calls import LocalCall, OperatorShard, OpSpec
from tensoropt.ops.index_space import Builder
from tensoropt.ops.kernels import ShardContext

ARRIVE, DEPART = "tensoropt.arrive.default", "tensoropt.depart.default"
"""The targets of the operators for a received tensor, and for a sent one."""


class _Passed(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Arrive(_Passed):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value)


class _Depart(_Passed):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        whole = value.contiguous()  # as messages are
        # The same memory, but not a view: schedules that split a backward detach results in place.
        alias: torch.Tensor = whole.new_empty(0).set_(whole)  # type: ignore[call-overload]
        ctx.save_for_backward(alias)
        return alias


def arrive(context: ShardContext, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a stage receives."""
    arrived: torch.Tensor = _Arrive.apply(value)
    return arrived


def depart(context: ShardContext, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a stage sends, contiguous and never as a view."""
    departed: torch.Tensor = _Depart.apply(value)
    return departed


def _passed(b: Builder) -> None:
    b.along()
    b.linear = True


_KERNELS = {ARRIVE: "kernels.arrive", DEPART: "kernels.depart"}


def _passing(shard: OperatorShard, call: LocalCall) -> LocalCall:
    return LocalCall(_KERNELS[shard.op.target], call.args, {}, call.name)


SPECS = (
    OpSpec(
        targets=(ARRIVE, DEPART),
        rule=_passed,
        localiser=_passing,
        kernels={"kernels.arrive": arrive, "kernels.depart": depart},
        launches=False,
    ),
)
