"""The graphs of these tests are small, and searched as large ones are unless a test says otherwise."""

from __future__ import annotations

import pytest

import tensoropt.search.shared as shared


@pytest.fixture(autouse=True)
def few_sums(monkeypatch) -> int:
    """What a pass without bounds may cost in real use; 0 while a test runs."""
    real = shared._FEW_SUMS
    monkeypatch.setattr(shared, "_FEW_SUMS", 0)
    return real
