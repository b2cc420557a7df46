"""The form of the explore page under hands that type what they should not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contrast_app import PALE
from onnx_app import model_file
from site_app import Site


def filled(page: Any) -> Any:
    """Wait until the preset has filled the form."""
    page.wait_for_function("document.querySelector('#kind')?.value === 'RTX-4090'")
    page.click("#more > summary")
    return page


@pytest.mark.slow
def test_rules_are_said_nothing_typed_is_corrected_and_a_refused_file_says_why(
    quick: Site, opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensoropt_app.pages.explore.MAX_UPLOAD_BYTES", 8_000)
    page = filled(opened(quick.url("explore")))
    for control, typed, rule in (
        ("batch", "-5", "the batch: between 1 and 1,000,000"),
        ("device-price", "1e9", "more than 0, at most 1,000,000"),
        ("epsilon", "lots", "'lots' is not a number"),
    ):
        page.fill(f"#{control}", "")
        page.type(f"#{control}", typed)
        page.keyboard.press("Tab")
        page.wait_for_selector(f".mantine-InputWrapper-error:has-text({rule!r})")
        assert page.input_value(f"#{control}") == typed
    assert page.evaluate(PALE) == []
    page.click("#start")
    page.wait_for_selector("#start-said .note-error:has-text('correct the marked fields')")
    assert quick.jobs.jobs() == []
    for control, typed in (("batch", "8"), ("device-price", "2.5"), ("epsilon", "")):
        page.fill(f"#{control}", typed)
    page.wait_for_selector(".mantine-InputWrapper-error", state="detached")
    assert page.inner_text("#start-said") == ""
    page.click("#start")
    page.wait_for_selector("#start-said:has-text('started')")
    assert "8" in quick.jobs.jobs()[0].arguments
    for width in (390, 768, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        said, bar = (page.locator(name).bounding_box()["width"] for name in ("#start-said", ".start-bar"))
        assert said >= 0.9 * bar
    for name, size, said in (
        ("notes.txt", 10, "'notes.txt' is not taken: only files that end in .onnx are"),
        ("large.onnx", 20_000, "'large.onnx' is not taken: it has 20 KiB, at most 8,000 bytes are taken"),
        ("empty.onnx", 0, "'empty.onnx' is empty"),
    ):
        (tmp_path / name).write_bytes(bytes(size))
        page.set_input_files("#upload input[type=file]", tmp_path / name)
        page.wait_for_selector(f"#upload-said .note-error:has-text({said!r})")
    (tmp_path / "bad.onnx").write_bytes(b"something")
    page.set_input_files("#upload input[type=file]", tmp_path / "bad.onnx")
    page.wait_for_selector("#upload-said .note-error:has-text('cannot be read as ONNX')")
    model_file(tmp_path / "good.onnx")
    page.set_input_files("#upload input[type=file]", tmp_path / "good.onnx")
    page.wait_for_selector("#upload-said:has-text('good.onnx is here')")
    page.wait_for_selector("#upload-said .note-error", state="detached")
    page.click("#start")
    page.wait_for_selector("#start-said:has-text('the file leaves batch open; give the size')")
    page.fill("#open-dims input", "0")
    page.wait_for_selector("#open-dims .mantine-InputWrapper-error")
    page.fill("#open-dims input", "8")
    page.wait_for_selector("#open-dims .mantine-InputWrapper-error", state="detached")
    page.click("#start")
    page.wait_for_selector("#start-said:has-text('started')")
    assert "batch=8" in quick.jobs.jobs()[0].arguments


@pytest.mark.slow
def test_other_fields_are_closed_until_something_in_them_is_set(
    quick: Site, opened: Callable[..., Any]
) -> None:
    page = opened(quick.url("explore"))
    page.wait_for_function("document.querySelector('#kind')?.value === 'RTX-4090'")
    page.wait_for_timeout(500)
    assert not page.evaluate("document.querySelector('#more').open")
    page.fill("#model", "gpt2-tiny")
    page.get_by_role("option", name="gpt2-tiny", exact=True).click()
    page.fill("#sequence", "64")
    page.fill("#batch", "8")
    page.wait_for_selector("#cluster-said:has-text('The model computes in bfloat16')")
    page.click("#refill-shown")
    page.wait_for_selector("#refill-said:has-text('Filled from')")
    page.wait_for_function("document.querySelector('#more').open")


@pytest.mark.slow
def test_typing_into_a_select_begins_anew_and_planners_say_that_they_will_refuse(
    quick: Site, opened: Callable[..., Any]
) -> None:
    page = filled(opened(quick.url("explore")))
    page.wait_for_function("document.querySelector('#exploration').value !== ''")
    for control, typed in (("model", "mlp"), ("cluster", "local"), ("exploration", "long")):
        before = page.input_value(f"#{control}")
        page.click(f"#{control}")
        page.keyboard.type(typed)
        assert page.input_value(f"#{control}") == typed
        page.keyboard.press("Escape")
        page.keyboard.press("Tab")
        page.wait_for_function(f"document.querySelector('#{control}').value === {before!r}")
    page.click("#planners")
    # Which the list says a moment after the preset is in the form.
    option = page.locator("[role=option]:has-text('Pesto (places on 2 devices, not on 4)')").first
    option.wait_for()
    assert option.get_attribute("data-combobox-disabled") == "true"
    page.keyboard.press("Escape")
    page.fill("#per-node", "2")
    page.click("#planners")
    page.wait_for_selector("[role=option]:has-text('Pesto'):not([data-combobox-disabled])")


SEEN = """selector => {
  const box = document.querySelector(selector)?.getBoundingClientRect();
  return Boolean(box) && box.top >= 0 && box.bottom <= window.innerHeight;
}"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [pytest.param(1280, 720, marks=pytest.mark.slow), (390, 844)])
def test_the_button_and_the_job_it_starts_are_in_view(
    endless: Site, opened: Callable[..., Any], width: int, height: int
) -> None:
    page = opened(endless.url("explore"), viewport={"width": width, "height": height})
    page.wait_for_function("document.querySelector('#kind')?.value === 'RTX-4090'")
    assert page.evaluate(SEEN, "#start")
    page.evaluate("window.scrollTo(0, 300)")
    assert page.evaluate(SEEN, "#start")
    page.click("#start")
    if width < 900:
        page.click("#start-said >> text=Show it")
    page.wait_for_selector(".job .state-running")
    job = endless.jobs.jobs()[0].id
    page.wait_for_function(SEEN, arg=f"#job-{job} strong")
