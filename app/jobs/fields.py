"""The form's text fields: each is checked by itself and never corrected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.files import parse_typed
from tensoropt.question.constraints import constraints_of
from tensoropt.question.question import read_batches
from tensoropt.question.settings import Setting, Settings, settings_fields
from tensoropt.units import read_counts, read_number, write_counts
from tensoropt.zoo import read_name

MOST_DEVICES = 1024
_DEAREST = 10**6
"""The highest price of a device-hour, in any currency."""
PIN = """pin:
  - {operators: "*mlp*", axes: {"*": out_features}}"""
_LONGEST = 50_000
"""The most characters of constraints."""


class RequestError(TensorOptError):
    """The form cannot be started; the message says which field is wrong and what it accepts."""


def number(value: Any, name: str) -> float | None:
    """Return the number in a field; None for an empty one.

    Raises:
        RequestError: the text is not a number; nothing is guessed from it.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return read_number(str(value))
    except TensorOptError as error:
        raise RequestError(f"{name}: {error}") from error


def count(value: Any, name: str, most: int) -> int:
    """Return a whole number from 1 to ``most``; raise :class:`RequestError` for anything else."""
    typed = number(value, name)
    if typed is None or typed % 1:
        raise RequestError(f"{name}: give a whole number")
    if not 1 <= typed <= most:
        raise RequestError(f"{name}: between 1 and {most:,}")
    return int(typed)


def price_from(value: Any) -> float | None:
    """Return the price of a device-hour; None for an empty field. Raises :class:`RequestError`."""
    price = number(value, "the price of a device-hour")
    if price is not None and not 0 < price <= _DEAREST:
        raise RequestError(
            f"the price of a device-hour: more than 0, at most {_DEAREST:,}; empty where unknown"
        )
    return price


def batches(value: Any) -> dict[str, Any]:
    """Return the batch or the batches of a field, as fields of a question; nothing for the model's own.

    Raises:
        RequestError: it is neither a number, nor a list, nor ``auto``.
    """
    text = str(value or "").strip()
    if text == "auto" or "," in text:
        try:
            return read_batches(text)
        except TensorOptError as error:
            raise RequestError(f"the batch: {error}") from error
    return {} if number(value, "the batch") is None else {"batch": count(value, "the batch", 10**6)}


def divides(counts: str | Sequence[int], batch: int) -> None:
    """Raise :class:`RequestError` unless each of the micro-batch counts divides the batch."""
    for count in counts if not isinstance(counts, str) else ():
        if batch % count:
            raise RequestError(f"{count} micro-batches do not divide the batch of {batch}; use a divisor")


def dims(value: Any) -> list[str]:
    """Return the ``name=size`` words of a field. Raises :class:`RequestError`."""
    sizes = words(value)
    # Checked against a pattern, as the words become arguments of a command line: none may begin with a dash.
    for dim in sizes:
        if not re.fullmatch(r"[A-Za-z_][\w.\-]{0,60}(\[\d\])?=[1-9]\d{0,8}", dim):
            raise RequestError(f"'{dim[:80]}' is not a size of an input's dim; write for example batch=8")
    return sizes


def device_counts(value: Any) -> str | tuple[int, ...]:
    """Return device counts, ``auto``, or "" for all devices at once. Raises :class:`RequestError`."""
    text = str(value or "").strip()
    try:
        counts = read_counts(text) if text else ""
    except TensorOptError as error:
        raise RequestError(f"numbers of devices: {error}") from error
    if isinstance(counts, tuple) and min(counts) < 1:
        raise RequestError(f"numbers of devices: {write_counts(counts)} must be at least 1")
    return counts


def words(value: Any) -> list[str]:
    """Return the parts of a text that are separated by commas or spaces."""
    return [w for w in re.split(r"[,\s]+", str(value or "")) if w][:32]


def constraints(value: Any) -> dict[str, Any] | None:
    """Return the constraints written as YAML or JSON, as ``--constraints`` takes them; None for none.

    Raises:
        RequestError: the text is too long, neither, or contains no constraints that could be kept.
    """
    text = str(value or "").strip()
    if not text:
        return None
    if len(text) > _LONGEST:
        raise RequestError(f"constraints: at most {_LONGEST:,} characters; use the command line for more")
    try:
        data = parse_typed(text)
    except ValueError as error:
        raise RequestError(f"constraints: neither YAML nor JSON ({str(error)[:200]})") from error
    if not isinstance(data, dict):
        raise RequestError(f"constraints: sections with entries, for example\n{PIN}")
    try:
        constraints_of(data)
    except TensorOptError as error:
        raise RequestError(f"constraints: {error}") from error
    return data


def sequence(value: Any) -> int | None:
    """Return the tokens of a sequence; None for the model's own. Raises :class:`RequestError`."""
    return None if number(value, "the sequence") is None else count(value, "the sequence", 10**7)


def options(model: Any, value: Any) -> str:
    """Return a model of the zoo with its options, as it is written behind ``zoo:``. Raises
    :class:`RequestError`."""
    name, written = str(model).removeprefix("zoo:"), str(value or "").strip()
    label = f"{name}?{written}" if written else name
    try:
        read_name(label)
    except TensorOptError as error:
        raise RequestError(f"model options: {error}") from error
    return label


def seed(value: Any) -> int | None:
    """Return the seed; None for the default one. Raises :class:`RequestError`."""
    typed = number(value, "the seed")
    if typed is not None and (typed % 1 or not 0 <= typed < 2**31):
        raise RequestError("the seed: a whole number from 0 to 2,147,483,647")
    return None if typed is None else int(typed)


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
"""The parser of each setting's field, by the setting's key."""
CHECKS: dict[str, Callable[[Any], Any]] = {
    "batch": batches,
    "sequence": sequence,
    "dims": dims,
    "per_node": lambda value: count(value, "devices per node", MOST_DEVICES),
    "nodes": lambda value: count(value, "nodes", MOST_DEVICES),
    "price": price_from,
    "devices": device_counts,
    "seed": seed,
    **{setting.key: _SETTINGS[setting.key] for setting in settings_fields() if not setting.offered},
}
"""The check of each text field that needs no other, by its name."""
CHECKED = (*CHECKS, "options")
"""The text fields that are checked."""


def settings(form: Mapping[str, Any]) -> Settings:
    """Return the settings of a form. Raises :class:`RequestError`."""
    chosen = {setting.name: _SETTINGS[setting.key](form.get(setting.key)) for setting in settings_fields()}
    try:
        return Settings(**chosen)
    except TensorOptError as error:
        raise RequestError(str(error)) from error


def faults(form: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with each text field, by field; "" for nothing."""
    by_field = {}
    for field, check in CHECKS.items():
        try:
            check(form.get(field))
            by_field[field] = ""
        except RequestError as error:
            by_field[field] = str(error)
    by_field["options"] = ""
    if str(form.get("model")).startswith("zoo:"):
        try:
            options(form["model"], form.get("options"))
        except RequestError as error:
            by_field["options"] = str(error)
    return by_field
