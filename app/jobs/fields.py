"""The fields of the form that a person types into: each by itself, checked, never corrected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.plan.constraints import constraints_of
from tensoropt.units import parse_bytes

MOST_DEVICES = 1024
DEAREST = 10**6
"""Of any currency, for one device-hour."""
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?"
PIN = '{"pin": [{"operators": "*mlp*", "axes": {"*": "out_features"}}]}'
LONGEST = 50_000
"""Characters of constraints."""
NUMBERS = r"[1-9]\d{0,4}(,[1-9]\d{0,4}){0,15}"


class RequestError(TensorOptError):
    """A form that cannot be started; says which field and what would do."""


def number(value: Any, what: str) -> float | None:
    """The number of a field, None for an empty one.

    Raises:
        RequestError: what was typed is no number; nothing is guessed from it.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    text = str(value).strip()
    # JSON's true is a number to Python; NaN, infinity and digits of other scripts are floats to it.
    if isinstance(value, bool) or not re.fullmatch(
        r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text, re.ASCII
    ):
        raise RequestError(f"{what}: '{text[:40]}' is no number; write for example 8 or 2.5")
    return float(text)


def count(value: Any, what: str, most: int) -> int:
    """A whole number from 1 to ``most``; raises :class:`RequestError`."""
    found = number(value, what)
    if found is None or found % 1:
        raise RequestError(f"{what}: give a whole number")
    if not 1 <= found <= most:
        raise RequestError(f"{what}: between 1 and {most:,}")
    return int(found)


def price_from(value: Any) -> float | None:
    """Money per device-hour, None for an empty field; raises :class:`RequestError`."""
    found = number(value, "the price of a device-hour")
    if found is not None and not 0 < found <= DEAREST:
        raise RequestError(
            f"the price of a device-hour: more than 0, at most {DEAREST:,}; empty where unknown"
        )
    return found


def epsilon(value: Any) -> float | None:
    """The allowed gap in percent, None for an empty field; raises :class:`RequestError`."""
    found = number(value, "the allowed gap")
    if found is not None and not 0 <= found < 100:
        raise RequestError("the allowed gap is between 0 and 100 %; 0.1 is the usual one, 0 is exact")
    return found


def max_points(value: Any) -> int | None:
    """How many points to keep, None for all; raises :class:`RequestError`."""
    if number(value, "points kept") is None:
        return None
    found = count(value, "points kept", 10**6)
    if found < 2:
        raise RequestError("points kept: at least 2")
    return found


def batch(value: Any) -> int | None:
    """The batch, None for the model's own; raises :class:`RequestError`."""
    return None if number(value, "the batch") is None else count(value, "the batch", 10**6)


def micro_batches(value: Any) -> str:
    """``auto``, or a list of counts; raises :class:`RequestError`."""
    micro = str(value or "auto").replace(" ", "")
    if not re.fullmatch(rf"auto|{NUMBERS}", micro):
        raise RequestError(f"micro-batches '{micro[:40]}' are neither auto nor a list such as 1,2,4")
    return micro


def divides(micro: str, batch: int) -> None:
    """Whether each of the counts divides the batch; raises :class:`RequestError`."""
    for count in map(int, micro.split(",") if micro != "auto" else ()):
        if batch % count:
            raise RequestError(f"{count} micro-batches do not divide the batch of {batch}; use a divisor")


def dims(value: Any) -> list[str]:
    """``name=size`` words; raises :class:`RequestError`."""
    found = words(value)
    # Checked against a pattern, as the words become arguments of a command line: none may begin with a dash.
    for dim in found:
        if not re.fullmatch(r"[A-Za-z_][\w.\-]{0,60}(\[\d\])?=[1-9]\d{0,8}", dim):
            raise RequestError(f"'{dim[:80]}' is not a size of an input's dim; write for example batch=8")
    return found


def device_counts(value: Any) -> str:
    """Numbers of devices, ``auto``, or "" for all at once; raises :class:`RequestError`."""
    text = str(value or "").replace(" ", "")
    if text and not re.fullmatch(rf"auto|{NUMBERS}", text):
        raise RequestError(f"numbers of devices '{text[:40]}' are neither auto nor a list such as 1,2,4")
    return text


def words(value: Any) -> list[str]:
    """What is separated by commas or spaces."""
    return [w for w in re.split(r"[,\s]+", str(value or "")) if w][:32]


def memory(value: Any) -> str:
    """A memory budget with its unit, "" for none; raises :class:`RequestError`."""
    text = str(value or "").replace(" ", "")
    if text:
        try:
            fine = 0 < parse_bytes(text) < 2**60
        except TensorOptError:
            fine = False
        if not fine or not text[0].isascii() or not text[0].isdigit():
            raise RequestError(f"memory budget '{text[:40]}' is no size; write for example 24GiB")
    return text


def constraints(value: Any) -> dict[str, Any] | None:
    """Constraints as ``--constraints`` takes them, written as JSON; None for none.

    Raises:
        RequestError: it is too long, no JSON, or says nothing that could be kept.
    """
    text = str(value or "").strip()
    if not text:
        return None
    if len(text) > LONGEST:
        raise RequestError(f"constraints: at most {LONGEST:,} characters; use the command line for more")
    try:
        found = json.loads(text)
    # Deeply nested JSON exceeds Python's recursion before it is decoded.
    except (ValueError, RecursionError) as error:
        raise RequestError(f"constraints: no JSON ({str(error)[:80]})") from error
    if not isinstance(found, dict):
        raise RequestError(f"constraints: an object, for example {PIN}")
    try:
        constraints_of(found)
    except TensorOptError as error:
        raise RequestError(f"constraints: {error}") from error
    return found


def seed(value: Any) -> int | None:
    """A seed, None for the usual one; raises :class:`RequestError`."""
    found = number(value, "the seed")
    if found is not None and (found % 1 or not 0 <= found < 2**31):
        raise RequestError("the seed: a whole number from 0 to 2,147,483,647")
    return None if found is None else int(found)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "batch": batch,
    "dims": dims,
    "per_node": lambda value: count(value, "devices per node", MOST_DEVICES),
    "nodes": lambda value: count(value, "nodes", MOST_DEVICES),
    "price": price_from,
    "micro": micro_batches,
    "epsilon": epsilon,
    "max_points": max_points,
    "devices": device_counts,
    "memory": memory,
    "seed": seed,
    "constraints": constraints,
}
"""What checks a field by itself."""


def faults(form: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with each field that a person types into, by field; "" for nothing."""
    found = {}
    for field, check in CHECKS.items():
        try:
            check(form.get(field))
            found[field] = ""
        except RequestError as error:
            found[field] = str(error)
    return found
