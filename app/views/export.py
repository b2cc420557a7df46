"""The things to take along: files, and the exact commands that make and run the plan."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.report.commands import Command, cluster_is_named, commands_for, explore_line

from ..library import Entry
from .frontier import FrontierData

__all__ = ["FILES", "Command", "File", "commands", "explore_line", "files"]


@dataclass(frozen=True)
class File:
    """A download: its name on disk, its contents, and the last part of its address."""

    name: str
    text: str
    what: str


FILES = (
    File("plan.json", "the selected point as a plan that runs", "plan.json"),
    File("frontier.csv", "this frontier: every point, one row each", "frontier.csv"),
    File("strategies.csv", "every point's operators and how each is split", "strategies.csv"),
    File("frontier.html", "the frontier on one page that needs no server", "frontier.html"),
    File("trace.json", "the selected point's step for ui.perfetto.dev, opened from disk", "trace.json"),
)


def files(data: FrontierData) -> tuple[File, ...]:
    """Return what can be downloaded from this exploration."""
    more = []
    if not cluster_is_named(data.exploration):
        more.append(File("cluster.json", "the cluster, for --cluster", "cluster.json"))
    if data.exploration.settings.get("constraints"):
        more.append(
            File("constraints.json", "the constraints on the plans, for --constraints", "constraints.json")
        )
    return (*FILES, *more)


def commands(data: FrontierData, entry: Entry, row: int) -> tuple[Command, ...]:
    """Return the commands that explore again, choose this point, run it, check it and keep what the check
    found."""
    folder = command_folder(entry)
    rerun = folder if entry.origin == "opened" else f"out/{entry.key}"
    return commands_for(data.exploration, folder, rerun, row)


def command_folder(entry: Entry) -> str:
    """Return what commands call an exploration's folder."""
    # The package's own folder is not a place to write to.
    return f"out/{entry.key}" if entry.origin == "ready-made" else str(entry.folder.resolve())
