"""Downloads, and the commands that make and run a plan."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.report.commands import Command, cluster_is_named, commands_for, explore_line

from ..library import Entry
from .frontier import FrontierData

__all__ = ["FILES", "Command", "File", "commands", "explore_line", "files"]


@dataclass(frozen=True)
class File:
    """A download: file name, description, and the last part of its address."""

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
    """Return an exploration's downloads."""
    more = []
    if not cluster_is_named(data.exploration):
        more.append(File("cluster.json", "the cluster, for --cluster", "cluster.json"))
    if data.exploration.settings.get("constraints"):
        more.append(
            File("constraints.json", "the constraints on the plans, for --constraints", "constraints.json")
        )
    return (*FILES, *more)


def commands(data: FrontierData, entry: Entry, row: int) -> tuple[Command, ...]:
    """Return the commands that explore again, choose this point, run it, check it and save the check's
    results."""
    folder = command_folder(entry)
    rerun = folder if entry.origin == "opened" else f"out/{entry.key}"
    return commands_for(data.exploration, folder, rerun, row)


def command_folder(entry: Entry) -> str:
    """Return the name of an exploration's folder in commands."""
    # The package's own folder is not for writing.
    return f"out/{entry.key}" if entry.origin == "ready-made" else str(entry.folder.resolve())
