"""The rows of figures that CSV files, ``--json`` and the dashboard show, one row per point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tensoropt.costs.device_fit import WORDS
from tensoropt.exploration.rates import CLUSTERS_OWN, THOUSAND_STEPS, Amount, Rates, RatesOf, Tariff
from tensoropt.plan.figures import BREAKDOWNS, FIXED, FURTHER
from tensoropt.plan.findings import Findings
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space


@dataclass(frozen=True)
class FigureRow:
    """A point with its exploration, from which all figures of its row are computed
    (:data:`~tensoropt.plan.figures.FIGURES`)."""

    findings: Findings
    index: int
    rated: RatesOf

    @classmethod
    def of(cls, findings: Findings, index: int, tariff: Tariff = CLUSTERS_OWN) -> FigureRow:
        """Return the row of point ``index`` of ``all_points``; a tariff replaces the cluster's prices."""
        return cls(findings, index, RatesOf(findings, tariff))

    @property
    def number(self) -> int:
        """The point's number, from 1."""
        return self.index + 1

    @property
    def point(self) -> Point:
        return self.findings.all_points[self.index]

    @property
    def space(self) -> Space:
        """The mesh and micro-batch count of the point, with the names of all choices on that mesh."""
        return self.findings.spaces[self.point.space]

    @property
    def name(self) -> str:
        return self.findings.names[self.index]

    @property
    def needs(self) -> float:
        """The memory that the point needs on a device, in bytes."""
        return float(self.findings.needs[self.index])

    @property
    def fits(self) -> str:
        """Whether the point fits a device: ``yes``, ``tight`` or ``no``."""
        return WORDS[self.findings.verdict(self.index)]

    @property
    def rates(self) -> Rates:
        return self.rated.of(self.index)


def figure_rows(findings: Findings, indices: Iterable[int]) -> Iterator[FigureRow]:
    """Yield the rows of points, which are given by their indices in ``all_points``."""
    rated = RatesOf(findings)
    return (FigureRow(findings, index, rated) for index in indices)


def points_data(findings: Findings, indices: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Return a dictionary per point, with the names of the CSV's columns; a breakdown's parts are nested.

    Args:
        indices: the points' indices in ``all_points``; by default the frontier.
    """
    rows = []
    for row in figure_rows(findings, range(len(findings.points)) if indices is None else indices):
        data: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {name: {} for name in BREAKDOWNS}
        for figure in (*FIXED, *FURTHER):
            if figure.part is None:
                data[figure.name] = figure.plain(row)
            elif figure.name in row.point.figures:
                parts[figure.part[0]][figure.part[1]] = figure.plain(row)
        rows.append(data | parts)
    return rows


def rates_data(row: FigureRow, amount: Amount | None = None) -> dict[str, Any]:
    """Return a point's throughput, MFU, hours and cost as plain data; None for unknown ones, with the reasons
    in ``unknown``.

    Raises:
        TensorOptError: the length is in samples or tokens, whose number per step is unknown.
    """
    one, work, amount = row.rates, row.rated.work, amount or THOUSAND_STEPS
    steps = amount.steps(work)
    return {
        "samples_per_step": work.samples,
        "tokens_per_step": work.tokens,
        "model_flops_per_step": sum(work.flops.values()),
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "price_per_hour": one.per_hour,
        "amount": amount.words,
        "steps": steps,
        "hours": one.hours(steps),
        "device_hours": one.device_hours(steps),
        "cost": one.cost(steps),
        "unknown": dict(one.whys),
    }
