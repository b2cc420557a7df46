"""The state of a page, as one value that lives in the URL, and the one place where it changes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

from tensoropt.costs.device_fit import HEADROOM
from tensoropt.errors import TensorOptError
from tensoropt.exploration.rates import amount_of
from tensoropt.units import parse_bytes, parse_seconds

PAGES = ("fit", "explore", "frontier", "runs", "plan", "export")
FRAME = (
    "exploration", "headroom", "log_x", "log_y", "lines", "band", "marks", "mesh", "micro", "devices",
    "price", "across", "up", "amount", "currency",
)  # fmt: skip
"""The fields from which the plot is drawn; everything else in a view only moves the selection."""
ACROSS, UP = ("memory", "hours", "cost"), ("time", "rate", "mfu", "cost")
USUAL_ACROSS, USUAL_UP = ACROSS[0], UP[0]


def is_tautology(across: str, up: str) -> bool:
    """Return whether both axes say the same: money is device-hours times a price."""
    return across != USUAL_ACROSS and up == "cost"


_LONGEST_SAID = 600
_LONGEST_CURRENCY = 12
_LONGEST = 80
"""The most characters of a name in the URL; a longer one was not written by us."""


@dataclass(frozen=True)
class View:
    """Everything that a link to a colleague restores.

    Attributes:
        exploration: its key in the library, "" for none.
        point, other: the selected point and the one it is compared with; None for none.
        budget_bytes, target_s: the limits that the sliders set; None for no limit.
        headroom: the share of a device's memory that must stay free.
        price: money per device-hour; None for the cluster's own price, if it has one.
        log_x, log_y, lines, band, marks: how the plot is drawn.
        mesh, micro, devices: filters; "" for all.
        across, up: what the plot's axes show, by names in :data:`ACROSS` and :data:`UP`.
        amount: the training to which hours and money refer, such as ``1e9 tokens``; "" for 1,000 steps.
        currency: the name of the currency, "" for none.
    """

    exploration: str = ""
    point: int | None = None
    other: int | None = None
    budget_bytes: float | None = None
    target_s: float | None = None
    headroom: float = HEADROOM
    price: float | None = None
    log_x: bool = False
    log_y: bool = False
    lines: bool = False
    band: bool = False
    marks: bool = True
    mesh: str = ""
    micro: str = ""
    devices: str = ""
    across: str = USUAL_ACROSS
    up: str = USUAL_UP
    amount: str = ""
    currency: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return the view for a ``dcc.Store``."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Any) -> View:
        """Return the view in a ``dcc.Store``, which a page can fill with anything: what is not valid is left
        out."""
        if not isinstance(data, Mapping):
            return cls()
        return cls(**{f.name: _clean(f.name, data[f.name]) for f in fields(cls) if f.name in data})

    @property
    def asked_headroom(self) -> float | None:
        """The headroom that was asked for, which also holds beside a budget; None for the usual one."""
        return None if self.headroom == HEADROOM else self.headroom

    def to_query(self) -> str:
        """Return the URL's query: only what differs from the defaults."""
        written = {}
        for name, default in asdict(View()).items():
            value = getattr(self, name)
            if value == default or value is None:
                continue
            if isinstance(value, bool):
                value = int(value)
            if name in ("point", "other"):
                value += 1  # people count from 1
            written[_IN_URL[name]] = _number(value) if isinstance(value, float) else value
        return urlencode(written)

    @classmethod
    def from_query(cls, query: str) -> View:
        """Return the view in a URL's query, which may be written by hand: sizes may have units, nonsense is
        left out."""
        pairs, values = _pairs(query), {}
        for name, key in _IN_URL.items():
            if key in pairs:
                values[name] = _clean(name, pairs[key])
                if name in ("point", "other") and values[name] is not None:
                    # People count from 1, and there is no point 0.
                    values[name] = values[name] - 1 if values[name] else None
        return cls(**values)


_IN_URL = {
    "exploration": "x", "point": "point", "other": "other", "budget_bytes": "budget", "target_s": "target",
    "headroom": "headroom", "price": "price", "log_x": "logx", "log_y": "logy", "lines": "lines",
    "band": "band", "marks": "marks", "mesh": "mesh", "micro": "micro", "devices": "devices",
    "across": "across", "up": "up", "amount": "amount", "currency": "currency",
}  # fmt: skip


def _pairs(query: str) -> dict[str, str]:
    # Bounds are assumptions, far above what the page itself writes: a URL may come from anywhere.
    return dict(parse_qsl(query.lstrip("?")[:4096], max_num_fields=64)) if query else {}


def not_understood(query: str) -> list[str]:
    """Return a sentence about each part of a URL's query that :meth:`View.from_query` leaves out."""
    names, said = {key: name for name, key in _IN_URL.items()}, []
    for key, text in _pairs(query).items():
        name = names.get(key, "")
        default = getattr(View(), name, None)
        if not name:
            said.append(f"There is no “{key[:_LONGEST]}” that a link can set.")
        elif isinstance(default, bool):
            if text.lower() not in ("0", "1", "true", "false"):
                said.append(f"“{key}” is 0 or 1, not “{text[:_LONGEST]}”.")
        elif name not in ("point", "other") and _clean(name, text) == default:
            usual = text == default or (isinstance(default, float) and _parsed(float, text) == default)
            said += [] if usual else [f"“{text[:_LONGEST]}” is not understood as “{key}”."]
    return said


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _clean(name: str, value: Any) -> Any:
    """Return the value of a field if it can be one, otherwise the field's default."""
    default = getattr(View(), name)
    if name in ("point", "other"):
        return int(value) if re.fullmatch(r"\d{1,9}", str(value)) else None
    if name == "budget_bytes":
        return _positive(_parsed(parse_bytes, value))
    if name == "target_s":
        return _positive(_parsed(parse_seconds, value))
    if name in ("across", "up"):
        return value if value in (ACROSS if name == "across" else UP) else default
    if name in ("amount", "currency"):
        return value if isinstance(value, str) and _is_said(name, value) else default
    if name == "price":
        return _positive(_parsed(float, value))
    if name == "headroom":
        share = _parsed(float, value)
        return share if share is not None and 0 <= share <= 0.9 else default
    if isinstance(default, bool):
        return str(value).lower() in ("1", "true")
    return value if isinstance(value, str) and len(value) <= _LONGEST else default


def check_said(name: str, text: str) -> None:
    """Raise :class:`TensorOptError` for an amount or a currency that is not valid."""
    most = _LONGEST_CURRENCY if name == "currency" else _LONGEST_SAID
    if len(text) > most or not text.isprintable():
        raise TensorOptError(f"at most {most} printable characters")
    if name == "amount":
        amount_of(text)


def _is_said(name: str, text: str) -> bool:
    try:
        check_said(name, text)
    except TensorOptError:
        return False
    return True


def _parsed(parse: Any, value: Any) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value) if isinstance(value, (int, float)) else float(parse(str(value)))
    except (TensorOptError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None


# -- changes ------------------------------------------------------------------------------------------


class _Rows(Protocol):
    """The parts of a frontier that this module needs, as in :class:`.views.frontier.FrontierData`, which
    knows about views."""

    def __len__(self) -> int: ...

    @property
    def asked_bytes(self) -> float | None:
        """The memory budget of the run that made it, if it had one."""

    def picked(self, view: View) -> int | None:
        """Return the row that the limits select."""

    def special(self, view: View) -> Mapping[str, int]:
        """Return rows by name, the knee among them."""


def opened(view: View, data: _Rows) -> View:
    """Return the view of an exploration as it is first seen: where nothing is chosen yet, within the budget
    that it was made for."""
    if view.point is None and view.budget_bytes is None and view.target_s is None:
        view = replace(view, budget_bytes=data.asked_bytes)
    return with_point(view, data)


def with_point(view: View, data: _Rows) -> View:
    """Return the view with a point that exists: the one named, otherwise what the limits select, otherwise
    what is recommended without limits and filters."""
    count = len(data)
    point = view.point if view.point is not None and view.point < count else None
    other = view.other if view.other is not None and view.other < count else None
    if point is None:
        point = data.picked(view)
    if point is None:
        free = replace(view, budget_bytes=None, target_s=None)
        point = next((p for each in (free, View()) if (p := data.picked(each)) is not None), 0)
    return replace(view, point=point, other=other if other != point else None)


_STAYING = (
    "headroom", "price", "log_x", "log_y", "lines", "band", "marks", "across", "up", "amount", "currency",
)  # fmt: skip
"""The fields that mean the same in every exploration."""


def open_exploration(view: View, key: str) -> View:
    """Return the view of another exploration: drawing options stay, the selection in the old one is
    dropped."""
    if key == view.exploration:
        return view
    # Not limits and filters: bytes, seconds and meshes of one exploration mean nothing in another.
    kept = {n: getattr(view, n) for n in _STAYING}
    return View(exploration=key, **kept)


def set_budget(view: View, data: _Rows, budget_bytes: float | None) -> View:
    """Set a memory budget, which replaces a time target and selects the recommended plan within it."""
    changed = replace(view, budget_bytes=budget_bytes, target_s=None)
    return repicked(changed, data)


def set_target(view: View, data: _Rows, target_s: float | None) -> View:
    """Set a time target, which replaces a memory budget and selects the plan that needs least within it."""
    changed = replace(view, target_s=target_s, budget_bytes=None)
    return repicked(changed, data)


def repicked(view: View, data: _Rows) -> View:
    """Return the view with what its limits select, if they select anything."""
    free = view.budget_bytes is None and view.target_s is None
    point = None if free else data.picked(view)
    return view if point is None else select(view, data, point)


def select(view: View, data: _Rows, point: int) -> View:
    """Select a point, as close to the requested one as there is."""
    point = min(max(point, 0), len(data) - 1)
    return replace(view, point=point, other=None if view.other == point else view.other)


def compare(view: View, point: int | None) -> View:
    """Set the point to compare with; the selected one cannot be compared with itself."""
    return replace(view, other=None if point == view.point else point)


def swapped(view: View) -> View:
    """Select the compared point, and compare with the selected one."""
    return view if view.other is None else replace(view, point=view.other, other=view.point)
