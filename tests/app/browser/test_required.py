"""Without a browser these tests say why they are skipped; where one is required, they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.browser.conftest import launched

HERE = Path(__file__).parent


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip), ("1", pytest.fail)])
def test_a_missing_browser(monkeypatch, required, outcome):
    monkeypatch.setenv("TENSOROPT_CHROMIUM", "/nowhere/chromium")
    monkeypatch.setenv("TENSOROPT_BROWSER_REQUIRED", required)
    with pytest.raises(outcome.Exception, match="no Chromium: apt-get install chromium"):
        next(launched())


def test_ci_requires_one():
    assert "export TENSOROPT_BROWSER_REQUIRED=1" in (HERE.parents[2] / ".ci" / "run").read_text()
