"""The state of a page (selected plan, limits, prices), stored in its URL."""

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
_LONGEST_SAID = 600
_LONGEST = 80
"""Maximum length of a name in the URL; longer names are ignored."""
_MOST_BESIDE = 12
"""Maximum number of explorations in one plot."""


@dataclass(frozen=True)
class View:
    """The state of a page that a link restores.

    Attributes:
        exploration: the exploration's key in the library; "" for none.
        point: the selected point's index; None for the recommended point.
        budget_bytes: memory limit per device; None for the exploration's budget, or all but the headroom.
        time_s: the longest allowed step, in seconds, within which the leanest plan is selected; None for no
            limit.
        headroom: the share of a device's memory that must stay free.
        price: money per device-hour; None for the cluster's own price, if it has one.
        amount: the length of the training whose hours and cost are shown, such as ``1e9 tokens``; "" for
            1,000 steps.
        beside: keys of explorations to compare with.
        whole: whether the plot shows all points, not only those near the budget.
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
        """The headroom; None if it is the default one, which need not stay free if a budget is given."""
        return None if self.headroom == HEADROOM else self.headroom

    def to_query(self) -> str:
        """Return the URL's query, without default values."""
        written: dict[str, Any] = {}
        for name, default in asdict(View()).items():
            value = getattr(self, name)
            if value == default or value is None:
                continue
            if name == "point":
                value += 1  # numbers in URLs begin at 1
            elif name == "beside":
                value = ",".join(value)
            elif isinstance(value, bool):
                value = int(value)
            written[_IN_URL[name]] = _number(value) if isinstance(value, float) else value
        return urlencode(written, safe=",")

    def link(self, page: str = "result", **changes: Any) -> str:
        """Return the address of a page with this view, with changes."""
        return f"/{page}?{replace(self, **changes).to_query()}"

    @classmethod
    def from_query(cls, query: str) -> View:
        """Return the view in a URL's query; sizes may have units, and invalid parts are ignored."""
        pairs = _pairs(query)
        return cls(**{name: _clean(name, pairs[key]) for name, key in _IN_URL.items() if key in pairs})


_IN_URL = {
    "exploration": "x", "point": "point", "budget_bytes": "budget", "time_s": "time", "headroom": "headroom",
    "price": "price", "amount": "amount", "beside": "beside", "whole": "whole",
}  # fmt: skip
_NUMBERS = {"budget_bytes": parse_bytes, "time_s": parse_seconds, "price": float}
_NOT_OURS = ("from", "devices", "batch")
"""Parameters of an address that fill the form *Plan it*."""


def _pairs(query: str) -> dict[str, str]:
    # The limits are assumptions, far above the page's own queries: a URL may come from anywhere.
    return dict(parse_qsl(query.lstrip("?")[:4096], max_num_fields=64)) if query else {}


def not_understood(query: str) -> list[str]:
    """Return a sentence on each part of a URL's query that :meth:`View.from_query` ignores."""
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
    """Return a field's value if its text is valid, else the field's default."""
    default = getattr(View(), name)
    if name == "point":
        # Numbers begin at 1, so there is no point 0.
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
    """Return what is wrong with a typed length of training, such as ``1e9 tokens``; "" if it is valid."""
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
