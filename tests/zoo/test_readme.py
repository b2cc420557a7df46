"""The zoo's README lists what is registered, with the true sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensoropt import zoo

README = (Path(zoo.__file__).parent / "README.md").read_text()
ROWS = {m[1]: m[2] for m in re.finditer(r"^\| `([^`]+)` \| ([\d.]+ [GMk]) \|", README, re.MULTILINE)}


def test_every_model_has_a_row() -> None:
    assert set(ROWS) == {e.name for e in zoo.list_models()}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_size_is_true(name: str) -> None:
    if package := zoo.entry(name).requires:
        pytest.importorskip(package)
    number, unit = ROWS[name].split()
    expected = float(number) * {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
    assert zoo.build(name, device="meta").parameter_count == pytest.approx(expected, rel=1e-3)
