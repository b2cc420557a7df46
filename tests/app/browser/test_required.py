"""Where checks run on every change, a browser is required: without one these tests fail there."""

from pathlib import Path

HERE = Path(__file__).parent


def test_ci_requires_one():
    assert "export TENSOROPT_BROWSER_REQUIRED=1" in (HERE.parents[2] / ".ci" / "run").read_text()
