"""Quantities in cluster files: sizes, times, bandwidths; helpful errors for impossible values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite

from tensoropt.errors import ClusterError, TensorOptError
from tensoropt.units import (
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_seconds,
)


def positive(value: object, what: str) -> float:
    """Return a finite number above zero. YAML reads ``15.7e12`` (no sign) as text, so texts are parsed
    too."""
    return _finite(_number(value), what, least=0.0, strict=True)


MOST = 1_000_000
"""The most devices of a cluster: several times the largest that was ever built. Each has a separate entry in
memory, so a mistyped number would exhaust this machine's memory."""


def count(value: object, what: str) -> int:
    """Return a whole number of at least one, and at most the number of devices that a cluster can have."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{what} is {value!r}, but it must be a whole number of at least 1")
    if value > MOST:
        raise ClusterError(f"{what} is {value}, but a cluster has at most {MOST} devices; correct the number")
    return value


@dataclass(frozen=True)
class _Unit:
    """A unit, and the ways in which a file may write a quantity in it.

    Attributes:
        parse: parses a text with a unit.
        base: the unit of a bare number.
        least, most: a bare number outside these bounds is refused: a larger or smaller unit must have been
            meant, which ``suggested`` names.
        usual: the smallest and largest plausible figure; a figure outside gets a note (:func:`unusual`).
        shown: formats a figure for people.
    """

    parse: Callable[[str], float]
    base: str
    suggested: str
    least: float
    most: float
    usual: tuple[float, float]
    shown: Callable[[float], str]


def _per_second(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _flops_shown(value: float) -> str:
    return f"{value:.3g} FLOP/s"


MEMORY = _Unit(parse_bytes, "bytes", "GB", 2.0**24, inf, (2.0**24, 10 * 2.0**40), format_bytes)
BANDWIDTH = _Unit(parse_bandwidth, "bytes per second", "GB/s", 1e6, inf, (1e6, 1e15), _per_second)
LATENCY = _Unit(parse_seconds, "seconds", "us", 0.0, 0.1, (0.0, 1.0), format_seconds)
FLOPS = _Unit(parse_flops, "FLOP per second", "TFLOP/s", 1e6, inf, (1e8, 1e18), _flops_shown)
"""The bounds are assumptions: wide enough for any device, narrow enough to tell 80 bytes from 80 GB."""


def size_bytes(value: object, what: str) -> int:
    """The bytes that ``80GiB``, ``80 GB``, ``80G`` or a bare number of bytes stand for."""
    return int(_finite(_with_unit(value, what, MEMORY), what, least=0.0, strict=True))


def latency_s(value: object, what: str) -> float:
    """The seconds that ``5us``, ``1.5 us`` or a bare number of seconds stand for."""
    return _finite(_with_unit(value, what, LATENCY), what, least=0.0, strict=False)


def bandwidth(value: object, what: str) -> float:
    """The bytes per second that ``450GB/s``, ``100Gbit/s`` (or ``100Gb/s``, ``100Gbps``) or a bare number
    stand for.

    A lower-case b is a bit, an upper-case B a byte.
    """
    return _finite(_with_unit(value, what, BANDWIDTH), what, least=0.0, strict=True)


def flops(value: object, what: str) -> float:
    """The FLOP per second that ``60TFLOPS``, ``60 TFLOP/s``, ``60T`` or a bare number stand for."""
    return _finite(_with_unit(value, what, FLOPS), what, least=0.0, strict=True)


def written(value: object, what: str, unit: _Unit) -> object:
    """Return the value as the file has it; refuse a bare number that cannot be meant literally.

    For files that people write only: ``memory: 80`` is 80 bytes to a program and 80 GB to its author.
    """
    number = _number(value)
    bare = isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number)
    if bare and number > 0 and not unit.least <= number <= unit.most:  # type: ignore[operator]
        raise ClusterError(
            f"{what} is {value}, which without a unit is {number:g} {unit.base}; write the unit, for "
            f"example {number:g}{unit.suggested}"
        )
    return value


def unusual(value: float, what: str, unit: _Unit) -> Iterator[str]:
    """Yield a note if a figure lies outside the range of real devices."""
    least, most = unit.usual
    if not least <= value <= most:
        bound = f"less than {unit.shown(least)}" if value < least else f"more than {unit.shown(most)}"
        yield f"{what} is {unit.shown(value)}, {bound}: is its unit right?"


def _finite(value: object, what: str, *, least: float, strict: bool) -> float:
    # bool is an int in Python, and YAML's "yes" is a bool.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"{what} is {value!r}, which is not a number; correct the value")
    number = float(value)
    if not isfinite(number) or number < least or (strict and number == least):
        rule = f"greater than {least:g}" if strict else f"at least {least:g}"
        raise ClusterError(f"{what} is {value!r}, but it must be finite and {rule}; correct the value")
    return number


def _number(value: object) -> object:
    # YAML 1.1 reads 1e9 as text.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _with_unit(value: object, what: str, unit: _Unit) -> object:
    value = _number(value)
    if not isinstance(value, str):
        return value
    try:
        return unit.parse(value)
    except TensorOptError as error:
        raise ClusterError(f"{what}: {error}") from None
