"""Devices × memory → time and batch × memory → throughput, each figure leading to its point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samples_app import CALL, GIB, exploration, of_model, point, space
from tensoropt_app.library import Library
from tensoropt_app.state import View
from tensoropt_app.views.profile import batches_by_memory, devices_by_memory


def save(folder: Path, devices: int, points: list[tuple[float, float]], **settings: str) -> None:
    found = exploration([point(m * GIB, t) for m, t in points], [space((devices,))])
    replace(found, settings={**found.settings, **settings}).save(folder)


def test_every_figure_leads_to_its_point(tmp_path: Path) -> None:
    save(tmp_path / "two", 2, [(16, 1.2), (32, 0.6)])
    save(tmp_path / "four", 4, [(4, 1.5), (16, 0.5)])
    save(tmp_path / "other", 8, [(4, 0.1)], optimizer="sgd")  # another step, not to be compared
    table = devices_by_memory(Library(tmp_path), View(exploration="opened-two", price=3.6))
    assert [(row.label, row.current) for row in table.rows] == [
        ("2 × H100-80GB", True), ("4 × H100-80GB", False)
    ]  # fmt: skip
    assert table.rows[0].cells[0] is None
    last = table.rows[1].cells[-1]
    assert (last.time, last.cost) == ("500 ms", "2.00 per 1,000 steps")
    assert (last.view.exploration, last.view.point) == ("opened-four", 1)
    assert "x=opened-four" in last.view.to_query()


def test_one_number_of_devices_is_no_table(tmp_path: Path) -> None:
    save(tmp_path / "two", 2, [(16, 1.2)])
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-two")) is None
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-gone")) is None


def save_batch(folder: Path, batch: int, points: list[tuple[float, float]], **changes: str) -> None:
    found = exploration([point(m * GIB, t) for m, t in points], [space((8,))])
    call = {**CALL, "kwargs": {"input_ids": {"tensor": [batch, 100], "dtype": "int64"}}}
    of_model(found, batch=batch, fingerprint=f"{batch:064}", call=call, **changes).save(folder)


def test_batches_are_compared_by_what_they_read_in_a_second(tmp_path: Path) -> None:
    save_batch(tmp_path / "eight", 8, [(16, 1.0), (32, 0.8)])
    save_batch(tmp_path / "sixteen", 16, [(4, 4.0), (32, 1.0)])
    save_batch(tmp_path / "other", 32, [(4, 0.1)], source="zoo:other")
    table = batches_by_memory(Library(tmp_path), View(exploration="opened-eight"))
    assert table.corner == "tokens/s within"
    assert [(row.label, row.current) for row in table.rows] == [("batch 8", True), ("batch 16", False)]
    cells = [[cell and cell.time for cell in row.cells] for row in table.rows]
    assert (cells[0][0], cells[0][-1]) == (None, "1,000")
    assert (cells[1][0], cells[1][-1]) == ("400", "1,600")
    last = table.rows[1].cells[-1]
    assert (last.view.exploration, last.view.point) == ("opened-sixteen", 1)
    # The same devices: no table by devices.
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-eight")) is None
    assert batches_by_memory(Library(tmp_path), View(exploration="opened-other")) is None
    assert batches_by_memory(Library(tmp_path), View(exploration="opened-gone")) is None
