"""Units at the edge: what people type is read exactly, what they read is short and unambiguous."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import TensorOptError
from tensoropt.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        (" 512mib ", 512 * 2**20),
        ("1e9", 1e9),
        ("1.5GB", 1.5e9),
        (".5KiB", 512),
        ("7b", 7),
        ("0", 0),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes(text: str, expected: float) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.5", 0.5), ("500ms", 0.5), ("2s", 2.0), ("3 us", 3e-6), ("3µs", 3e-6), ("2min", 120.0)],
)
def test_times(text: str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "12 parsecs", "1,5GB", "nan", "inf", "1e", "0x10"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(TensorOptError, match=r"not a size.*for example 24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "5 GiB"])
def test_what_is_not_a_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(TensorOptError, match=r"not a time.*for example 0\.5s"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (11.3 * 2**30, "11.3 GiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**40, "1 TiB"),
        (-(2**20), "-1 MiB"),
        (math.inf, "∞"),
    ],
)
def test_sizes_for_people(value: float, expected: str) -> None:
    assert format_bytes(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 s"),
        (1.0, "1 s"),
        (0.0124, "12.4 ms"),
        (0.9, "900 ms"),
        (2.5e-6, "2.5 µs"),
        (3e-9, "3 ns"),
        (3600, "3600 s"),
        (math.inf, "∞"),
    ],
)
def test_times_for_people(value: float, expected: str) -> None:
    assert format_seconds(value) == expected


@pytest.mark.parametrize("text", [format_bytes(999.6 * 2**30), format_seconds(0.9996)])
def test_no_exponent_is_shown_to_people(text: str) -> None:
    assert "e" not in text


@given(st.integers(min_value=1, max_value=2**49))
def test_a_printed_size_reads_back_within_its_three_figures(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=6e-3)


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_a_printed_time_reads_back_within_its_three_figures(value: float) -> None:
    assert parse_seconds(format_seconds(value)) == pytest.approx(value, rel=6e-3)
