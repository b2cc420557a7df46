"""What the first lines of an answer say beside a plan's time and memory: how much it reads per second,
whether the host holds it up, and the nearest plan that a launcher's config can say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tensoropt.exploration.rates import RatesOf
from tensoropt.exploration.recommended import a_config_says
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import brief_name
from tensoropt.plan.point import Point
from tensoropt.units import format_number, format_seconds, share_words


class OtherPlan(Protocol):
    """A plan beside the answer's."""

    @property
    def row(self) -> int: ...
    @property
    def point(self) -> Point: ...
    @property
    def fits(self) -> bool: ...


def pace_words(findings: Findings, row: int) -> list[str]:
    """Return ``302,000 tokens/s`` (or samples), where that is known, and ``bound by the host``, if it is."""
    rates = RatesOf(findings).of(row)
    known = (("tokens", rates.tokens_per_s), ("samples", rates.samples_per_s))
    said = [f"{format_number(per_s)} {what}/s" for what, per_s in known if per_s is not None][:1]
    return said + (["bound by the host"] if findings.all_points[row].host_bound else [])


def launcher_words(
    findings: Findings,
    row: int,
    plans: Sequence[OtherPlan],
    time: Callable[[float], str] = format_seconds,
) -> list[str]:
    """Return a sentence about the fastest plan that fits and that a launcher's config can say; none where the
    plan itself is one, or where none is known.

    Args:
        row: the answer's plan.
        plans: what is known beside it.
    """
    own = findings.all_points[row]
    if a_config_says(findings.names[row]):
        return []
    said = [plan for plan in plans if plan.fits and a_config_says(findings.names[plan.row])]
    if not said:
        return []
    best = min(said, key=lambda plan: (plan.point.time_s, plan.point.memory_bytes))
    name, more = brief_name(findings.names[best.row]), best.point.time_s / own.time_s - 1.0
    price = f"+{share_words(more)}" if more > 0 else "as fast"
    return [f"A launcher's config can say {name}: {time(best.point.time_s)} a step ({price})."]
