"""What words on screens mean: one plain sentence each."""

from __future__ import annotations

import pytest

from tensoropt.terms import TERMS


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_explained_in_one_short_sentence(term: str) -> None:
    sentence = TERMS[term]
    assert sentence.endswith(".")
    assert ". " not in sentence
    assert len(sentence) <= 200
    assert sentence[0].isupper()
