"""Units at the edge: what people type is read exactly, what they read is short and unambiguous."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import TensorOptError
from tensoropt.units import (
    format_bytes,
    format_seconds,
    headroom_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_seconds,
    read_number,
    without_zeros,
)


def of_80_bytes(headroom: str) -> float:
    return headroom_bytes(headroom, 80)


READ = {
    parse_bytes: {
        "24GiB": 24 * 2**30, "24 GiB": 24 * 2**30, " 512mib ": 512 * 2**20, "1e9": 1e9, "1.5GB": 1.5e9,
        ".5KiB": 512, "7b": 7, "0": 0, "2TiB": 2 * 2**40, "80G": 80e9, "80 GB": 80e9, "80gi": 80 * 2**30,
        "80\u00a0GiB": 80 * 2**30, "16 Gbytes": 16e9, "2.TB": 2e12,
        # A comma groups thousands or is a decimal.
        "4,5GiB": 4.5 * 2**30, "1,024 MiB": 2.0**30, "1,24MB": 1.24e6, "12,345,678": 12345678,
    },
    parse_seconds: {
        "0.5": 0.5, "500ms": 0.5, "2s": 2.0, "3 us": 3e-6, "1.5 us": 1.5e-6, "4usec": 4e-6, "2min": 120.0,
        "1h": 3600.0,
        "3\u00b5s": 3e-6,  # the sign for micro
        "3\u03bcs": 3e-6,  # the Greek letter mu
    },
    parse_bandwidth: {
        "450GB/s": 450e9, "450 GB/s": 450e9, "1 GiB/s": 2.0**30, "100Gbit/s": 12.5e9, "100Gb/s": 12.5e9,
        "100Gbps": 12.5e9, "100gbps": 12.5e9, "100 Gbits/sec": 12.5e9, "25GBps": 25e9, "3.35TB/s": 3.35e12,
        "8bit/s": 1.0, "1e9": 1e9,
    },
    parse_flops: {
        "60TFLOPS": 60e12, "60 TFLOP/s": 60e12, "60 tflops": 60e12, "60TFLOPs/s": 60e12, "60TF": 60e12,
        "60T": 60e12, "1.2PFLOP/s": 1.2e15, "500 GFLOPS": 5e11, "624TOPS": 624e12, "15.7e12": 15.7e12,
    },
    read_number: {
        "4,5": 4.5, "5%": 0.05, " 0,1 % ": 0.001, "1,024": 1024.0, "2.5e3": 2500.0, "-1": -1.0,
    },
    parse_count: {"50,000": 50_000, "1,5T": 1.5e12},
    of_80_bytes: {"25%": 20, "2b": 2, "0%": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "text"), [(parse, text) for parse, texts in READ.items() for text in texts]
)
def test_what_people_write_is_read(parse, text: str) -> None:
    assert parse(text) == pytest.approx(READ[parse][text], rel=1e-15)


UNITS = r"is not a .*; write a number and a unit \(.*\), for example"
NOT_READ = {
    (parse_bandwidth, UNITS): ["25G", "25GB", "16GT/s", "1410MHz"],  # 25G: bits or bytes?
    (parse_flops, UNITS): ["60GB", "1410MHz", "TFLOPS"],
    (parse_seconds, UNITS): ["5us/s"],
    (parse_bytes, UNITS): ["80GHz"],
    (parse_bytes, r"not a size.*for example 24GiB"): [
        "", "GiB", "-1GiB", "12 parsecs", "1,5,5GB", "1,5.5GB", "nan", "inf", "1e", "0x10",
    ],
    (read_number, r"is not a number; write for example"): [
        "", "%", "5%%", "5 %5", "1,5,5", "1,5.5", "nan", "five",
    ],
    (parse_seconds, r"not a time.*for example 0\.5s"): ["", "ms", "-1s", "5 GiB"],
    (of_80_bytes, r"--headroom|size"): ["much", "%", "5%%", "-5%", "100%", "81b"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "words", "text"), [(*how, text) for how, texts in NOT_READ.items() for text in texts]
)
def test_what_is_not_read_is_refused_with_an_example(parse, words: str, text: str) -> None:
    with pytest.raises(TensorOptError, match=words):
        parse(text)


SHOWN = {
    format_bytes: {
        0: "0 B", 1023: "1023 B", 1024: "1 KiB", 11.3 * 2**30: "11.3 GiB", 1023 * 2**20: "1023 MiB",
        999.6 * 2**30: "1000 GiB", 2**40: "1 TiB", -(2**20): "-1 MiB", math.inf: "∞",
    },
    format_seconds: {
        0: "0 s", 1.0: "1 s", 0.0124: "12.4 ms", 0.9: "900 ms", 0.9996: "1000 ms", 2.5e-6: "2.5 µs",
        3e-9: "3 ns", 3600: "3600 s", math.inf: "∞",
    },
    without_zeros: {
        "24.0 GiB": "24 GiB", "8.00 GiB": "8 GiB", "13.60 ms": "13.6 ms", "100 GiB": "100 GiB", "5": "5",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "value"), [(shown, value) for shown, values in SHOWN.items() for value in values]
)
def test_what_is_shown_to_people(shown, value) -> None:
    assert shown(value) == SHOWN[shown][value]


@given(st.integers(min_value=1, max_value=2**49))
def test_a_printed_size_reads_back_within_its_three_figures(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=6e-3)


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_a_printed_time_reads_back_within_its_three_figures(value: float) -> None:
    assert parse_seconds(format_seconds(value)) == pytest.approx(value, rel=6e-3)
