"""Sizes that no mesh divides are said, not refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tensoropt import Exploration, explore
from tensoropt.cluster import load_cluster
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.table import summary_lines


def explored(folder: Path, batch: int, inside: int, out: int) -> Exploration:
    file = folder / "four.yaml"
    file.write_text("devices: [{kind: H100-80GB, count: 4}]\nlinks: {intra_node: NVLink4}\n")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(inside, out)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).mean()

    with ProfileStore(folder / "profiles.sqlite") as store:
        return explore(
            Net(), (torch.randn(batch, inside),), cluster=load_cluster(file), micro_batches=(1,), store=store
        )


def whole(found: Exploration) -> list[str]:
    return [line for line in summary_lines(found) if "kept whole, since no searched mesh divides" in line]


def test_odd_sizes_are_named_with_their_operator(tmp_path: Path) -> None:
    found = explored(tmp_path, 3, 5, 7)
    assert found.points
    (first, *_) = whole(found)
    assert first.endswith("linear linear (d0 3, out_features 7, in_features 5)")


@pytest.mark.parametrize("sizes", [(8, 5, 7), (3, 8, 7), (3, 5, 8)])
def test_one_size_that_divides_is_enough(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    assert not any(" linear linear " in line for line in whole(explored(tmp_path, *sizes)))
