"""The form of the page Fit: its answer, and the search for the same step."""

from __future__ import annotations

from typing import Any

import pytest
from tensoropt_app.figures.fit import fit_figure
from tensoropt_app.jobs.refill import refill
from tensoropt_app.jobs.uploads import Uploads
from tensoropt_app.views.fit import device_names, fit_of, search_of

import tensoropt
from tensoropt.errors import TensorOptError
from tensoropt.estimate.strategies import RECOMPUTE

FORM: dict[str, Any] = {
    "model": "llama3-8b", "device": "H100-80GB", "count": "8", "batch": "8", "sequence": "2048", "micro": "1",
    "optimizer": "adam", "dtype": "bfloat16",
}  # fmt: skip


def test_the_page_answers_what_python_answers() -> None:
    found = fit_of(FORM)
    asked = tensoropt.fit("llama3-8b", "8xH100-80GB", batch=8, sequence=2048)
    assert found.to_data() == asked.to_data()
    assert found.fit_command() == "tensoropt fit llama3-8b --cluster dgx-h100 --batch 8 --sequence 2048"
    small = fit_of({**FORM, "device": "24GiB", "count": "2", "optimizer": "sgd"})
    assert small.fit_command().endswith("--cluster 2x24GiB --batch 8 --sequence 2048 --optimizer sgd")


def test_empty_fields_are_the_models_own_and_a_model_without_tokens_has_no_sequence() -> None:
    empty = fit_of({**FORM, "batch": "", "sequence": None, "micro": ""}).step
    assert (empty.batch, empty.sequence, empty.micro_batches) == (8, 8192, 1)
    assert fit_of({**FORM, "model": "vgg16"}).step.sequence == 0


@pytest.mark.parametrize(
    ("field", "typed", "words"),
    [
        ("model", "", "neither a model"),
        ("model", "/etc/passwd", "neither a model"),
        ("model", "../config.json", "neither a model"),
        ("count", "0", "at least 1"),
        ("count", "many", "not a whole number"),
        ("batch", "0", "between 1"),
        ("device", None, "unknown cluster"),
    ],
)
def test_what_is_typed_wrong_is_said(field: str, typed: Any, words: str) -> None:
    with pytest.raises(TensorOptError, match=words):
        fit_of({**FORM, field: typed})


def test_every_device_of_the_form_is_one() -> None:
    for name in device_names():
        assert fit_of({**FORM, "device": name, "count": "2"}).cluster.device_count == 2


def test_the_search_fills_the_explore_form_with_the_same_step(tmp_path: Any) -> None:
    filled = refill(search_of(fit_of({**FORM, "count": "4"})), Uploads(tmp_path)).fields
    assert filled["model"] == "zoo:llama3-8b"
    assert filled["options"] == "sequence=2048"
    assert (filled["cluster"], filled["per_node"], filled["batch"]) == ("dgx-h100", "4", "8")
    assert (filled["dtype"], filled["process_memory"]) == ("bfloat16", "yes")
    assert not fit_of({**FORM, "device": "24GiB"}).search_source


def test_bars_add_up_to_the_table() -> None:
    found = fit_of(FORM)
    rows = [row for row in found.rows if row.strategy.recompute == RECOMPUTE[0]]
    drawn = fit_figure(found, rows, "light")
    for place, row in enumerate(rows):
        assert sum(t["x"][place] for t in drawn["data"]) == pytest.approx(row.memory_bytes / 2**30)
    (line,) = drawn["layout"]["shapes"]
    assert line["x0"] == 80
