"""Descriptions of a point's figures (memory, time, proof, ...), which are the same wherever a point is shown.

The command ``choose``, the dashboard's card and the comparison of two points show a selection of them.
"""

from __future__ import annotations

from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.frontier_table import source_words
from tensoropt.exploration.rates import HOUR_S, THOUSAND_STEPS, Amount, for_gpus
from tensoropt.exploration.time_range import range_of
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.plan.facts_table import Fact
from tensoropt.plan.figures import LISTED, worded
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import planner_title
from tensoropt.plan.point import PROOF, Point
from tensoropt.simulate.recording import MEMORY_KINDS, TwoQueues, host_wait_s, is_host_bound
from tensoropt.units import LEAST_SHARE, counted, format_bytes, format_number, format_seconds, share_words

LISTED_NAMES = tuple(figure.label for figure in LISTED)
"""The names of the figures that are shown on their own line."""


def noted(findings: Findings) -> list[str]:
    """Return notes on what the predictions of users' current jobs leave out."""
    return [f"your job ({job.launcher}): {note}" for job in your_jobs(findings) for note in job.notes]


FIT = "on a device"
"""The name of the row that says whether a plan fits."""


def facts(row: FigureRow) -> dict[str, Fact]:
    """Return a point's figures as named rows of text, with their sources."""
    point, space, sources = row.point, row.space, source_words(row.point.sources)
    spread = range_of(row.findings, row.index)
    hidden = f", {format_seconds(point.hidden_s)} hidden" if hides(point) else ""
    found = (
        Fact("memory", _memory_words(point)),
        Fact("time", worded(point, "compute {compute_s}, communication {communication_s}"), source=sources),
        *([Fact("host", host_words(point))] if point.host_s else []),
        *(
            Fact(figure.label, point.figures[figure.name], figure.unit.words)
            for figure in LISTED
            if figure.name in point.figures
        ),
        Fact("figures", sources or "none"),
        Fact("planner", planner_title(point.planner)),
        Fact("mesh", space.mesh.label, note=counted(space.devices, "device")),
        Fact("micro-batches", space.micro_batches),
        Fact("compute", point.compute_s, format_seconds),
        Fact("communication", format_seconds(point.communication_s) + hidden),
        *([Fact(FIT, row.findings.fit(row.index).words)] if for_gpus(row.findings.cluster) else []),
        Fact("proven", _proof_words(point)),
        *([Fact("range", spread.words, source=spread.source)] if spread is not None else []),
    )
    return {fact.name: fact for fact in found}


def hides(point: Point) -> bool:
    """Return whether communication overlaps other work by more than a rounding error."""
    return point.hidden_s > 1e-6 * point.time_s


def _memory_words(point: Point) -> str:
    parts = {**dict(zip(MEMORY_KINDS, point.memory, strict=True)), **point.terms}
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts.items() if size)


def host_words(step: TwoQueues) -> str:
    """Return how long the host takes to issue a step, and whether the device waits for it."""
    waits = "overlapping the device's work"
    if is_host_bound(step):
        waits = f"host-bound: the device waits for {format_seconds(host_wait_s(step))} of it"
    return f"{format_seconds(step.host_s)} to issue the step, {waits}"


def _proof_words(point: Point) -> str:
    if point.gap is None:
        return "nothing: its planner is a heuristic, or the search used one"
    if point.gap > PROOF:
        return (
            "nothing useful: by the sums of costs that the search compares, a plan with no more memory might "
            f"be faster by more than {share_words(PROOF)}"
        )
    if point.exact:
        better = "no searched plan is faster with no more memory, or leaner and no slower"
    else:
        better = (
            f"it takes at most {share_words(max(point.gap, LEAST_SHARE))} longer than any searched plan with "
            "no more memory"
        )
    sums = worded(point, "{additive_memory_bytes} and {additive_time_s} for this one")
    return (
        f"{better}, by the sums of costs that the search compares ({sums}). The figures above are simulated, "
        "with memory peaks and waits, and not proven."
    )


def rate_facts(row: FigureRow, amount: Amount | None = None) -> list[Fact]:
    """Return rows on throughput, MFU, hours and cost of a training; unknown values have a reason instead.

    Args:
        amount: the length of the training; by default 1,000 steps.

    Raises:
        TensorOptError: the length is in samples or tokens, whose number per step is unknown.
    """
    rates, work, amount = row.rates, row.rated.work, amount or THOUSAND_STEPS
    speeds = [
        f"{format_number(rate)} {name}/s"
        + (f" ({format_number(rate / rates.devices)} per device)" if rates.devices > 1 else "")
        for name, rate in (("tokens", rates.tokens_per_s), ("samples", rates.samples_per_s))
        if rate is not None
    ]
    sizes = ((work.samples, "samples"), (work.tokens, "tokens"))
    reads = ", ".join(f"{size:,} {name}" for size, name in sizes if size is not None)
    steps = amount.steps(work)
    cost = rates.cost(steps)
    money = f"money unknown: {rates.whys['per_hour']}" if cost is None else f"costs {format_number(cost)}"
    hours = f"{_hours_words(rates.hours(steps))}, {format_number(rates.device_hours(steps))} device-hours"
    return [
        Fact("throughput", f"{', '.join(speeds)}; a step reads {reads}")
        if speeds
        else Fact("throughput", None, note=work.whys["samples"]),
        Fact("MFU", None, note=rates.whys["mfu"])
        if rates.mfu is None
        else Fact(
            "MFU",
            rates.mfu,
            lambda share: f"{100 * share:.3g} %",
            note=f"{format_number(rates.flops_per_s / rates.devices / 1e12)} TFLOP/s of the model per device",
        ),
        Fact(amount.words, f"{hours}; {money}"),
    ]


def _hours_words(hours: float) -> str:
    if hours >= 1:
        return f"{format_number(hours)} h"
    minutes = 60 * hours
    return f"{format_number(minutes)} min" if minutes >= 1 else f"{format_number(HOUR_S * hours)} s"
