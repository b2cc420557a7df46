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


def notes(keys: int, way: str, devices: int) -> list[str]:
    found = explore(
        Fused(keys, way), (torch.randn(8, POSITIONS, 32),), cluster=load_cluster(f"dgx-h100[{devices}]"),
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
    found = notes(keys, "pieces", 5)
    assert f"attention heads left whole: {said}" in found
    assert "batch left whole: no searched mesh splits 8; an axis of 5 cuts 5 or 9" in found
    kinds = {note.split()[9] for note in found if note.startswith("kept whole, since no searched mesh")}
    assert kinds <= {"linear", "scaled_dot_product_attention"}  # slices and views are not worth a word


@pytest.mark.slow
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
    said = [note for note in notes(keys, way, 2) if "cannot be split by the heads" in note]
    assert len(said) == bool(sizes)
    for note in said:
        assert note.startswith("qkv cannot be split")
        assert f"pieces of unequal sizes ({sizes}) of its output" in note
