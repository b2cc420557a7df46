"""What can be taken along: files, and the exact commands that make and run the plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from tensoropt.plan import Exploration
from tensoropt.plan.table import run_line
from tensoropt.units import format_bytes

from ..library import Entry
from .frontier import FrontierData


@dataclass(frozen=True)
class File:
    """A download: its name on disk, what it holds, and the last part of its address."""

    name: str
    text: str
    what: str


FILES = (
    File("plan.json", "the selected point as a plan that runs", "plan.json"),
    File("frontier.csv", "every point, one row each", "frontier.csv"),
    File("strategies.csv", "every point's operators and how each is split", "strategies.csv"),
    File("frontier.html", "the frontier on one page that needs no server", "frontier.html"),
    File("trace.json", "the selected point's step for ui.perfetto.dev, opened from disk", "trace.json"),
)


@dataclass(frozen=True)
class Command:
    """A line to copy and what it does."""

    title: str
    line: str


def explore_line(exploration: Exploration, out: str) -> str:
    """The command line that makes this exploration again, defaults left out."""
    settings, model = exploration.settings, exploration.model
    parts = ["tensoropt", "explore", model.source or "MODEL", "--cluster", str(exploration.cluster["name"])]
    if settings.get("mode", "train") != "train":
        parts += ["--mode", str(settings["mode"])]
    if settings.get("optimizer", "adam") != "adam":
        parts += ["--optimizer", str(settings["optimizer"])]
    micro = settings.get("micro_batches", "auto")
    if micro != "auto":
        parts += ["--micro-batches", ",".join(map(str, micro))]
    if settings.get("memory_bytes"):
        parts += ["--memory", str(settings["memory_bytes"])]
    if settings.get("epsilon", 1e-3) != 1e-3:
        parts += ["--epsilon", f"{settings['epsilon']:g}"]
    if settings.get("recompute", "auto") != "auto":
        parts += ["--recompute", settings["recompute"]]
    if settings.get("max_points"):
        parts += ["--max-points", str(settings["max_points"])]
    if model.batch:
        parts += ["--batch", str(model.batch)]
    if model.seed:
        parts += ["--seed", str(model.seed)]
    return " ".join(shlex.quote(p) for p in [*parts, "--out", out])


def commands(data: FrontierData, entry: Entry, row: int) -> tuple[Command, ...]:
    """Explore again, choose this point, run it, check it."""
    exploration = data.exploration
    found = exploration.all_points[row]
    folder = f"out/{entry.key}" if entry.origin != "opened" else str(entry.folder)
    # A budget a byte above the point's own memory selects it: the next point needs more.
    budget = int(found.memory_bytes) + 1
    return (
        Command("Explore again", explore_line(exploration, folder)),
        Command(
            f"Make this plan ({format_bytes(found.memory_bytes)})",
            f"tensoropt choose {shlex.quote(folder)} --memory {budget} --out plan.json",
        ),
        Command("Run it", run_line(int(data.devices[row]), "plan.json")),
        Command("Check it beside the unsplit model", "tensoropt verify plan.json"),
    )
