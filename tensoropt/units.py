"""Units at the edge between people and code.

Inside the code everything is bytes, seconds, FLOP and bytes/second; GiB and ms exist only where a
person reads or types.
"""

from __future__ import annotations

import math
import re

from tensoropt.errors import TensorOptError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_QUANTITY = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Zµ]*)\s*$")


def _parse(text: str, table: dict[str, float], what: str, example: str) -> float:
    match = _QUANTITY.match(text)
    if match is None or match.group(2).lower() not in table:
        units = ", ".join(unit for unit in table if unit)
        raise TensorOptError(
            f"'{text}' is not {what}; write a number and a unit ({units}), for example {example}"
        )
    return float(match.group(1)) * table[match.group(2).lower()]


def parse_bytes(text: str) -> float:
    """Bytes in a text such as ``24GiB``, ``512MiB`` or ``1e9``."""
    return _parse(text, {unit: float(f) for unit, f in _BYTE_UNITS.items()}, "a size", "24GiB")


def parse_seconds(text: str) -> float:
    """Seconds in a text such as ``0.5``, ``500ms`` or ``2s``."""
    return _parse(text, _TIME_UNITS, "a time", "0.5s")


def _readable(value: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    """Three significant figures in the largest unit of which there is at least one."""
    for unit, factor in units:
        if abs(value) >= factor:
            amount = value / factor
            # From 999.5 on three significant figures would be written with an exponent.
            return f"{amount:.3g} {unit}" if abs(amount) < 999.5 else f"{amount:.0f} {unit}"
    return smallest


def counted(count: int, what: str, plural: str = "") -> str:
    """``1 point`` or ``2,000 points``."""
    return f"{count:,} {what if count == 1 else plural or what + 's'}"


def format_bytes(value: float) -> str:
    """Binary units with three significant figures, e.g. ``11.3 GiB``."""
    if not math.isfinite(value):
        return "∞"
    units = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
    return _readable(value, units, f"{value:.0f} B")


def format_seconds(value: float) -> str:
    """A readable time with three significant figures, e.g. ``12.4 ms``."""
    if not math.isfinite(value):
        return "∞"
    smallest = f"{value / 1e-9:.3g} ns" if value else "0 s"
    return _readable(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)), smallest)


def format_number(value: float) -> str:
    """Three significant figures without an exponent, thousands grouped: ``12,300``, ``0.0123``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # Rounded first: 9.999 has one place less than 9.99.
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_count(text: str, what: str = "a count") -> float:
    """The number in a text such as ``1e9``, ``50000``, ``300B`` or ``1.5T`` (K, M, B, T: thousands)."""
    match = _QUANTITY.match(text)
    if match is None or match.group(2).lower() not in _COUNTS:
        raise TensorOptError(f"{what} '{text}' is no count; write for example 1e9, 50000, 300B or 1.5T")
    return float(match.group(1)) * _COUNTS[match.group(2).lower()]
