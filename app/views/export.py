"""What can be taken along: files, and the exact commands that make and run the plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.errors import ClusterError
from tensoropt.plan import Exploration
from tensoropt.plan.made_for import for_gpus
from tensoropt.report.table import run_line
from tensoropt.units import format_bytes

from ..library import Entry
from .frontier import FRONTIER, FrontierData


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


DEFAULTS = {
    "mode": "train",
    "optimizer": "adam",
    "dtype": "float32",
    "recompute": "auto",
    "overlap": "default",
    "measure": "all",
}
"""Settings that are options of the same name, with the command line's defaults."""


@dataclass(frozen=True)
class Command:
    """A line to copy and what it does."""

    title: str
    line: str


def files(data: FrontierData) -> tuple[File, ...]:
    """What can be downloaded of this exploration."""
    more = []
    if not _is_named(data.exploration):
        more.append(File("cluster.json", "the cluster, for --cluster", "cluster.json"))
    if data.exploration.settings.get("constraints"):
        more.append(
            File("constraints.json", "what the plans had to do, for --constraints", "constraints.json")
        )
    return (*FILES, *more)


def _is_named(exploration: Exploration) -> bool:
    """Whether the cluster's name alone gives this cluster again; ``local`` is whatever is here."""
    if str(exploration.cluster["name"]).partition(":")[0] == "local":
        return True
    try:
        saved = Cluster.from_dict(exploration.cluster)
        return load_cluster(saved.name).fingerprint == saved.fingerprint
    except ClusterError:
        return False


def explore_line(exploration: Exploration, out: str) -> str:
    """The command line that makes this exploration again, defaults left out.

    What has no name of its own is in a file that the page offers (:func:`files`).
    """
    settings, model = exploration.settings, exploration.model
    cluster = str(exploration.cluster["name"]) if _is_named(exploration) else "cluster.json"
    named = dict.fromkeys(str(row["planner"]) for row in exploration.comparison)
    planners = [name for name in named if name != FRONTIER]
    parts = ["tensoropt", "compare" if planners else "explore", model.source or "MODEL", "--cluster", cluster]
    for name, default in DEFAULTS.items():
        if settings.get(name, default) != default:
            parts += [f"--{name}", str(settings[name])]
    micro = settings.get("micro_batches", "auto")
    if micro != "auto":
        parts += ["--micro-batches", ",".join(map(str, micro))]
    if settings.get("memory_bytes") and not planners:
        parts += ["--memory", str(round(settings["memory_bytes"]))]
    if settings.get("epsilon", 1e-3) != 1e-3:
        parts += ["--epsilon", f"{settings['epsilon']:g}"]
    if settings.get("max_points"):
        parts += ["--max-points", str(settings["max_points"])]
    if settings.get("constraints"):
        parts += ["--constraints", "constraints.json"]
    if model.batch:
        parts += ["--batch", str(model.batch)]
    if model.seed:
        parts += ["--seed", str(model.seed)]
    if model.onnx is not None:
        parts += [w for name, size in model.onnx.dims.items() for w in ("--dim", f"{name}={size}")]
        parts += [w for tensor in model.onnx.outputs for w in ("--output", tensor)]
        if model.onnx.loss not in (None, "auto"):
            parts += ["--loss", str(model.onnx.loss)]
    if planners:
        parts += ["--planners", ",".join(planners)]
    return " ".join(shlex.quote(p) for p in [*parts, "--out", out])


def commands(data: FrontierData, entry: Entry, row: int) -> tuple[Command, ...]:
    """Explore again, choose this point, run it, check it and keep what the check found."""
    exploration = data.exploration
    # What ships with the package is not a place to write to.
    folder = f"out/{entry.key}" if entry.origin == "ready-made" else str(entry.folder)
    again = folder if entry.origin == "opened" else f"out/{entry.key}"
    gpus = for_gpus(exploration.cluster)
    return (
        Command("Explore again", explore_line(exploration, again)),
        *_make(data, folder, row),
        Command(
            "Run it on CPU ranks" if gpus else "Run it",
            run_line(int(data.devices[row]), "plan.json", gpus=gpus),
        ),
        Command(
            "Check it beside the unsplit model, and show here what was found",
            f"tensoropt verify plan.json --save {shlex.quote(folder)}",
        ),
    )


def _make(data: FrontierData, folder: str, row: int) -> tuple[Command, ...]:
    """The line that chooses this point; a mark is no point of the frontier, its plan is a download."""
    point = data.exploration.all_points[row]
    if row >= len(data.exploration.points):
        return ()
    # A budget a byte above the point's own memory selects it: the next point needs more.
    budget = int(point.memory_bytes) + 1
    return (
        Command(
            f"Make this plan ({format_bytes(point.memory_bytes)})",
            f"tensoropt choose {shlex.quote(folder)} --memory {budget} --out plan.json",
        ),
    )
