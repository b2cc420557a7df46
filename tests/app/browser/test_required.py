"""Without a browser these tests say why they are skipped; where one is required, they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.app.browser.conftest import launched

HERE = Path(__file__).parent
ONE = f"{HERE / 'test_frontier_page.py'}::test_the_first_screen_is_never_empty"


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip), ("1", pytest.fail)])
def test_a_missing_browser(monkeypatch: pytest.MonkeyPatch, required: str, outcome: Any) -> None:
    monkeypatch.setenv("TENSOROPT_CHROMIUM", "/nowhere/chromium")
    monkeypatch.setenv("TENSOROPT_BROWSER_REQUIRED", required)
    with pytest.raises(outcome.Exception, match="no Chromium: apt-get install chromium"):
        next(launched())


@pytest.mark.slow
@pytest.mark.parametrize(("required", "code", "said"), [("", 0, "1 skipped"), ("1", 1, "1 error")])
def test_tests_without_a_browser(required: str, code: int, said: str) -> None:
    environment = {
        **os.environ,
        "TENSOROPT_CHROMIUM": "/nowhere/chromium",
        "TENSOROPT_BROWSER_REQUIRED": required,
    }
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", ONE]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert (run.returncode, said in run.stdout) == (code, True), run.stdout[-2000:]
    assert "no Chromium: apt-get install chromium" in run.stdout


def test_ci_requires_one() -> None:
    assert "export TENSOROPT_BROWSER_REQUIRED=1" in (HERE.parents[2] / ".ci" / "run").read_text()
