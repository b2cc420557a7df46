"""Every notebook runs from top to bottom; what is kept in it was made by running it, and is small."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execute import FOLDER, executed, notebooks

MOST_BYTES = 120_000
each = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


def test_all_are_there() -> None:
    assert [path.name[:2] for path in notebooks()] == ["01", "02", "03", "04", "05", "06", "07"]
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(path.name in listed for path in notebooks())


# The last takes the way of all others, on plain arrays. `make test-all` runs the rest, and what the first
# shows is run as the README's example.
QUICK = ("06",)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem[:2] in QUICK else pytest.mark.slow(every=True), id=path.stem)
        for path in notebooks()
    ],
)
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_it_runs(path: Path) -> None:
    store = Path(os.environ["TENSOROPT_CACHE"])  # of this run: what it has measured is not measured again
    fresh, kept = executed(path, store), nbformat.read(path, as_version=4)
    assert [shape(cell) for cell in fresh.cells] == [shape(cell) for cell in kept.cells], (
        "run python -m tests.notebooks.execute"
    )


def shape(cell: nbformat.NotebookNode) -> list[tuple[str, list[str]]]:
    """Kinds of a cell's outputs: figures differ with the machine, kinds do not."""
    kinds = [(o.output_type, sorted(o.get("data", {}))) for o in cell.get("outputs", [])]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


@each
def test_it_is_small_and_knows_no_place(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    for place in ("/tmp/", "/home/", "/work/", "/root/"):
        assert place not in text, place
