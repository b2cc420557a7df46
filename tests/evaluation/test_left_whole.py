"""Products whose outputs have queries, keys and values in pieces are named if equal parts would mix them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt import explore
from tensoropt.cluster import load_cluster
from tensoropt.profiling.store import ProfileStore

HEADS, WIDTH, POSITIONS = 4, 8, 16


class Fused(nn.Module):
    """Attention whose queries, keys and values one product makes: one piece after the other, as in Phi-3 and
    GPT-BigCode; as rows of heads, as in Falcon; or by key heads, as in Falcon's later architecture."""

    def __init__(self, keys: int, way: str) -> None:
        super().__init__()
        self.keys, self.way = keys, way
        self.qkv = nn.Linear(32, (HEADS + 2 * keys) * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, keys = self.qkv(x), self.keys
        if self.way == "pieces":
            parts = made.split([HEADS * WIDTH, keys * WIDTH, keys * WIDTH], dim=-1)
            q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in parts)
        elif self.way == "rows":
            rows = made.unflatten(-1, (-1, WIDTH))
            q, k, v = rows[:, :, :-2], rows[:, :, -2:-1], rows[:, :, -1:]
        else:
            rows = made.unflatten(-1, (keys, -1, WIDTH))
            q, k, v = rows[:, :, :, :-2].flatten(2, 3), rows[:, :, :, -2], rows[:, :, :, -1]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=keys < HEADS)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize(
    ("keys", "way", "sizes"),
    [
        (2, "pieces", "32, 16, 16"),
        (1, "rows", "4, 1, 1"),
        (HEADS, "pieces", ""),
        (2, "key heads", ""),
    ],
)
def test_products_whose_heads_would_mix_are_named_with_the_sizes(keys: int, way: str, sizes: str) -> None:
    found = explore(
        Fused(keys, way), (torch.randn(8, POSITIONS, 32),), cluster=load_cluster("dgx-h100[2]"),
        micro_batches=(1,), measure="never", placements="never", pipelines="never",
        store=ProfileStore(":memory:"),
    )  # fmt: skip
    said = [note for note in found.report["notes"] if "cannot be split by the heads" in note]
    assert len(said) == bool(sizes)
    for note in said:
        assert note.startswith("qkv cannot be split")
        assert f"pieces of unequal sizes ({sizes}) of its output" in note
