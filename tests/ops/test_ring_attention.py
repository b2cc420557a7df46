"""Attention whose keys go around a ring: its numbers against PyTorch's own, and what a rank sees of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F

from tensoropt.graph import Ref
from tensoropt.ops import ring_attention as module
from tensoropt.ops.attention_in_blocks import QueryPiece, Stretch
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.layouts import chunk
from tensoropt.ops.ring_attention import RING_FORM, Ring, ring_attention
from tensoropt.profiling.fact_finding import find_facts
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


def rows(ring: Ring, place: int) -> torch.Tensor:
    return torch.cat([torch.arange(first, first + length) for first, length in ring.keys[place]])


LAYOUTS = {"contiguous": contiguous, "zig-zag": zigzag}


def masks(kind: str, length: int) -> torch.Tensor | None:
    places = torch.arange(length)
    apart = places[:, None] - places[None, :]
    if kind == "window":
        return (apart >= 0) & (apart < 3)  # of most chunks a query sees nothing
    if kind == "padding":
        return (places < length - 3).expand(2, 1, 1, length)
    return -apart.abs().double() * 0.3 if kind == "bias" else None


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
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    mask, causal = masks(kind, length), kind == "causal"
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal, enable_gqa=True, scale=0.3)
    wanted = torch.autograd.grad(whole, leaves, grad)

    def work(rank: ThreadRuntime) -> list[torch.Tensor]:
        ring, pieces = LAYOUTS[layout](length, parts, rank.rank)
        at = rows(ring, rank.rank)
        own = [t[..., at, :].requires_grad_() for t in (q, k, v)]
        seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., at, :]
        made = ring_attention(rank, "", tuple(ring), pieces, *own, seen, causal, 0.3)
        return [made.detach(), *torch.autograd.grad(made, own, grad[..., at, :])]

    for rank, found in enumerate(on_ranks((1, parts), work)):
        at = rows(LAYOUTS[layout](length, parts, rank)[0], rank)
        for mine, want in zip(found, [whole, *wanted], strict=True):
            assert (mine - want[..., at, :]).abs().max() < 1e-12 * want.abs().max()


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


def work_of(dtype: str, ring: Ring, pieces: Sequence[QueryPiece], queries: int) -> Workload:
    inputs = tuple((n, TensorSpec((1, 4, queries, 64), dtype, True), "read") for n in "qkv")
    call = LocalCall(
        RING_FORM, (Ref("q"), Ref("k"), Ref("v"), None, True, None), {}, "", (tuple(ring), tuple(pieces))
    )
    return Workload(inputs, ((call, ("y",)),), None, ("y",), {})


def test_facts_of_a_gpu_count_what_is_seen_and_what_is_under_way() -> None:
    ring, pieces = zigzag(256, 4, 0)
    work = work_of("bfloat16", ring._replace(place=0), [pieces[0]._replace(axes=())], 64)
    facts = find_facts(work, capability=(9, 0))
    # A quarter of the scores that a causal mask leaves, two products of 64 multiply-adds each.
    assert facts.forward_flops == pytest.approx(4 * 256 * 257 // 2 * 2 * 2 * 64 / 4, rel=0.01)
    # The result and its log-sum-exps; the other ranks' keys are not kept.
    assert facts.kept_bytes == pytest.approx(4 * 64 * (64 * 2 + 4), rel=0.02)
    message = 2 * 4 * 64 * 64 * 2
    # In forward a message is sent and one received; in backward two of each, and one is being made.
    assert facts.forward_peak_bytes > 2 * message
    assert 5 * message < facts.backward_peak_bytes < 8 * message
