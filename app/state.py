"""The state of a page, as one value that lives in the URL."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from tensoropt.costs.device_fit import HEADROOM
from tensoropt.errors import TensorOptError
from tensoropt.exploration.rates import amount_of
from tensoropt.units import parse_bytes, parse_seconds

PAGES = ("result", "new", "details")
MOVED = {
    "frontier": "result", "runs": "result", "export": "result", "plan": "details", "explore": "new",
    "fit": "new",
}  # fmt: skip
"""Pages of earlier versions, and what shows their content now: their links are still followed."""
_LONGEST_SAID = 600
_LONGEST = 80
"""The most characters of a name in the URL; a longer one was not written by us."""
_MOST_BESIDE = 12
"""The most explorations in one plot."""


@dataclass(frozen=True)
class View:
    """Everything that a link to a colleague restores.

    Attributes:
        exploration: its key in the library, "" for none.
        point: the chosen point; None for the recommended one.
        budget_bytes: what a plan may need of a device; None for what the exploration was made for, or what
            the headroom leaves.
        time_s: the longest step: the plan that needs least within it is chosen; None for any.
        headroom: the share of a device's memory that must stay free.
        price: money per device-hour; None for the cluster's own price, if it has one.
        amount: the training to which hours and money refer, such as ``1e9 tokens``; "" for 1,000 steps.
        beside: the keys of explorations that are compared with it.
        whole: whether the plot shows all points, not those near the budget.
    """

    exploration: str = ""
    point: int | None = None
    budget_bytes: float | None = None
    time_s: float | None = None
    headroom: float = HEADROOM
    price: float | None = None
    amount: str = ""
    beside: tuple[str, ...] = ()
    whole: bool = False

    @property
    def asked_headroom(self) -> float | None:
        """The headroom that was asked for, which also holds beside a budget; None for the usual one."""
        return None if self.headroom == HEADROOM else self.headroom

    def to_query(self) -> str:
        """Return the URL's query: only what differs from the defaults."""
        written: dict[str, Any] = {}
        for name, default in asdict(View()).items():
            value = getattr(self, name)
            if value == default or value is None:
                continue
            if name == "point":
                value += 1  # people count from 1
            elif name == "beside":
                value = ",".join(value)
            elif isinstance(value, bool):
                value = int(value)
            written[_IN_URL[name]] = _number(value) if isinstance(value, float) else value
        return urlencode(written, safe=",")

    def link(self, page: str = "result", **changes: Any) -> str:
        """Return the address of a page with this view, some of it changed."""
        return f"/{page}?{replace(self, **changes).to_query()}"

    @classmethod
    def from_query(cls, query: str) -> View:
        """Return the view in a URL's query, which may be written by hand: sizes may have units, nonsense is
        left out."""
        pairs = _pairs(query)
        return cls(**{name: _clean(name, pairs[key]) for name, key in _IN_URL.items() if key in pairs})


_IN_URL = {
    "exploration": "x", "point": "point", "budget_bytes": "budget", "time_s": "time", "headroom": "headroom",
    "price": "price", "amount": "amount", "beside": "beside", "whole": "whole",
}  # fmt: skip
_NUMBERS = {"budget_bytes": parse_bytes, "time_s": parse_seconds, "price": float}
_NOT_OURS = ("from", "devices", "batch")
"""What the form reads in an address."""


def _pairs(query: str) -> dict[str, str]:
    # Bounds are assumptions, far above what the page itself writes: a URL may come from anywhere.
    return dict(parse_qsl(query.lstrip("?")[:4096], max_num_fields=64)) if query else {}


def not_understood(query: str) -> list[str]:
    """Return a sentence about each part of a URL's query that :meth:`View.from_query` leaves out."""
    names, said = {key: name for name, key in _IN_URL.items()}, []
    for key, text in _pairs(query).items():
        name = names.get(key, "")
        if not name and key not in _NOT_OURS:
            said.append(f"There is no “{key[:_LONGEST]}” that a link can set.")
        elif name == "whole":
            said += [] if text in ("0", "1") else [f"“{key}” is 0 or 1, not “{text[:_LONGEST]}”."]
        elif name == "headroom" and _parsed(float, text) == HEADROOM:
            continue
        elif name and text and _clean(name, text) == getattr(View(), name):
            said.append(f"“{text[:_LONGEST]}” is not understood as “{key}”.")
    return said


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _clean(name: str, value: str) -> Any:
    """Return the value of a field if its text can be one, otherwise the field's default."""
    default = getattr(View(), name)
    if name == "point":
        # People count from 1, and there is no point 0.
        return int(value) - 1 if re.fullmatch(r"0*[1-9]\d{0,8}", value, re.ASCII) else None
    if name in _NUMBERS:
        number = _parsed(_NUMBERS[name], value)
        return number if number is not None and number > 0 else None
    if name == "headroom":
        share = _parsed(float, value)
        return share if share is not None and 0 <= share <= 0.9 else default
    if name == "beside":
        keys = dict.fromkeys(key for key in value.split(",") if 0 < len(key) <= _LONGEST)
        return tuple(keys)[:_MOST_BESIDE]
    if name == "amount":
        return value if not said_fault(value) else default
    if name == "whole":
        return value == "1"
    return value if len(value) <= _LONGEST else default


def said_fault(text: str) -> str:
    """Return what is wrong with an amount of training; "" for nothing."""
    if len(text) > _LONGEST_SAID or not text.isprintable():
        return f"at most {_LONGEST_SAID} printable characters"
    try:
        amount_of(text)
    except TensorOptError as error:
        return str(error)
    return ""


def _parsed(parse: Any, value: str) -> float | None:
    try:
        number = float(parse(value))
    except (TensorOptError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
