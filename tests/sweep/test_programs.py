"""Random programs compute what the model does under any strategy, and one that does not is found."""

from __future__ import annotations

import pytest

from tests.sweep.programs import refusal, seeds_of

QUICK, PARTS = 40, 8


@pytest.mark.parametrize("part", range(PARTS))
def test_strategies_compute_what_the_model_does(part: int) -> None:
    refused = [refusal(seeds_of(program), program) for program in range(QUICK)[part::PARTS]]
    assert refused == [""] * len(refused)


def test_what_failed_once_is_right() -> None:
    # A copy that is made again in backward, passed on as a part of a sum on the first rank alone.
    assert refusal([1525000, 1525003, 1525004, 1525005, 1525006, 1525007, 1525008], 1525) == ""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_more_strategies_compute_what_the_model_does(part: int) -> None:
    for program in range(2000 + part, 2200, 20):
        refusal(seeds_of(program), program)


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum whose ranks forget each other."""
    monkeypatch.setattr("tests.engine.threads.all_reduce", lambda value, *args, **more: None)
    monkeypatch.setattr("tests.engine.threads.DIST.all_reduce", lambda value, *args, **more: None)
    with pytest.raises(AssertionError, match="loss"):
        list(map(refusal, [seeds_of(1)] * 3, range(3)))
