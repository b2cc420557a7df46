"""One model at several batches: which to try, which to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt import Exploration, InfeasibleError
from tensoropt.exploration.batch_sweep import batch_in, fastest_batch, next_batch
from tensoropt.exploration.cluster_offers import ClusterQuestion, Offers, offers
from tests.exploration.test_cluster_offers import on

GIB = 2.0**30


def at(batch: int, *points: tuple[float, float]) -> Exploration:
    """Points of (GiB, seconds) at a batch."""
    found = on("dgx-h100", *points)
    other = {"batch": batch, "fingerprint": f"{batch:064}", "call": None, "source": "zoo:toy"}
    return replace(found, model=found.model.model_copy(update=other), costs=None)


SWEEP = (
    at(8, (10, 1.0), (20, 0.8)),
    at(16, (15, 1.6), (30, 1.2)),  # by sample 0.1 and 0.075 s: 10 GiB take 0.125, 20 take 0.1
    at(32, (60, 2.0), (90, 1.9)),
    at(64, (120, 3.0)),
)


def tried(first: int, largest: int, most: int = 40) -> list[int]:
    """The batches that are tried if all up to ``largest`` fit."""
    fits: dict[int, bool] = {}
    while len(fits) < most and (batch := next_batch(fits, first)) is not None:
        assert batch not in fits
        fits[batch] = batch <= largest
    return list(fits)


def test_batches_are_doubled_until_one_does_not_fit_then_one_between():
    assert (tried(8, 40), tried(8, 50)) == ([8, 16, 32, 64, 48], [8, 16, 32, 64, 48])
    assert (tried(1, 1), tried(1, 3)) == ([1, 2], [1, 2, 4, 3])
    # They are halved if the first does not fit.
    assert (tried(24, 7), tried(5, 1), tried(4, 0)) == ([24, 12, 6, 9], [5, 2, 1], [4, 2, 1])


@given(first=st.integers(1, 500), largest=st.integers(0, 10_000))
def test_what_is_tried_brackets_the_largest_that_fits(first, largest):
    batches = tried(first, largest)
    assert batches[0] == first
    assert min(batches) >= 1
    fitting = [batch for batch in batches if batch <= largest]
    if not fitting:
        assert 1 in batches
        return
    # Nothing that fits is more than twice the largest found; from powers of two, not even 1.5 times.
    assert min(batch for batch in batches if batch > largest) <= 2 * max(fitting) + 1


def test_batches_that_always_fit_are_doubled_without_end():
    assert tried(3, 10**30, most=6) == [3, 6, 12, 24, 48, 96]


def sentences(
    sweep: Sequence[Exploration], refused: dict[str, str] | None = None, **limits: float
) -> list[str]:
    found: Offers = offers(sweep, ClusterQuestion(**limits), refused)
    assert found.of_batches
    return list(found.sentences())


def test_the_answer_names_the_largest_that_fits_and_the_fastest_by_sample():
    largest, fastest = sentences(SWEEP)
    why = "does not fit: needs 120 GiB, a device may use 76 GiB"
    assert largest == f"Largest batch that fits: 32; 64 does not ({why})."
    assert fastest.startswith("Fastest without limits: dgx-h100 at batch 32, 2 s a step (16")
    assert "explored: 32. It fits; larger ones may fit, too" in sentences(SWEEP[:3])[0]
    assert "within 35 GiB a device: dgx-h100 at batch 16" in sentences(SWEEP, memory_bytes=35 * GIB)[-1]
    assert sentences(SWEEP, memory_bytes=5 * GIB) == ["No batch is within 5 GiB a device."]


def test_a_batch_at_which_nothing_was_explored_is_a_row():
    assert "32; 48 does not (no plan fits)" in sentences(SWEEP[:3], {"batch-48": "no plan fits"})[0]
    assert batch_in("batch-48") == 48
    assert not any(batch_in(name) for name in ("batch-x", "batches", "dgx-h100"))


def test_the_batch_to_take_has_most_samples_per_second_within_the_limits():
    within = {"memory_bytes": None, "time_s": None, "knee_point": False}
    assert fastest_batch(SWEEP, {**within, "memory_bytes": 35 * GIB}).model.batch == 16
    assert fastest_batch(SWEEP, {**within, "memory_bytes": 12 * GIB}).model.batch == 8
    assert fastest_batch(SWEEP, {**within, "time_s": 1.0}).model.batch == 8
    with pytest.raises(InfeasibleError, match="the smallest plan needs 10 GiB"):
        fastest_batch(SWEEP, {**within, "memory_bytes": 5 * GIB})
