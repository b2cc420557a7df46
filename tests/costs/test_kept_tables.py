"""Arrays of cost tables are made once, by what they follow from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs import kept_tables
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.kept_tables import KeptTables, TableArrays
from tensoropt.plan.problem import prepare_graph
from tests.costs.models import tables_of


class Layers(nn.Module):
    """Two layers that look alike, and one of a width of its own; the first weight is used once more."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.wide, self.back = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        y = torch.relu(self.two(torch.relu(self.one(x))))
        z = self.back(torch.relu(self.wide(y))) + y
        return torch.nn.functional.linear(z, self.one.weight).sum()


def problem(width: int = 32):
    return prepare_graph(capture(Layers(width), (torch.randn(8, 16),)).graph)


class Counted(TableArrays):
    """Counts what is asked for and what is made."""

    def __init__(self, path: Path | None):
        super().__init__(path)
        self.asked, self.made = 0, 0

    def once(self, depends_on, make):
        def counted() -> np.ndarray:
            self.made += 1
            return make()

        self.asked += 1
        return super().once(depends_on, counted)


def arrays_in(tables):
    found = [column for v in tables.variables for column in (*v.memory, *v.compute, *v.communication)]
    return [*found, *(edge.table for edge in tables.edges), *(edge.rows for edge in tables.edges)]


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(arrays_in(one), arrays_in(other), strict=True))


def test_tables_are_the_same_to_the_last_bit(tmp_path):
    fresh, first = tables_of(problem(), (2, 4)), Counted(tmp_path / "tables.npz")
    assert same(fresh, tables_of(problem(), (2, 4), arrays=first))
    assert first.made == first.asked > 5
    first.save()
    again = Counted(tmp_path / "tables.npz")
    assert same(fresh, tables_of(problem(), (2, 4), arrays=again))
    assert (again.made, again.asked) == (0, first.asked)


def test_only_what_belongs_to_a_changed_layer_is_made_anew(tmp_path):
    first = Counted(tmp_path / "tables.npz")
    tables_of(problem(), (2, 4), arrays=first)
    first.save()
    changed = Counted(tmp_path / "tables.npz")
    assert same(tables_of(problem(24), (2, 4)), tables_of(problem(24), (2, 4), arrays=changed))
    assert 0 < changed.made < changed.asked / 2


def test_other_prices_and_other_code_have_other_files(tmp_path):
    paths = {KeptTables(tmp_path, code).at(prices).path for code in "ab" for prices in ("4 GB/s", "8 GB/s")}
    assert len(paths) == 4


def test_all_that_decides_prices_is_in_their_description():
    cluster = load_cluster("dgx-h100[4]")
    first, second = Mesh(shape=(4,)), Mesh(shape=(2, 2))
    level = cluster.levels[0]
    level = replace(level, link=replace(level.link, bandwidth_bytes_per_s=1e9))
    faster = replace(cluster, levels=(level, *cluster.levels[1:]))
    described = [
        CommunicationModel(one, mesh).described
        for one, mesh in ((cluster, first), (cluster, second), (faster, first))
    ]
    assert len(set(described)) == 3


def test_nothing_is_kept_without_a_folder():
    arrays = KeptTables(None).at("prices")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            arrays.once(lambda: 1 / 0, lambda: 1 / 0)
        assert arrays.once(lambda: pytest.fail("is not asked"), lambda: np.ones(2)).sum() == 2
    arrays.save()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 half of one", None])
def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path, damage):
    path = tmp_path / "tables.npz"
    if damage is None:
        np.savez(path, objects=np.array([{}], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(damage)
    arrays = TableArrays(path)
    assert arrays.once(lambda: "key", lambda: np.arange(3)).tolist() == [0, 1, 2]
    arrays.save()
    assert TableArrays(path).once(lambda: "key", lambda: pytest.fail("is there")).tolist() == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["tables.npz"]


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    arrays = TableArrays(tmp_path / "file" / "tables.npz")
    assert arrays.once(lambda: "key", lambda: np.ones(1)).sum() == 1
    arrays.save()


def test_the_oldest_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_tables, "MOST_BYTES", 2500)
    kept = KeptTables(tmp_path)
    for age, name in enumerate("abc"):
        path = tmp_path / f"{name}.npz"
        path.write_bytes(b"0" * 1000)
        os.utime(path, (1e9 - age, 1e9 - age))
    kept.remove_old()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_large_files_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_tables, "MOST_FILE_BYTES", 100)
    arrays = TableArrays(tmp_path / "tables.npz")
    arrays.once(lambda: "key", lambda: np.ones(100))
    arrays.save()
    assert not list(tmp_path.iterdir())
