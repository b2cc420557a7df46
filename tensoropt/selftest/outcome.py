"""The outcome of a check: figures, each with the most it may be, or the reason why there are none.

Each check runs in a separate process, so that a kernel's fault or a hang ends only that process. ``python -m
tensoropt.selftest.outcome FUNCTION DEVICE FOLDER`` writes ``FOLDER/outcome.json``. A check may have to do
something before PyTorch is imported, so this module does not import it.
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tensoropt.console import json_text
from tensoropt.units import format_bytes, format_seconds

RESULT = "outcome.json"
"""The file in which a check's process leaves its outcome."""

_State = Literal["passed", "failed", "skipped", "left out"]


@dataclass(frozen=True)
class Bounded:
    """A figure with its bound.

    Attributes:
        what: what it measures, in words.
        value: the value in ``unit``; NaN is within no bound.
        bound: the most that it may be; None for a figure that is only shown.
        unit: ``s``, ``bytes``, or ``share`` of something (1 for all of it); empty for other numbers.
    """

    what: str
    value: float
    bound: float | None = None
    unit: str = ""

    @classmethod
    def share(cls, what: str, value: float, bound: float) -> Bounded:
        """Make a share, which people read as per cents."""
        return cls(what, value, bound, "share")

    @property
    def ok(self) -> bool:
        """Whether it is within its bound; a figure without a bound always is."""
        return self.bound is None or self.value <= self.bound

    @property
    def text(self) -> str:
        """The value as people read it."""
        return _text(self.value, self.unit)

    @property
    def bound_text(self) -> str:
        """The bound as people read it."""
        return "-" if self.bound is None else _text(self.bound, self.unit)


def _text(value: float, unit: str) -> str:
    if math.isnan(value):
        return "not a number"
    if unit == "share":
        return f"{value * 100:.3g} %"
    shown = {"s": format_seconds, "bytes": format_bytes}.get(unit, "{:.3g}".format)
    return shown(value)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        state: ``skipped`` if this machine cannot do it, ``left out`` if there was no time for it.
        reason: the reason for all states but ``passed``, in a sentence.
        notes: what else a reader of the figures needs to know.
        details: plain data for a closer look.
    """

    state: _State
    figures: tuple[Bounded, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Sequence[Bounded], *notes: str, **details: Any) -> Outcome:
        """Make an outcome that is passed if all figures are within their bounds; at least one must have a
        bound."""
        bounded = [figure for figure in figures if figure.bound is not None]
        assert bounded, "a check without bounds cannot fail"
        far = [
            f"{figure.what}: {figure.text}, at most {figure.bound_text}"
            for figure in bounded
            if not figure.ok
        ]
        return cls("failed" if far else "passed", tuple(figures), "; ".join(far), notes, details)

    @classmethod
    def skipped(cls, reason: str) -> Outcome:
        """Make the outcome of a check that this machine cannot do."""
        return cls("skipped", reason=reason)

    @classmethod
    def left_out(cls, reason: str) -> Outcome:
        """Make the outcome of a check for which there was no time."""
        return cls("left out", reason=reason)

    @classmethod
    def failed(cls, reason: str, **details: Any) -> Outcome:
        """Make the outcome of a check that did not get as far as figures."""
        return cls("failed", reason=reason, details=details)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_dict` reads."""
        figures = [asdict(figure) | {"ok": figure.ok} for figure in self.figures]
        return {
            "state": self.state,
            "reason": self.reason,
            "figures": figures,
            "notes": list(self.notes),
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the outcome that :meth:`to_dict` wrote; its inverse."""
        figures = tuple(
            Bounded(f["what"], math.nan if f["value"] is None else f["value"], f["bound"], f["unit"])
            for f in data["figures"]
        )
        return cls(data["state"], figures, data["reason"], tuple(data["notes"]), dict(data["details"]))


@dataclass(frozen=True)
class CheckContext:
    """The device and the folder that a check works with.

    Attributes:
        device: ``cpu``, or ``cuda`` for the first GPU.
        folder: an existing folder for files that nobody needs afterwards.
    """

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the check works on the first GPU."""
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        """The communication backend of a rank of this kind."""
        return "nccl" if self.on_gpu else "gloo"


_FRAMES = 6


def main(function: str, device: str, folder: Path) -> None:
    """Run a check (``module:function``) and write its outcome; an error of any kind is an outcome, too."""
    module, _, name = function.partition(":")
    try:
        outcome = getattr(importlib.import_module(module), name)(CheckContext(device, folder))
    except Exception as error:
        words = " ".join(str(error).split()) or "no message"
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        outcome = Outcome.failed(f"{type(error).__name__}: {words}", raised_in=where)
    (folder / RESULT).write_text(json_text(outcome.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
