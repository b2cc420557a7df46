"""An estimate of the memory that recurrent layers keep on GPUs, made without one.

On CUDA, ``lstm`` and ``gru`` are cuDNN's (``aten/src/ATen/native/cudnn/RNN.cpp``). Autograd keeps their
inputs, their output, a *reserve* of cuDNN's, and a buffer into which the weights are copied, because a
lowered program has each of them separately; backward makes the gradients of all weights in one buffer of the
same size (``tools/autograd/derivatives.yaml``, ``_cudnn_rnn``).

Only cuDNN knows the size of the reserve (``cudnnGetRNNTempSpaceSizes``). The estimate follows the sizes in
pytorch/pytorch issue 2895 (cuDNN 7, a P100, float32): 736,000,000 bytes for an LSTM and 864,000,000 for a
GRU; judging by their numbers of parameters, both have four layers of 320 units. The two sizes are in the
ratio 23 to 27. This is the ratio that follows from 5 numbers for every step, unit and layer of an LSTM (its
gates and the cell) and 6 for a GRU, plus one more for what passes between two layers; the total number of
steps in all sequences, which the issue does not state, is then 25,000. cuDNN's workspace, 2 % of the reserve
there, is left out, and so is its padding of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensoropt.ops.registry import reserve_of
from tensoropt.profiling.workload import Workload


def has_recurrent(work: Workload) -> bool:
    """Whether a workload has a layer whose facts on GPUs are estimated."""
    return any(reserve_of(call.function) is not None for call, _ in work.calls)


def reserve_bytes(
    numbers: int, steps: int, hidden: int, layers: int, directions: int, element_bytes: int
) -> int:
    """The bytes of cuDNN's reserve.

    Args:
        numbers: how many are reserved for every step, unit and layer
            (:func:`~tensoropt.ops.registry.reserve_of`).
        steps: the total number of time steps in all sequences of the batch.
        hidden: the units per layer and direction.
    """
    return steps * hidden * directions * (numbers * layers + layers - 1) * element_bytes


class CudaRecurrent(TorchFunctionMode):
    """A mode that uses memory in recurrent layers as GPUs do; for fake tensors, which compute nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        numbers = reserve_of(str(func))
        if numbers is not None:
            return _layers(numbers, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _layers(
    numbers: int,
    x: torch.Tensor,
    states: torch.Tensor | Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    states = [states] if isinstance(states, torch.Tensor) else list(states)
    directions = 2 if bidirectional else 1
    # Only the size of the reserve matters; there is none if no backward follows.
    size = 0
    if train and torch.is_grad_enabled():
        steps = x.shape[0] * x.shape[1]
        size = reserve_bytes(numbers, steps, states[0].shape[-1], num_layers, directions, x.element_size())
    result: tuple[torch.Tensor, ...] = _Layers.apply(size, len(states), directions, x, *states, *weights)
    return result


class _Layers(torch.autograd.Function):
    """The storages that cuDNN's layers create, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, size: int, count: int, directions: int, x: torch.Tensor, *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        states, weights = rest[:count], rest[count:]
        y = x.new_empty((*x.shape[:-1], states[0].shape[-1] * directions))
        last = [state.new_empty(state.shape) for state in states]
        copied = x.new_empty(sum(weight.numel() for weight in weights))
        reserve = x.new_empty(size, dtype=torch.uint8)
        ctx.count = count
        ctx.save_for_backward(x, *rest, y, reserve, copied)
        return y, *last

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        x, *rest = ctx.saved_tensors[:-3]
        states, weights = rest[: ctx.count], rest[ctx.count :]
        flat = x.new_empty(sum(weight.numel() for weight in weights))
        pieces = flat.split([weight.numel() for weight in weights])
        of_weights = [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]
        of_states = [torch.empty_like(state) for state in states]
        return None, None, None, torch.empty_like(x), *of_states, *of_weights
