"""The memory of CUDA's attention kernels and recurrent layers, found without a GPU.

``scaled_dot_product_attention`` chooses a kernel by device, dtypes, shapes, mask and dropout. Each kernel has
its own operator with a meta kernel, which is called here by name on fake tensors. Source, PyTorch 2.13:
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``priority_order``, ``can_use_..._attention``) and
``transformers/attention.cpp``.

``lstm`` and ``gru`` are cuDNN's (``aten/src/ATen/native/cudnn/RNN.cpp``). Autograd saves inputs, output, a
copy of the weights, and cuDNN's *reserve*, a buffer from forward to backward. Backward makes all weight
gradients in one buffer (``tools/autograd/derivatives.yaml``, ``_cudnn_rnn``). Only cuDNN knows the reserve's
size. It is estimated as 5 numbers per time step, hidden unit and layer of an LSTM, 6 of a GRU, and one more
between two layers. This follows pytorch/pytorch issue 2895 (cuDNN 7, P100, float32): 736,000,000 bytes for an
LSTM, 864,000,000 for a GRU. cuDNN's workspace, 2 % of the reserve, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensoropt.ops.attention_in_blocks import block_kernel
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.registry import reserve_of
from tensoropt.ops.ring_attention import BLOCKS_FORM, RING_FORM
from tensoropt.profiling.workload import Workload


def has_recurrent(work: Workload) -> bool:
    """Return whether a workload has a recurrent layer, whose memory on GPUs can only be estimated."""
    return any(reserve_of(call.function) is not None for call, _ in work.calls)


def _reserve_bytes(
    numbers: int, steps: int, hidden: int, layers: int, directions: int, element_bytes: int
) -> int:
    """Return the estimated size of cuDNN's reserve (a buffer from forward to backward) in bytes.

    Args:
        numbers: the values stored per step, unit and layer (:func:`~tensoropt.ops.registry.reserve_of`).
        steps: the time steps, summed over the sequences of the batch.
        hidden: the units per layer and direction.
    """
    return steps * hidden * directions * (numbers * layers + layers - 1) * element_bytes


class CudaRecurrent(TorchFunctionMode):
    """A torch function mode in which recurrent layers on fake tensors allocate as much memory as on GPUs."""

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
    size, steps = 0, x.shape[0] * x.shape[1]
    if train and torch.is_grad_enabled():
        size = _reserve_bytes(numbers, steps, states[0].shape[-1], num_layers, directions, x.element_size())
    return _Layers.apply(size, len(states), directions, x, *states, *weights)


class _Layers(torch.autograd.Function):
    """A stand-in for cuDNN's layers that allocates their storages, and computes nothing."""

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


Capability = tuple[int, int]
"""A GPU's compute capability, such as ``(9, 0)`` for an H100."""

_FLASH, _CUDNN, _EFFICIENT, _MATH = "flash", "cudnn", "efficient", "math"
_HALF = (torch.float16, torch.bfloat16)
_ROW = 8
"""The multiple, in elements, to which the efficient kernel's mask is padded (``preprocess_mask``)."""


def capability_of(text: str) -> Capability:
    """Return the compute capability that a text such as ``9.0`` names; an empty text means an A100's."""
    major, _, minor = (text or "8.0").partition(".")
    return int(major), int(minor or 0)


def has_attention(work: Workload) -> bool:
    """Return whether a workload calls attention, whose saved tensors depend on the chosen kernel."""
    return any(call.function in (ATTENTION, BLOCKS_FORM, RING_FORM) for call, _ in work.calls)


def _attention_kernel(
    capability: Capability,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str:
    """Return the kernel that CUDA chooses: ``flash``, ``cudnn``, ``efficient`` or ``math``.

    cuDNN's comes first on compute capabilities 9.x and 10.x (cuDNN 9.15.1, CUDA 13, PyTorch 2.13), elsewhere
    only if a user asks for it.

    Args:
        q: ``[batch, heads, queries, head_dim]``; other numbers of dims take the math kernel.
        k, v: ``[batch, key heads, keys, head_dim]``.
        mask: ``[..., queries, keys]``, boolean or added to the scores.
        enable_gqa: whether several query heads may share a key head.
    """
    if not all(t.dim() == 4 and t.dtype == q.dtype and 0 not in t.shape for t in (q, k, v)):
        return _MATH
    if any(t.stride(-1) != 1 for t in (q, k, v)) or not q.shape[0] == k.shape[0] == v.shape[0]:
        return _MATH
    heads, of_keys, of_values = (t.shape[1] for t in (q, k, v))
    size, of_value = q.shape[-1], v.shape[-1]
    equal = heads == of_keys == of_values
    grouped = equal or (enable_gqa and of_keys == of_values and heads % of_keys == 0)
    half, cores = q.dtype in _HALF, capability[0] >= 8
    if half and cores and grouped:  # check_dtypes_low_precision, check_batch_size_and_num_heads_dense
        # Heads of up to 256 require a cuDNN newer than 9.22 (``check_cudnn_tensor_shapes``), which is not
        # assumed. cuDNN represents dropout probabilities in sixteenths (``check_cudnn_dropout``).
        small = all(n % 8 == 0 and n <= 128 for n in (size, of_value)) or (size, of_value) == (192, 128)
        drops = (16.0 * dropout_p).is_integer() and not (dropout_p and q.shape[-2] == 1)
        if capability[0] in (9, 10) and small and drops and k.shape[-2] != 1:
            return _CUDNN
        trains = any(t.requires_grad for t in (q, k, v))
        consumer = trains and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)
        wide = size > (192 if consumer else 256) and not (consumer and 224 < size <= 256 and not dropout_p)
        square = q.shape[-2] == k.shape[-2]
        if mask is None and size == k.shape[-1] == of_value and not wide and (square or not is_causal):
            return _FLASH
    # ``minimum_gemm_alignment``: 128 bits on tensor cores, which compute floats from capability 8 on.
    alignment = (8 if half else 4) if cores else 8 if half and capability[0] >= 7 else 1
    aligned = size == k.shape[-1] and size % alignment == 0 and of_value % alignment == 0
    supported = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and cores)
    return _EFFICIENT if supported and aligned and equal else _MATH


class CudaAttention(TorchFunctionMode):
    """A torch function mode in which attention on fake tensors runs by the kernels of a GPU with this compute
    capability."""

    def __init__(self, capability: Capability):
        super().__init__()
        self.capability = capability

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is block_kernel:
            q, k, v = args[:3]
            return block_kernel(q, k, v, device_type="cuda", masked=kwargs.get("masked", False))
        if func not in _ATTENTION:
            return func(*args, **kwargs)
        return _attend(self.capability, *args, **kwargs)


_ATTENTION: tuple[Any, ...] = (
    functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def _attend(
    capability: Capability,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run attention by the kernel that CUDA chooses, with PyTorch's operations before and after it."""
    aten: Any = torch.ops.aten
    kernel = _attention_kernel(capability, q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if kernel == _FLASH:
        size, scale = q.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale
        padded = (functional.pad(t, (0, -size % 8)) if size % 8 else t for t in (q, k, v))
        result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return result[..., :size] if size % 8 else result
    mask = _added(attn_mask, q)
    if kernel == _MATH:
        by_parts = aten._scaled_dot_product_attention_math
        return by_parts(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    fused = aten._scaled_dot_product_cudnn_attention
    if kernel == _EFFICIENT:
        fused = aten._scaled_dot_product_efficient_attention
        mask = None if mask is None else _aligned(mask, q, k)
    return fused(q, k, v, mask, trained, dropout_p, is_causal, scale=scale)[0]


def _added(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Return the mask as a term to add to the scores (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    passed, hidden = (torch.scalar_tensor(x, dtype=q.dtype, device=q.device) for x in (0.0, float("-inf")))
    return torch.where(mask, passed, hidden)


def _aligned(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the mask padded to multiples of 8 elements and expanded to all heads (``preprocess_mask``)."""
    size = mask.shape[-1]
    if mask.stride(-1) != 1 or any(stride % _ROW for stride in mask.stride()[:-1]):
        mask = functional.pad(mask, (0, _ROW - size % _ROW))[..., :size]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
