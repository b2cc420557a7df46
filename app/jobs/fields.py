"""The fields of the form that a person types into: each by itself, checked, never corrected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.question.constraints import constraints_of
from tensoropt.question.settings import Setting, Settings, settings_fields
from tensoropt.units import read_counts, read_number, write_counts

MOST_DEVICES = 1024
_DEAREST = 10**6
"""Of any currency, for one device-hour."""
PIN = '{"pin": [{"operators": "*mlp*", "axes": {"*": "out_features"}}]}'
_LONGEST = 50_000
"""Characters of constraints."""


class RequestError(TensorOptError):
    """A form that cannot be started; says which field and what would do."""


def number(value: Any, what: str) -> float | None:
    """The number of a field, None for an empty one.

    Raises:
        RequestError: what was typed is no number; nothing is guessed from it.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return read_number(str(value))
    except TensorOptError as error:
        raise RequestError(f"{what}: {error}") from error


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
    if found is not None and not 0 < found <= _DEAREST:
        raise RequestError(
            f"the price of a device-hour: more than 0, at most {_DEAREST:,}; empty where unknown"
        )
    return found


def batch(value: Any) -> int | None:
    """The batch, None for the model's own; raises :class:`RequestError`."""
    return None if number(value, "the batch") is None else count(value, "the batch", 10**6)


def divides(counts: str | Sequence[int], batch: int) -> None:
    """Whether each of the numbers of micro-batches divides the batch; raises :class:`RequestError`."""
    for count in counts if not isinstance(counts, str) else ():
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


def device_counts(value: Any) -> str | tuple[int, ...]:
    """Numbers of devices, ``auto``, or "" for all at once; raises :class:`RequestError`."""
    text = str(value or "").strip()
    try:
        counts = read_counts(text) if text else ""
    except TensorOptError as error:
        raise RequestError(f"numbers of devices: {error}") from error
    if isinstance(counts, tuple) and min(counts) < 1:
        raise RequestError(f"numbers of devices: {write_counts(counts)} must be at least 1")
    return counts


def words(value: Any) -> list[str]:
    """What is separated by commas or spaces."""
    return [w for w in re.split(r"[,\s]+", str(value or "")) if w][:32]


def constraints(value: Any) -> dict[str, Any] | None:
    """Constraints as ``--constraints`` takes them, written as JSON; None for none.

    Raises:
        RequestError: it is too long, no JSON, or says nothing that could be kept.
    """
    text = str(value or "").strip()
    if not text:
        return None
    if len(text) > _LONGEST:
        raise RequestError(f"constraints: at most {_LONGEST:,} characters; use the command line for more")
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


def _of_setting(setting: Setting) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        try:
            return setting.from_form(value)
        except TensorOptError as error:
            raise RequestError(str(error)) from error

    return read


_SETTINGS: dict[str, Callable[[Any], Any]] = {
    # Constraints are typed here, not named: what is typed must never become the path of a file.
    setting.key: constraints if setting.name == "constraints" else _of_setting(setting)
    for setting in settings_fields()
}
"""What reads the field of a setting."""
CHECKS: dict[str, Callable[[Any], Any]] = {
    "batch": batch,
    "dims": dims,
    "per_node": lambda value: count(value, "devices per node", MOST_DEVICES),
    "nodes": lambda value: count(value, "nodes", MOST_DEVICES),
    "price": price_from,
    "devices": device_counts,
    "seed": seed,
    **{setting.key: _SETTINGS[setting.key] for setting in settings_fields() if not setting.offered},
}
"""What checks a field that a person types into, by itself."""


def settings(form: Mapping[str, Any]) -> Settings:
    """The settings of a form; raises :class:`RequestError`."""
    chosen = {setting.name: _SETTINGS[setting.key](form.get(setting.key)) for setting in settings_fields()}
    try:
        return Settings(**chosen)
    except TensorOptError as error:
        raise RequestError(str(error)) from error


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
