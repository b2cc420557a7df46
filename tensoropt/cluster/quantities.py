"""Functions that read sizes, times and bandwidths in cluster files and explain impossible values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

from tensoropt.errors import ClusterError, TensorOptError
from tensoropt.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds


def positive(value: object, name: str) -> float:
    """Return a finite number above zero. Text is parsed, because YAML reads ``15.7e12`` (no sign) as text."""
    return _finite(_number(value), name)


_MOST = 1_000_000
"""The most devices of a cluster: several times the largest ever built. Each has a separate entry in memory,
so a mistyped number would exhaust this machine's memory."""


def count(value: object, name: str) -> int:
    """Return a whole number from 1 to the most devices that a cluster can have, or raise ClusterError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{name} is {value!r}, but it must be a whole number of at least 1")
    if value > _MOST:
        raise ClusterError(
            f"{name} is {value}, but a cluster has at most {_MOST} devices; correct the number"
        )
    return value


@dataclass(frozen=True)
class _Quantity:
    """A physical quantity and its notation in files.

    Attributes:
        parse: parses a text with a unit.
        base: the unit of a number without one.
        suggested: the unit that was probably meant if a number without a unit is out of bounds.
        least, most: the bounds of numbers without a unit in files that people write.
        positive: whether the quantity must be above zero.
    """

    parse: Callable[[str], float]
    base: str
    suggested: str
    least: float
    most: float
    positive: bool = True

    def read(self, value: object, name: str) -> float:
        """Return the value of a text with a unit, or of a number without one."""
        value = _number(value)
        if isinstance(value, str):
            try:
                value = self.parse(value)
            except TensorOptError as error:
                raise ClusterError(f"{name}: {error}") from None
        return _finite(value, name, positive=self.positive)

    def read_written(self, value: object, name: str) -> float:
        """Return the value in a file that people write; raise ClusterError for a number whose unit was
        probably forgotten: ``memory: 80`` is 80 bytes to a program and 80 GB to its author."""
        number = _number(value)
        bare = isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number)
        if bare and number > 0 and not self.least <= number <= self.most:  # type: ignore[operator]
            raise ClusterError(
                f"{name} is {value}, which without a unit is {number:g} {self.base}; write the unit, for "
                f"example {number:g}{self.suggested}"
            )
        return self.read(value, name)


MEMORY = _Quantity(parse_bytes, "bytes", "GB", 2.0**24, inf)
BANDWIDTH = _Quantity(parse_bandwidth, "bytes per second", "GB/s", 1e6, inf)
LATENCY = _Quantity(parse_seconds, "seconds", "us", 0.0, 0.1, positive=False)
FLOPS = _Quantity(parse_flops, "FLOP per second", "TFLOP/s", 1e6, inf)
"""The bounds are assumptions: wide enough for any device, narrow enough to tell 80 bytes from 80 GB."""


def _finite(value: object, name: str, *, positive: bool = True) -> float:
    # bool is an int in Python, and YAML's "yes" is a bool.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"{name} is {value!r}, which is not a number; correct the value")
    if not isfinite(value) or value < 0 or (positive and value == 0):
        rule = "greater than 0" if positive else "at least 0"
        raise ClusterError(f"{name} is {value!r}, but it must be finite and {rule}; correct the value")
    return float(value)


def _number(value: object) -> object:
    # YAML 1.1 reads 1e9 as text.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
