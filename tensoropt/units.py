"""Functions that read and write numbers with units, such as ``24GiB`` or ``12.4 ms``.

Code uses only bytes, seconds, FLOP and bytes per second; GiB and ms are for people.
"""

from __future__ import annotations

import contextlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensoropt.errors import TensorOptError

_QUANTITY = re.compile(r"^([0-9]+\.?[0-9]*|\.[0-9]+)((?:[eE][-+]?[0-9]+)?)(.*)$")
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50}


@dataclass(frozen=True)
class _Kind:
    """A kind of quantity that texts state with a unit, such as a size or a time.

    Attributes:
        what, example: the name of the kind and an example, for error messages.
        listed: the units that error messages list.
        units: the factor of each unit, by its lower-case form, or as written if case matters.
        cased: whether case matters.
    """

    what: str
    example: str
    listed: str
    units: Mapping[str, float]
    cased: bool = False


def _times(prefixes: Mapping[str, float], units: Iterable[str], scale: float = 1.0) -> dict[str, float]:
    return {f"{prefix}{unit}": factor * scale for prefix, factor in prefixes.items() for unit in units}


_PER_SECOND = ("/s", "/sec", "/second", "ps")
_ANY_CASE = {
    name: factor for prefix, factor in (_DECIMAL | _BINARY).items() for name in (prefix, prefix.capitalize())
}
_SIZE = _Kind(
    "a size",
    "24GiB",
    "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
    # A number with only a prefix is in bytes: 80G is 80 GB.
    _times(_DECIMAL | _BINARY, ("", "b", "byte", "bytes")),
)
_TIME = _Kind(
    "a time",
    "0.5s",
    "ns, us, ms, s, min, h",
    {
        **_times({"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}, ("s", "sec", "seconds")),
        "": 1.0,
        "second": 1.0,
        "min": 60.0,
        "h": 3600.0,
    },
)
_BANDWIDTH = _Kind(
    "a bandwidth",
    "450GB/s or 100Gbit/s",
    "B/s, kB/s, MB/s, GB/s, GiB/s, TB/s; bit/s, Gbit/s, Gb/s, Gbps: an upper-case B is a byte, a lower-case "
    "b a bit",
    {
        "": 1.0,
        **_times(
            _ANY_CASE, [f"{u}{p}" for u in ("B", "byte", "bytes", "Byte", "Bytes") for p in _PER_SECOND]
        ),
        **_times(
            _ANY_CASE, [f"{u}{p}" for u in ("b", "bit", "bits", "Bit", "Bits") for p in _PER_SECOND], 1 / 8
        ),
    },
    cased=True,
)
_FLOPS = _Kind(
    "a number of FLOP/s",
    "60TFLOP/s or 60e12",
    "MFLOP/s, GFLOP/s, TFLOP/s, PFLOP/s, also TFLOPS and T",
    _times(
        {**_DECIMAL, "e": 1e18},
        ("flop/s", "flops/s", "flop/sec", "flop/second", "flops", "f", "op/s", "ops/s", "ops"),
    )
    | _DECIMAL,
)


_COUNT = _Kind("a count", "50000 or 1.5T", "K, M, B, T", {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12})


def _with_point(text: str) -> str:
    """Return a text that begins with a number, without commas in it: ``1,024`` is 1024, and ``4,5`` is
    4.5."""
    if re.match(r"\d{1,3}(,\d{3})+(?![\d,])", text):
        return text.replace(",", "")
    return re.sub(r"^(\d+),(\d{1,2})(?![\d,.])", r"\1.\2", text)


def _parse(text: str, kind: _Kind) -> float:
    # Unifies the two micro signs, full-width digits and non-breaking spaces.
    plain = "".join(unicodedata.normalize("NFKC", text).replace("\u03bc", "u").split())
    match = _QUANTITY.match(_with_point(plain))
    unit = "" if match is None else match.group(3)
    unit = unit if kind.cased else unit.lower()
    if match is None or unit not in kind.units:
        raise TensorOptError(
            f"'{text}' is not {kind.what}; write a number and a unit ({kind.listed}), for example "
            f"{kind.example}"
        )
    return float(match.group(1) + match.group(2)) * kind.units[unit]


def parse_bytes(text: str) -> float:
    """Return the size in bytes that a text such as ``24GiB``, ``512 MB``, ``80G`` or ``1e9`` states."""
    return _parse(text, _SIZE)


def parse_seconds(text: str) -> float:
    """Return the duration in seconds that a text such as ``0.5``, ``500ms``, ``5µs`` or ``2 s`` states."""
    return _parse(text, _TIME)


def limit_bytes(exact: float | None, said: float | str | None) -> float | None:
    """Return a memory limit in bytes, given as bytes (``exact``), or as bytes or text such as ``24GiB``
    (``said``); None for no limit.

    Raises:
        TensorOptError: both are given, or the text is not a size.
    """
    return _limit("memory_bytes", exact, "memory", said, parse_bytes)


def limit_seconds(exact: float | None, said: float | str | None) -> float | None:
    """Return a time limit in seconds, given as seconds (``exact``), or as seconds or text such as ``300ms``
    (``said``); None for no limit."""
    return _limit("time_s", exact, "time", said, parse_seconds)


def _limit(
    exact_name: str, exact: float | None, name: str, said: float | str | None, parse: Callable[[str], float]
) -> float | None:
    if exact is not None and said is not None:
        raise TensorOptError(
            f"{exact_name}={exact:g} and {name}={said!r} both set the limit; give one of them"
        )
    if isinstance(said, bool) or isinstance(exact, bool):
        raise TensorOptError(
            f"{name} must be a number or a text with a unit, not {said if exact is None else exact}"
        )
    return parse(said) if isinstance(said, str) else exact if said is None else float(said)


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second that a text such as ``450GB/s``, ``100 Gbit/s`` or ``25Gbps`` states."""
    return _parse(text, _BANDWIDTH)


def parse_flops(text: str) -> float:
    """Return the FLOP per second that a text such as ``60TFLOPS``, ``312 TFLOP/s`` or ``1.2P`` states."""
    return _parse(text, _FLOPS)


def parse_count(text: str) -> float:
    """Return the number that a text such as ``1e9``, ``50000``, ``300B`` or ``1.5T`` (T is 10¹²) states."""
    return _parse(text, _COUNT)


def _readable(value: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, factor in units:
        if abs(value) >= factor:
            amount = value / factor
            # From 999.5 on, three significant digits would be written with an exponent.
            return f"{amount:.3g} {unit}" if abs(amount) < 999.5 else f"{amount:.0f} {unit}"
    return smallest


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun: ``1 point`` or ``2,000 points``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(value: float) -> str:
    """Return a size in bytes as text in binary units with three significant digits, such as ``11.3 GiB``."""
    if not math.isfinite(value):
        return "∞"
    units = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
    return _readable(value, units, f"{value:.0f} B")


def without_zeros(text: str) -> str:
    """Return a formatted size or time without trailing zeros, for limits: ``24.0 GiB`` becomes ``24 GiB``."""
    number, blank, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + blank + unit


def format_seconds(value: float) -> str:
    """Return a duration in seconds as text with three significant digits, such as ``12.4 ms``."""
    if not math.isfinite(value):
        return "∞"
    smallest = f"{value / 1e-9:.3g} ns" if value else "0 s"
    return _readable(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)), smallest)


def format_number(value: float) -> str:
    """Return a number as text with three significant digits and no exponent: ``12,300``, ``0.0123``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # Rounded first: 9.999 has one decimal place less than 9.99.
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


LEAST_SHARE = 1e-5
"""The least share shown as a figure; smaller ones look alike."""


def share_words(share: float) -> str:
    """Return a share as text, ``12 %``; shares below 1 % keep a digit, so that only zero reads as zero."""
    if share == 0:
        return "0 %"
    if abs(share) < LEAST_SHARE:
        return "under 0.001 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0095 else f"{100 * share:.1g} %"


# -- what users type into options and forms ---------------------------------------------------------------

_MOST_COUNTS = 16
_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "kB": 10**3}


def read_number(text: str) -> float:
    """Return the number in a text: ``4,5`` is 4.5 and ``5%`` is 0.05; raise TensorOptError for other
    texts."""
    plain = _with_point(text.strip())
    number = plain.removesuffix("%").rstrip()
    # Python's float accepts NaN, infinity and digits of other scripts.
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", number, re.ASCII):
        raise TensorOptError(f"'{text[:40]}' is not a number; write for example 8 or 2.5")
    return float(number) / (100 if "%" in plain else 1)


def read_whole(text: str) -> int:
    """Return the whole number in a text; raise TensorOptError if there is none."""
    with contextlib.suppress(TensorOptError):
        if not (number := read_number(text)) % 1:
            return int(number)
    raise TensorOptError(f"'{text[:40]}' is not a whole number; write for example 8")


def read_counts(text: str) -> str | tuple[int, ...]:
    """Return the numbers in a list such as ``1,2,4`` as a tuple, or the word ``auto`` as it is."""
    plain = text.replace(" ", "")
    if plain == "auto":
        return plain
    if not re.fullmatch(rf"\d{{1,5}}(,\d{{1,5}}){{0,{_MOST_COUNTS - 1}}}", plain, re.ASCII):
        raise TensorOptError(f"'{text[:40]}' is neither auto nor a list such as 1,2,4")
    return tuple(map(int, plain.split(",")))


def write_counts(value: str | Sequence[int]) -> str:
    """Return a sequence of numbers as ``1,2,4``, or the word ``auto`` as it is."""
    return value if isinstance(value, str) else ",".join(map(str, value))


def read_size(text: str) -> float:
    """Return the size of a device's memory in bytes that a text such as ``24GiB`` states."""
    size = parse_bytes(text)
    if not 0 < size < 2**60:
        raise TensorOptError(f"'{text[:40]}' is not the size of a device's memory; write for example 24GiB")
    return size


def write_size(value: float) -> str:
    """Return the shortest text from which :func:`read_size` gives this number of bytes."""
    unit = next((unit for unit, size in _SIZES.items() if value and value % size == 0), "")
    return f"{round(value / _SIZES.get(unit, 1))}{unit}"


def headroom_bytes(headroom: str, whole: float) -> float:
    """Return the bytes to keep free of a device's ``whole`` bytes, for a text such as ``5%`` or ``2GiB``.

    Raises:
        TensorOptError: the text is neither a share nor a size, or leaves nothing.
    """
    try:
        kept = whole * read_number(headroom) if "%" in headroom else parse_bytes(headroom)
    except TensorOptError:
        raise TensorOptError(
            f"--headroom '{headroom}' is neither a share nor a size; write 5% or 2GiB"
        ) from None
    if not 0 <= kept < whole:
        raise TensorOptError(
            f"--headroom {headroom} is {format_bytes(kept)} of devices that have {format_bytes(whole)}; keep "
            "less free"
        )
    return kept
