"""NetSplit's Tables 6-3 and 6-4, and ours beside them; knows neither models nor planners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.machine import described
from tests.benchmarks.program import Row, page, table

CLUSTER = "netsplit-paper"
BASELINES = ("pesto_extended", "m_topo", "m_etf", "m_sct")
"""The thesis' own baselines, in the order of its table."""
PLANNERS = (*BASELINES, "netsplit_shared", "netsplit")
TITLES = ("Pesto, extended", "m-TOPO", "m-ETF", "m-SCT", "NetSplit, devices shared", "NetSplit, ours")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the thesis.

    Attributes:
        name, settings: its model of the zoo, and the builder's settings.
        batch: its batch in Table 6-4; in Table 6-3 all have 128.
        nodes, megabytes: Table 6-3.
        rates: Table 6-4, average samples per second: the four baselines, then NetSplit.
        seconds: Table 6-4, seconds of a batch, in the same order.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int
    nodes: int
    megabytes: float
    rates: tuple[float, ...]
    seconds: tuple[float, ...]

    def filled(self, capacity_bytes: float) -> float:
        """Return the share of all devices' memory that the model takes by Table 6-3, at its batch."""
        return self.megabytes * 2**20 * self.batch / 128 / capacity_bytes


CASES = {
    "AmoebaNet-D": Case(
        name="amoebanet-d", batch=64, nodes=784, megabytes=117_756.06,
        rates=(30.17, 36.46, 19.59, 28.82, 41.83), seconds=(2.13, 1.75, 3.26, 2.22, 1.55),
    ),
    "Wide ResNet-152": Case(
        name="wide-resnet-152", settings={"width": 2}, batch=64, nodes=388, megabytes=115_179.77,
        rates=(38.66, 39.81, 34.15, 32.26, 42.34), seconds=(1.66, 1.59, 1.87, 1.98, 1.53),
    ),
    "U-Net": Case(
        name="unet", settings={"image": 224}, batch=128, nodes=134, megabytes=50_121.92,
        rates=(38.66, 33.35, 37.69, 37.60, 40.36), seconds=(3.31, 3.84, 3.40, 3.40, 3.11),
    ),
    "DeepLab-V3": Case(
        name="deeplab-v3", settings={"depth": 152, "width": 2, "image": 224}, batch=48, nodes=417,
        megabytes=168_094.43, rates=(11.58, 16.18, 14.00, 12.80, 18.39),
        seconds=(4.15, 2.97, 3.43, 3.73, 2.79),
    ),
}  # fmt: skip


def markdown(data: Mapping[str, Any]) -> str:
    notes = []
    for row in data["rows"]:
        if row["section"] != "sizes":
            said = row["refused"] if "refused" in row else "; ".join(row["notes"])
            spent = f" ({row['search_s']:.0f} s)" if "search_s" in row else ""
            notes.append(f"- {row['key']}{spent}" + (f": {said}" if said else ""))
    tight = (
        "## The same, with memory as full as in the thesis",
        (
            "By Table 6-3 the models fill 68 to 85 % of the three cards; the simulator counts fewer bytes.",
            "Here each device has so much less that the bytes that planners add up fill as much of it.",
        ),
        *_steps(data, "tight"),
    )
    return page(
        f"# NetSplit's comparison, {data['date']}",
        (
            f"Steps on `{CLUSTER}`, simulated from data-sheet figures. The thesis ran its own on",
            "its cards: only ratios within a table may be set beside ratios of the thesis.",
        ),
        f"Taken from {described(data)}.",
        (
            "*At most* is what a step that no placement beats would give: the longest chain of operators, or",
            "all work spread evenly, beside the same baseline. *Closed* is our share of that gap.",
        ),
        "## Table 6-4: samples per second",
        *_steps(data, "steps"),
        *(tight if _found(data, "tight") else ()),
        "## Table 6-3: nodes and memory at batch 128",
        (
            "The thesis says neither what a node is nor whose bytes its memory counts. Here: operators",
            "after decomposition, and the groups that are placed; parameters, what backward keeps, and all",
            "outputs.",
        ),
        table(SIZE_TITLES, (_sizes(row) for row in data["rows"] if row["section"] == "sizes")),
        "## Notes of the planners",
        notes,
    )


def _sizes(row: Row) -> list[str]:
    case = CASES[row["model"]]
    size = {name: row[f"{name}_bytes"] / 2**20 for name in ("parameter", "kept", "output")}
    cells = [row["model"], f"{row['operators']:,}", f"{row['groups']:,}", str(case.nodes)]
    cells += [f"{each:,.0f}" for each in (*size.values(), case.megabytes)]
    return [*cells, f"{case.megabytes / size['output']:.2f}"]


def _steps(data: Mapping[str, Any], section: str) -> tuple[list[str], list[str]]:
    """The rates of a section, and ours over the best baseline."""
    rows = []
    for title, of in _found(data, section).items():
        case, first = CASES[title], next(iter(of.values()))
        room = f"{first['limit_bytes'] / 2**30:.1f} GiB" if first.get("limit_bytes") else "24 GiB"
        rows.append([title, first["batch"], room, "here", *(_rate(of.get(name)) for name in PLANNERS)])
        rows.append(["", case.batch, "24 GB", "paper", *(f"{rate:.2f}" for rate in case.rates), ""])
    rates = table(["model", "batch", "device", "", *TITLES], rows)
    return rates, table(RATIO_TITLES, ratios(data, section))


SIZE_TITLES = (
    "model", "operators", "groups", "paper: nodes", "parameters, MB", "kept", "outputs", "paper: MB",
    "paper over outputs",
)  # fmt: skip
RATIO_TITLES = (
    "model", "best baseline", "ours over it: samples/s", "seconds", "at most", "closed",
    "paper: best baseline", "paper: samples/s", "paper: seconds", "reached",
)  # fmt: skip


def ratios(data: Mapping[str, Any], section: str) -> Iterator[list[str]]:
    """Yield a row for each model: ours over the best baseline, what is possible at all, and the thesis' own
    ratio."""
    for title, of in _found(data, section).items():
        case, known = CASES[title], {n: of[n]["time_s"] for n in BASELINES if "time_s" in of.get(n, {})}
        if not known or "time_s" not in of.get("netsplit", {}):
            continue
        best = min(known, key=lambda name: known[name])
        ours_s, bound_s = of["netsplit"]["time_s"], of["netsplit"]["bound_s"]
        paper_best = max(range(len(BASELINES)), key=lambda i: case.rates[i])
        paper_rate = case.rates[-1] / case.rates[paper_best]
        paper_s = case.seconds[-1] / min(case.seconds[:-1])
        reached = {
            "samples/s": known[best] / ours_s >= paper_rate,
            "seconds": ours_s / known[best] <= paper_s,
        }
        yield [
            title,
            TITLES[PLANNERS.index(best)],
            f"{known[best] / ours_s:.3f}",
            f"{ours_s / known[best]:.3f}",
            f"{known[best] / bound_s:.3f}",
            f"{(known[best] - ours_s) / (known[best] - bound_s):.0%}",
            TITLES[paper_best],
            f"{paper_rate:.3f}",
            f"{paper_s:.3f}",
            " and ".join(name for name, is_reached in reached.items() if is_reached) or "no",
        ]


def _found(data: Mapping[str, Any], section: str) -> dict[str, dict[str, Row]]:
    """The rows of a section, by model and planner."""
    found: dict[str, dict[str, Row]] = {}
    for row in data["rows"]:
        if row["section"] == section:
            found.setdefault(row["model"], {})[row["planner"]] = row
    return found


def _rate(row: Row | None) -> str:
    if row is None:
        return ""
    return "refuses" if "refused" in row else f"{row['batch'] / row['time_s']:.2f}"
