"""Causal attention in blocks of keys: which keys queries see, and its numbers by every kernel."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from tensoropt.graph import Ref
from tensoropt.ops import attention_in_blocks, ring_attention
from tensoropt.ops.attention_in_blocks import QueryPiece
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.ring_attention import BLOCKS_FORM, causal_attention_in_blocks
from tensoropt.profiling.cuda_kernels import CudaAttention
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import TensorSpec, Workload

H100 = (9, 0)


class Rank(SingleDevice):
    """A rank at one coordinate of every group."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return self.at if axes else 0


def contiguous(size: int, parts: int) -> tuple[QueryPiece, ...]:
    return (QueryPiece(size // parts, 1, 0, size // parts, (1,)),)


def zigzag(size: int, parts: int) -> tuple[QueryPiece, ...]:
    chunk = size // parts // 2
    return (QueryPiece(2 * chunk, 1, 0, chunk, (1,), (2 * parts - 1) * chunk),)


def inner(size: int, parts: int) -> tuple[QueryPiece, ...]:
    """The dim has two atoms, of which the inner one is split."""
    return QueryPiece(3, size // 3, 0, 0, ()), QueryPiece(size // 3 // parts, 1, 0, size // 3 // parts, (1,))


def positions(pieces: tuple[QueryPiece, ...], at: int) -> list[int]:
    """Of each local query, element by element."""
    of_pieces = []
    for piece in pieces:
        first = piece.start + (at * piece.step if piece.axes else 0)
        elements = range(first, first + piece.size)
        if piece.mirror is not None:
            half, last = piece.size // 2, piece.mirror - first
            elements = [*range(first, first + half), *range(last, last + half)]
        of_pieces.append([element * piece.stride for element in elements])
    return [sum(parts) for parts in product(*of_pieces)]


LAYOUTS = {"contiguous": contiguous, "zig-zag": zigzag, "inner": inner}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["flash on CPU", "products"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_give_attention_and_its_gradients(
    layout: str, kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_attention, "block_kernel", lambda *_, **__: kernel)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=0.3)
    wanted = torch.autograd.grad(whole, leaves, grad)
    out, gradients = torch.empty_like(whole), [torch.zeros_like(t) for t in (q, k, v)]
    for at in range(2):
        rows = torch.tensor(positions(LAYOUTS[layout](24, 2), at))
        own = [t.to(dtype).requires_grad_() for t in (q[..., rows, :], k, v)]
        made = causal_attention_in_blocks(Rank(at), "", LAYOUTS[layout](24, 2), *own, 0.3)
        assert made.dtype == dtype
        out[..., rows, :] = made.detach().double()
        found = torch.autograd.grad(made, own, grad[..., rows, :].to(dtype))
        gradients[0][..., rows, :] = found[0].double()
        for total, part in zip(gradients[1:], found[1:], strict=True):
            total += part.double()
    close = 1e-12 if dtype == torch.float64 else 3e-2
    for mine, want in zip([out, *gradients], [whole, *wanted], strict=True):
        assert (mine - want).abs().max() < close * want.abs().max()


def work(dtype: str) -> Workload:
    pieces = zigzag(256, 4)
    inputs = [
        (n, TensorSpec((1, 4, s, 64), dtype, True), "read") for n, s in (("q", 64), ("k", 256), ("v", 256))
    ]
    call = LocalCall(BLOCKS_FORM, (Ref("q"), Ref("k"), Ref("v"), None), {}, "", (pieces,))
    return Workload(tuple(inputs), ((call, ("y",)),), None, ("y",), {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_facts_of_gpus_count_what_is_seen(dtype: str) -> None:
    """By their flash kernel in 16 bits, by products otherwise."""
    facts = find_facts(work(dtype), capability=H100)
    # A quarter of the scores that a causal mask leaves, two products of 64 multiply-adds each.
    causal = 4 * 256 * 257 // 2 * 2 * 2 * 64 / 4
    if dtype == "bfloat16":
        assert facts.forward_flops == pytest.approx(causal, rel=0.01)
    else:
        assert causal < facts.forward_flops < 1.4 * causal
    # The result and its log-sum-exps; scores are computed again.
    bytes_each = 2 if dtype == "bfloat16" else 4
    assert facts.kept_bytes == pytest.approx(4 * 64 * (64 * bytes_each + 4), rel=0.02)
    assert facts.reads_kept == ("q", "k", "v")


def test_the_kernel_is_that_of_the_device_asked_for() -> None:
    half, single = (torch.randn(1, 2, 8, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    narrow = torch.randn(1, 2, 8, 12, dtype=torch.bfloat16)
    choose = attention_in_blocks.block_kernel
    assert choose(half, half, half) == choose(single, single, single) == "flash on CPU"
    assert choose(half[0], half[0], half[0]) == "products"
    with CudaAttention(H100):
        kernels = [choose(t, t, t) for t in (half, single, narrow)]
    assert kernels == ["flash on CUDA", "products", "products"]
