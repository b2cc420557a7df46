"""The downloads of an exploration, and the commands that make and run a plan."""

from __future__ import annotations

from tensoropt.report.commands import Command, cluster_is_named, commands_for

from ..library import Entry
from .frontier import FrontierData

_FILES = {
    "plan.json": "the selected point as a plan that runs",
    "frontier.csv": "this frontier: every point, one row each",
    "strategies.csv": "every point's operators and how each is split",
    "frontier.html": "the frontier on one page that needs no server",
    "trace.json": "a timeline of the selected point's step, to be opened in ui.perfetto.dev",
}


def files(data: FrontierData) -> dict[str, str]:
    """Return the description of each file that can be downloaded, by file name."""
    found = dict(_FILES)
    if not cluster_is_named(data.exploration):
        found["cluster.json"] = "the cluster, for --cluster"
    if data.exploration.settings.get("constraints"):
        found["constraints.json"] = "the constraints on the plans, for --constraints"
    return found


def commands(data: FrontierData, entry: Entry, row: int) -> tuple[Command, ...]:
    """Return the commands that explore again, choose this point, run it, and check it, saving the results."""
    # The package's own folder is not for writing.
    folder = f"out/{entry.key}" if entry.origin == "ready-made" else str(entry.folder.resolve())
    rerun = folder if entry.origin == "opened" else f"out/{entry.key}"
    return commands_for(data.exploration, folder, rerun, row)
