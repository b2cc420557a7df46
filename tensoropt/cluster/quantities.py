"""Quantities in cluster files: sizes, times, bandwidths; kind errors for impossible values."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

from tensoropt.errors import ClusterError, TensorOptError
from tensoropt.units import parse_bytes, parse_seconds

_BANDWIDTH = re.compile(
    r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([kKMGT]?)(i?)(B/s|bit/s|b/s|bps|Bps)\s*$"
)
_PREFIX = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def suggest(name: object, valid: Iterable[str]) -> str:
    """``did you mean …? Valid: a, b, c`` for an unknown name."""
    names = sorted(valid)
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(str(name).lower(), list(lowered), n=1, cutoff=0.5)
    hint = f"did you mean '{lowered[close[0]]}'? " if close else ""
    return f"{hint}Valid: {', '.join(names)}"


def _finite(value: object, what: str, *, least: float, strict: bool) -> float:
    # bool is an int in Python, and YAML's "yes" is a bool.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(
            f"{what} is {value!r}, which is not a number; write a number or a text with a unit"
        )
    number = float(value)
    if not math.isfinite(number) or number < least or (strict and number == least):
        rule = f"greater than {least:g}" if strict else f"at least {least:g}"
        raise ClusterError(f"{what} is {value!r}, but it must be finite and {rule}; correct the value")
    return number


def positive(value: object, what: str) -> float:
    """A finite number above zero. YAML reads ``15.7e12`` (no sign) as text, so texts are tried too."""
    return _finite(_number(value), what, least=0.0, strict=True)


def not_negative(value: object, what: str) -> float:
    """A finite number of at least zero."""
    return _finite(_number(value), what, least=0.0, strict=False)


def count(value: object, what: str) -> int:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{what} is {value!r}, but it must be a whole number of at least 1")
    return value


def _number(value: object) -> object:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def size_bytes(value: object, what: str) -> int:
    """Bytes from ``80GiB`` or a number."""
    return int(positive(_with_unit(value, what, parse_bytes), what))


def latency_s(value: object, what: str) -> float:
    """Seconds from ``5us`` or a number."""
    return not_negative(_with_unit(value, what, parse_seconds), what)


def bandwidth(value: object, what: str) -> float:
    """Bytes per second from ``450GB/s``, ``100Gbit/s`` (or ``100Gb/s``, ``100Gbps``) or a number.

    A lower-case b is a bit, an upper-case B a byte.
    """
    return positive(_with_unit(value, what, _parse_bandwidth), what)


def _parse_bandwidth(text: str) -> float:
    match = _BANDWIDTH.match(text)
    if match is None:
        raise TensorOptError(f"'{text}' is not a bandwidth; write for example 450GB/s or 100Gbit/s")
    number, prefix, binary, unit = match.groups()
    scale = (1024.0 if binary else 1000.0) ** _PREFIX[prefix]
    return float(number) * scale / (8.0 if unit.startswith("b") else 1.0)


def _with_unit(value: object, what: str, parse: object) -> object:
    # YAML 1.1 reads 1e9 as text; a number without a unit is taken in the base unit.
    value = _number(value)
    if not isinstance(value, str):
        return value
    try:
        return parse(value)  # type: ignore[operator]
    except TensorOptError as error:
        raise ClusterError(f"{what}: {error}") from None
