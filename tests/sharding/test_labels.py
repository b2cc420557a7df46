"""Labels: their text is that of plans."""

from __future__ import annotations

import pytest

from tensoropt.ops.layouts import REPLICATE
from tensoropt.sharding.labels import PARTIAL_GRADIENT, PASSED_ON, WHOLE, Label

TEXTS = {
    "none": WHOLE,
    "partial": PASSED_ON,
    "partial_grad": PARTIAL_GRADIENT,
    "out_features": Label("out_features"),
    "rows.1": Label("rows", 1),
    "in_features@R": Label("in_features", resolve=REPLICATE),
    "heads.0@S(2)": Label("heads", 0, 2),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_back(text: str) -> None:
    assert Label.parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


def test_what_it_says() -> None:
    label = Label.parse("rows.1@S(0)")
    assert (label.loop, label.dim, label.resolve) == ("rows", "rows.1", 0)
    assert label.splits
    assert not any(t.splits for t in (WHOLE, PASSED_ON, PARTIAL_GRADIENT))
    assert Label("rows", 1).resolved(0) == label


@pytest.mark.parametrize("text", ["rows.a", "rows@S", "rows@whole"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"placement|invalid"):
        Label.parse(text)
