"""A batch and heads that no searched mesh cuts are named with sizes that it would."""

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
    """Attention whose queries, keys and values one product makes, one piece after the other."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.qkv = nn.Linear(32, (HEADS + 2 * keys) * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split([HEADS * WIDTH, self.keys * WIDTH, self.keys * WIDTH], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys < HEADS)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


def notes(keys: int) -> list[str]:
    found = explore(
        Fused(keys), (torch.randn(8, POSITIONS, 32),), cluster=load_cluster("dgx-h100[5]"),
        micro_batches=(1,), measure="never", placements="never", pipelines="never",
        store=ProfileStore(":memory:"),
    )  # fmt: skip
    return list(found.report["notes"])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (HEADS, "no searched mesh splits 4; an axis of 5 cuts 5"),
        (
            2,
            "no searched mesh splits 2 of keys, each of which 2 of queries share; an axis of 5 cuts 5 of "
            "keys",
        ),
    ],
)
def test_heads_and_a_batch_that_no_mesh_cuts_are_named_with_sizes_that_it_would(keys: int, said: str) -> None:
    found = notes(keys)
    assert f"attention heads left whole: {said}" in found
    assert "batch left whole: no searched mesh splits 8; an axis of 5 cuts 5 or 9" in found
    kinds = {note.split()[9] for note in found if note.startswith("kept whole, since no searched mesh")}
    assert kinds <= {"linear", "scaled_dot_product_attention"}  # slices and views are not worth a word
