"""Devices × memory → time over the explorations of one model, each figure leading to its point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samples_app import GIB, exploration, point, space
from tensoropt_app.library import Library
from tensoropt_app.state import View
from tensoropt_app.views.profile import devices_by_memory


def save(folder: Path, devices: int, points: list[tuple[float, float]], **settings: str) -> None:
    found = exploration([point(m * GIB, t) for m, t in points], [space((devices,))])
    replace(found, settings={**found.settings, **settings}).save(folder)


def test_every_figure_leads_to_its_point(tmp_path: Path) -> None:
    save(tmp_path / "two", 2, [(16, 1.2), (32, 0.6)])
    save(tmp_path / "four", 4, [(4, 1.5), (16, 0.5)])
    save(tmp_path / "other", 8, [(4, 0.1)], optimizer="sgd")  # another step, not to be compared
    table = devices_by_memory(Library(tmp_path), View(exploration="opened-two", price=3.6))
    assert table is not None
    assert [(row.label, row.current) for row in table.rows] == [
        ("2 × H100-80GB", True), ("4 × H100-80GB", False)
    ]  # fmt: skip
    assert table.rows[0].cells[0] is None
    last = table.rows[1].cells[-1]
    assert last is not None
    assert (last.time, last.cost) == ("500 ms", "2.00 per 1,000 steps")
    assert (last.view.exploration, last.view.point) == ("opened-four", 1)
    assert "x=opened-four" in last.view.to_query()


def test_one_number_of_devices_is_no_table(tmp_path: Path) -> None:
    save(tmp_path / "two", 2, [(16, 1.2)])
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-two")) is None
    assert devices_by_memory(Library(tmp_path), View(exploration="opened-gone")) is None
