"""A time from data sheets of GPUs has the range of published jobs; one that was measured has none."""

from __future__ import annotations

import pytest

from tensoropt.cluster import job_spread
from tensoropt.plan.time_range import time_range
from tensoropt.types import DATA_SHEET, FITTED, MEASURED


def test_a_time_from_data_sheets_has_the_range_of_published_jobs():
    spread, found = job_spread(), time_range(2.0, {DATA_SHEET: 1.0}, gpus=True)
    assert (found.low_s, found.middle_s, found.high_s) == (2 * spread.well_tuned, 2.0, 2 * spread.slow)
    assert found.low_s < found.middle_s < found.high_s
    assert found.words().endswith("for 80 % of published jobs")
    assert found.words("{:.2f}".format).startswith(f"{found.low_s:.2f} to {found.high_s:.2f} ")


def test_what_was_measured_does_not_vary():
    half = time_range(2.0, {DATA_SHEET: 0.5, MEASURED: 0.3, FITTED: 0.2}, gpus=True)
    whole = time_range(2.0, {DATA_SHEET: 1.0}, gpus=True)
    assert half.high_s - 2.0 == pytest.approx((whole.high_s - 2.0) / 2)
    assert time_range(2.0, {MEASURED: 1.0}, gpus=True) is None
    assert time_range(2.0, {DATA_SHEET: 1.0}, gpus=False) is None
