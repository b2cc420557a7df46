"""What usual strategies need, beside the form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples_app import data_url
from tensoropt_app.jobs.uploads import Uploads
from tensoropt_app.pages.new import table
from tensoropt_app.views.fit import fit_of

import tensoropt
from tensoropt.errors import TensorOptError
from tensoropt.units import format_bytes

FORM: dict[str, Any] = {
    "model": "llama3-8b", "devices": "dgx-h100", "batch": "8", "sequence": "2048", "dtype": "auto",
    "more": "",
}  # fmt: skip


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path)


def test_the_page_answers_what_python_answers(uploads: Uploads) -> None:
    asked = tensoropt.fit("llama3-8b", "8xH100-80GB", batch=8, sequence=2048)
    for devices in ("8xH100-80GB", "dgx-h100"):
        found = fit_of({**FORM, "devices": devices}, uploads)
        assert found.to_data()["strategies"] == asked.to_data()["strategies"]
    sgd = fit_of({**FORM, "devices": "2x24GiB", "more": "--optimizer sgd --max-points 20"}, uploads)
    assert (
        sgd.to_data()
        == tensoropt.fit("llama3-8b", "2x24GiB", batch=8, sequence=2048, optimizer="sgd").to_data()
    )


def test_empty_fields_are_the_models_own_and_a_model_without_tokens_has_no_sequence(uploads: Uploads) -> None:
    empty = fit_of({**FORM, "batch": "", "sequence": ""}, uploads).step
    assert (empty.batch, empty.sequence) == (8, 8192)
    assert fit_of({**FORM, "model": "vgg16"}, uploads).step.sequence == 0


@pytest.mark.parametrize(
    ("field", "typed", "words"),
    [
        ("model", "", "choose a model"),
        ("model", "/etc/passwd", "choose a model"),
        ("model", "../config.json", "choose a model"),
        ("devices", "0xH100-80GB", "at least 1"),
        ("devices", "/etc/passwd", "choose devices"),
        ("devices", "8x/etc/passwd", "no kind of device"),
        ("devices", "", "choose devices"),
        ("batch", "0", "between 1"),
    ],
)
def test_what_is_typed_wrong_is_said(uploads: Uploads, field: str, typed: str, words: str) -> None:
    with pytest.raises(TensorOptError, match=words):
        fit_of({**FORM, field: typed}, uploads)


def test_devices_of_a_file_are_those_of_the_file(uploads: Uploads) -> None:
    text = "devices: [{kind: RTX-4090, count: 2}]\nlinks: {intra_node: PCIe4}\n"
    field, label = uploads.keep_any(data_url(text), "mine.yaml")
    assert field == "devices"
    assert fit_of({**FORM, "devices": label}, uploads).cluster.device_count == 2


def test_a_strategy_is_shown_where_it_fits_first_else_where_it_needs_least(uploads: Uploads) -> None:
    found = fit_of(FORM, uploads)
    rows = table(found).children[1].children
    assert len(rows) == len({row.strategy.title for row in found.rows})
    for cells in ([cell.children for cell in row.children] for row in rows):
        title, _, again = cells[0].partition(", ")
        own = [row for row in found.rows if row.strategy.title == title]
        (shown,) = [row for row in own if format_bytes(row.memory_bytes) == cells[1]][:1]
        fitting = [row for row in own if row.fits]
        assert shown is (fitting[0] if fitting else min(own, key=lambda row: row.memory_bytes))
        assert cells[2].children == shown.verdict
        assert (again == "recomputed") == (shown.strategy.recompute != own[0].strategy.recompute)
