"""The page Fit in a browser: sliders answer, an uploaded config is a model, the search's form is filled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from site_app import Site

_MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768,
}  # fmt: skip


@pytest.mark.slow
def test_a_form_a_slider_a_config_and_the_way_to_the_search(
    site: Site, opened: Callable[..., Any], tmp_path: Path
) -> None:
    page = opened(site.url("fit"))
    page.wait_for_selector("#fit-answer:has-text('Fits with FSDP (ZeRO-3), layers recomputed')")
    page.focus("#fit-batch-slid [role=slider]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#fit-question:has-text('16 samples')")
    assert page.input_value("#fit-batch") == "16"
    page.fill("#fit-batch", "100")
    page.wait_for_selector("#fit-question:has-text('100 samples')")
    page.fill("#fit-model", "lama")
    page.wait_for_selector("#fit-problem:has-text(\"did you mean 'llama3-8b'\")")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_MISTRAL), encoding="utf-8")
    page.set_input_files("#fit-upload input[type=file]", str(config))
    page.wait_for_selector("#fit-question:has-text('config.json (7.25 billion parameters)')")
    page.wait_for_selector("#fit-problem:empty", state="attached")
    page.click("#fit-search")
    page.wait_for_selector("#fit-search-said:has-text('a kind of GPU')")
    page.click("#fit-device")
    page.fill("#fit-device", "H100-80")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("#fit-question:has-text('8 × H100-80GB')")
    page.click("#fit-search")
    page.wait_for_selector("#refill-said:has-text('Filled from the page Fit')")
    assert page.input_value("#model-options").startswith("layers=32&hidden=4096&heads=32&")
    assert page.input_value("#batch") == "100"
