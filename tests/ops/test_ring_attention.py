"""Attention whose keys go around a ring, or are whole and read in blocks.

Its numbers are compared with PyTorch's own by every kernel, and so is what a rank sees of the keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tensoropt.graph import Ref
from tensoropt.ops import ring_attention as module
from tensoropt.ops.attention_in_blocks import QueryPiece, Stretch, block_kernel
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.layouts import chunk
from tensoropt.ops.ring_attention import (
    BLOCKS_FORM,
    RING_FORM,
    Ring,
    causal_attention_in_blocks,
    ring_attention,
)
from tensoropt.profiling.cuda_kernels import CudaAttention
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import TensorSpec, Workload
from tests.engine.threads import ThreadRuntime, on_ranks

Keys = tuple[tuple[tuple[int, int], ...], ...]


def contiguous(length: int, parts: int, at: int) -> tuple[Ring, tuple[QueryPiece, ...]]:
    keys: Keys = tuple((chunk(length, parts, place),) for place in range(parts))
    step = -(-length // parts)
    return Ring((1,), parts, None, keys, step), (QueryPiece(keys[at][0][1], 1, 0, step, (1,)),)


def zigzag(length: int, parts: int, at: int) -> tuple[Ring, tuple[QueryPiece, ...]]:
    half = length // parts // 2
    last = (2 * parts - 1) * half
    keys: Keys = tuple(((p * half, half), (last - p * half, half)) for p in range(parts))
    return Ring((1,), parts, None, keys, 2 * half), (QueryPiece(2 * half, 1, 0, half, (1,), last),)


def inner(length: int, parts: int, at: int) -> tuple[Ring, tuple[QueryPiece, ...]]:
    """The queries' dim has two atoms, of which the inner one is split."""
    third = length // 3
    size = third // parts
    keys: Keys = tuple(tuple((third * i + size * place, size) for i in range(3)) for place in range(parts))
    return Ring((1,), parts, None, keys, third), (
        QueryPiece(3, third, 0, 0, ()),
        QueryPiece(size, 1, 0, size, (1,)),
    )


def rows(ring: Ring, place: int) -> torch.Tensor:
    return torch.cat([torch.arange(first, first + length) for first, length in ring.keys[place]])


LAYOUTS = {"contiguous": contiguous, "zig-zag": zigzag, "inner": inner}


def masks(kind: str, length: int) -> torch.Tensor | None:
    places = torch.arange(length)
    apart = places[:, None] - places[None, :]
    if kind == "window":
        return (apart >= 0) & (apart < 3)  # of most chunks a query sees nothing
    if kind == "padding":
        return (places < length - 3).expand(2, 1, 1, length)
    return -apart.abs().double() * 0.3 if kind == "bias" else None


def reference(length: int, mask: torch.Tensor | None, *, causal: bool) -> tuple[list[torch.Tensor], Any]:
    """Queries, keys, values and the result's gradient; the result, and the gradients of the first three."""
    torch.manual_seed(0)
    given = [torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    whole = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal, enable_gqa=True, scale=0.3)
    return given, [whole, *torch.autograd.grad(whole, leaves, given[3])]


@pytest.mark.parametrize("kernel", ["flash on CPU", "products"])
@pytest.mark.parametrize("kind", ["causal", "full", "window", "padding", "bias"])
@pytest.mark.parametrize(
    ("layout", "length", "parts"),
    [
        ("contiguous", 12, 3),
        ("contiguous", 10, 3),
        ("contiguous", 13, 5),
        ("zig-zag", 12, 2),
        ("zig-zag", 12, 3),
        ("zig-zag", 20, 5),
    ],
)
def test_ranks_together_give_attention_and_its_gradients(
    layout: str, length: int, parts: int, kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "block_kernel", lambda *_, **__: kernel)
    mask, causal = masks(kind, length), kind == "causal"
    (q, k, v, grad), wanted = reference(length, mask, causal=causal)

    def work(rank: ThreadRuntime) -> list[torch.Tensor]:
        ring, pieces = LAYOUTS[layout](length, parts, rank.rank)
        at = rows(ring, rank.rank)
        own = [t[..., at, :].requires_grad_() for t in (q, k, v)]
        seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., at, :]
        made = ring_attention(rank, "", tuple(ring), pieces, *own, seen, causal, 0.3)
        return [made.detach(), *torch.autograd.grad(made, own, grad[..., at, :])]

    for rank, found in enumerate(on_ranks((1, parts), work)):
        at = rows(LAYOUTS[layout](length, parts, rank)[0], rank)
        for mine, want in zip(found, wanted, strict=True):
            assert (mine - want[..., at, :]).abs().max() < 1e-12 * want.abs().max()


class Rank(SingleDevice):
    """A rank at one coordinate of every group."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return self.at if axes else 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["flash on CPU", "products"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_whole_keys_together_give_attention_and_its_gradients(
    layout: str, kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "block_kernel", lambda *_, **__: kernel)
    (q, k, v, grad), wanted = reference(24, None, causal=True)
    out, *gradients = (torch.zeros_like(t) for t in (wanted[0], q, k, v))
    for rank in range(2):
        ring, pieces = LAYOUTS[layout](24, 2, rank)
        at = rows(ring, rank)
        own = [t.to(dtype).requires_grad_() for t in (q[..., at, :], k, v)]
        made = causal_attention_in_blocks(Rank(rank), "", pieces, *own, 0.3)
        assert made.dtype == dtype
        out[..., at, :] = made.detach().double()
        found = torch.autograd.grad(made, own, grad[..., at, :].to(dtype))
        gradients[0][..., at, :] = found[0].double()
        for total, part in zip(gradients[1:], found[1:], strict=True):
            total += part.double()
    close = 1e-12 if dtype == torch.float64 else 3e-2
    for mine, want in zip([out, *gradients], wanted, strict=True):
        assert (mine - want).abs().max() < close * want.abs().max()


@pytest.mark.parametrize("causal", [True, False])
def test_narrow_numbers_are_rounded_once_in_forward(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))

    def work(rank: ThreadRuntime) -> torch.Tensor:
        ring, pieces = contiguous(32, 4, rank.rank)
        own = [t[..., rows(ring, rank.rank), :].bfloat16() for t in (q, k, v)]
        return ring_attention(rank, "", tuple(ring), pieces, *own, None, causal, None)

    made = torch.cat(on_ranks((1, 4), work), -2)
    assert made.dtype == torch.bfloat16
    whole = F.scaled_dot_product_attention(*(t.bfloat16().double() for t in (q, k, v)), is_causal=causal)
    # Each block's kernel rounds its own result, to 8 bits.
    assert (made - whole).abs().max() < 2**-8 * whole.abs().max()


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[4] = False
    q, k, v = (torch.randn(1, 1, 6, 8) for _ in range(3))

    def work(rank: ThreadRuntime) -> list[torch.Tensor]:
        ring, pieces = contiguous(6, 2, rank.rank)
        at = rows(ring, rank.rank)
        own = [t[..., at, :].clone().requires_grad_() for t in (q, k, v)]
        made = ring_attention(rank, "", tuple(ring), pieces, *own, mask[at], False, None)
        return [made, *torch.autograd.grad(made.square().sum(), own)]

    ranks = on_ranks((1, 2), work)
    assert all(value.isfinite().all() for found in ranks for value in found)
    assert not ranks[1][0][..., 1, :].any()


@pytest.mark.parametrize("queries", [[(0, 0, 6)], [(0, 3, 5)], [(0, 2, 2), (2, 9, 3)]])
@pytest.mark.parametrize("keys", [[(0, 12)], [(4, 3)], [(0, 2), (10, 2)], [(3, 6)]])
def test_queries_see_the_keys_up_to_their_own_position(
    queries: list[tuple[int, int, int]], keys: list[tuple[int, int]]
) -> None:
    """Also where ranks have other parts of the queries than of the keys, as two axes split the queries."""
    at = [position + i for _, position, length in queries for i in range(length)]
    of_keys = [first + i for first, length in keys for i in range(length)]
    ring = Ring((1,), 1, 0, (tuple(keys),), len(of_keys))
    turns = module._Turns(SingleDevice(), ring, [Stretch(*each) for each in queries])
    seen: list[list[int]] = [[] for _ in at]
    for pair in turns.pairs(0, len(at)):
        for i, row in enumerate(range(*pair.rows)):
            columns = range(*pair.columns)
            seen[row] += columns[: i + 1] if pair.causal else columns
    for row, place in enumerate(at):
        assert sorted(seen[row]) == [i for i, key in enumerate(of_keys) if key <= place]


def facts_of(form: str, dtype: str, keys: int, static: tuple[Any, ...], *more: Any) -> Facts:
    """Of 64 queries on an H100."""
    sizes = zip("qkv", (64, keys, keys), strict=True)
    inputs = tuple((name, TensorSpec((1, 4, size, 64), dtype, True), "read") for name, size in sizes)
    call = LocalCall(form, (*map(Ref, "qkv"), None, *more), {}, "", static)
    return find_facts(Workload(inputs, ((call, ("y",)),), None, ("y",), {}), capability=(9, 0))


@pytest.mark.parametrize(
    ("form", "dtype"), [(RING_FORM, "bfloat16"), (BLOCKS_FORM, "bfloat16"), (BLOCKS_FORM, "float32")]
)
def test_facts_of_a_gpu_count_what_is_seen_and_what_is_under_way(form: str, dtype: str) -> None:
    """By its flash kernel in 16 bits, by products otherwise."""
    ring, pieces = zigzag(256, 4, 0)
    if form == RING_FORM:
        static = (tuple(ring._replace(place=0)), (pieces[0]._replace(axes=()),))
        facts = facts_of(form, dtype, 64, static, True, None)
    else:
        facts = facts_of(form, dtype, 256, (pieces,))
        assert facts.reads_kept == ("q", "k", "v")
    # A quarter of the scores that a causal mask leaves, two products of 64 multiply-adds each.
    causal = 4 * 256 * 257 // 2 * 2 * 2 * 64 / 4
    if dtype == "bfloat16":
        assert facts.forward_flops == pytest.approx(causal, rel=0.01)
    else:
        assert causal < facts.forward_flops < 1.4 * causal
    # The result and its log-sum-exps; scores are computed again, and other ranks' keys are not kept.
    bytes_each = 2 if dtype == "bfloat16" else 4
    assert facts.kept_bytes == pytest.approx(4 * 64 * (64 * bytes_each + 4), rel=0.02)
    if form == RING_FORM:
        message = 2 * 4 * 64 * 64 * 2
        # In forward a message is sent and one received; in backward two of each, and one is being made.
        assert facts.forward_peak_bytes > 2 * message
        assert 5 * message < facts.backward_peak_bytes < 8 * message


def test_the_kernel_is_that_of_the_device_asked_for() -> None:
    half, single = (torch.randn(1, 2, 8, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    narrow = torch.randn(1, 2, 8, 12, dtype=torch.bfloat16)
    kernels = [block_kernel(t, t, t) for t in (half, single, half[0])]
    assert kernels == ["flash on CPU", "flash on CPU", "products"]
    with CudaAttention((9, 0)):
        kernels = [block_kernel(t, t, t) for t in (half, single, narrow)]
    assert kernels == ["flash on CUDA", "products", "products"]
