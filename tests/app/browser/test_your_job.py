"""What somebody runs today, beside the frontier, as a browser shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from site_app import Site, running
from tensoropt_app.jobs.worker import run

from tensoropt.cli.parser import main
from tests.app.browser.test_frontier_page import drawn

JOB = """
[training]
local_batch_size = 4
seq_len = 32
[parallelism]
data_parallel_shard_degree = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[prefetch]
depth = 3
"""
MARKS = """() => document.querySelector('#graph .js-plotly-plot').data
  .flatMap((trace) => (trace.customdata ?? []).map((one) => one[2]))
  .filter((name) => /your job/.test(name))"""


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard on what ``explore --beside`` saved."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("today")
    (folder / "job.toml").write_text(JOB)
    words = "explore zoo:llama-tiny --cluster dgx-a100[2] --measure never --epsilon 0.2 --micro-batches 1"
    said = ["--beside", f"torchtitan:{folder / 'job.toml'}", "--out", str(folder / "explorations" / "mine")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSOROPT_CACHE", str(folder / "cache"))
        assert main([*words.split(), *said]) == 0
        with running(folder / "home", folder / "explorations", run) as site:
            yield site


@pytest.mark.slow
def test_you_are_here(explored: Site, opened: Callable[..., Any]) -> None:
    """The job is a point of the plot; the answer says what a better plan brings, and the notes what of the
    job is not part of its prediction."""
    page = drawn(opened(explored.url(query="x=opened-mine")))
    page.wait_for_selector("#answer-beside:has-text('You are here (torchtitan): DP 2 · ZeRO-3')")
    said = page.inner_text("#answer-beside")
    assert " less" in said or "No point of the frontier is better" in said
    assert page.evaluate(MARKS)
    page.wait_for_selector("#assumptions li:has-text('prefetch.depth = 3')")
    notes = page.inner_text("#assumptions .notes")
    assert "your job (torchtitan): compile.enable" in notes
