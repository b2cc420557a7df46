"""``export``: saved frontiers as CSV, a point of one as a launcher is told of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.units import counted


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument(
        "dirs",
        metavar="DIR",
        nargs="+",
        help="the folder given to explore --out; several, or folders of such folders, become one CSV",
    )
    verb.add_argument("--csv", metavar="FILE", help="one row per point")
    verb.add_argument("--strategies", metavar="FILE", help="with --csv: one row per point and operator")
    told = verb.add_argument_group("what a launcher is told")
    told.add_argument(
        "--as",
        dest="launcher",
        metavar="torchtitan|megatron|deepspeed|accelerate",
        help="the point of --point as the config of a launcher",
    )
    told.add_argument("--point", type=WHOLE, metavar="N", help="its number, from 1")
    told.add_argument("--to", metavar="FILE", help="write it into a file; default: print it")
    told.add_argument(
        "--nearest",
        action="store_true",
        help="write the nearest plan that can be said, where the point's cannot; its price is told",
    )


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Write the requested files; return what was written, and where."""
    if options.launcher:
        return _told(options, progress)
    for name in ("to", "nearest", "point"):
        if getattr(options, name) not in (None, False):
            raise TensorOptError(f"--{name} is for --as; add the name of a launcher, or leave it out")
    if not options.csv and not options.strategies:
        raise TensorOptError(
            "nothing to write: give --csv FILE for the frontier, or --as LAUNCHER --point N for a point"
        )
    if options.strategies and not options.csv:
        raise TensorOptError("--strategies is written beside --csv; give both")
    data: dict[str, Any] = {"csv": options.csv, "strategies": options.strategies}
    lines = []
    from tensoropt.exploration.exploration_files import DESCRIBED
    from tensoropt.saved import export_csv, opened

    (folder, *more) = options.dirs
    if more or (Path(folder).is_dir() and not (Path(folder) / DESCRIBED).is_file()):
        return _batch(options, data)
    exploration = opened(folder)
    data["points"] = len(exploration.points)
    export_csv(exploration, options.csv, strategies=options.strategies)
    lines.append(f"{len(exploration.points)} points written to {options.csv}")
    if options.strategies:
        lines.append(f"their strategies written to {options.strategies}")
    return Answer(data, "\n".join(lines))


def _told(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Write a point as a launcher is told of it, or return the text."""
    from tensoropt.files import write_text
    from tensoropt.launchers.registry import launcher_named
    from tensoropt.saved import export_job, opened

    launcher_named(options.launcher)  # an unknown one is the first thing to say
    if options.csv or options.strategies:
        raise TensorOptError("--as writes a config, and --csv a table; give one of them")
    if len(options.dirs) > 1 or options.point is None:
        raise TensorOptError(
            f"--as {options.launcher} is about a point of one exploration; give one DIR, and --point N"
        )
    exploration = opened(options.dirs[0])
    title = exploration.title(exploration.index(point=options.point))
    told = export_job(
        exploration, options.launcher, options.point, nearest=options.nearest, progress=progress
    )
    notes = [f"{title} as {options.launcher} is told of it: {told.sentence()}"]
    notes += [f"not the point itself: {told.reason}"] if not told.is_the_point else []
    notes += told.priced.notes
    data = {
        "launcher": options.launcher,
        "point": options.point,
        "is_the_point": told.is_the_point,
        "memory_bytes": told.priced.point.memory_bytes,
        "time_s": told.priced.point.time_s,
        "notes": notes,
        "text": told.text,
    }
    if not options.to:
        for note in notes:
            progress.note(note)
        return Answer(data, told.text.rstrip("\n"))
    write_text(options.to, told.text)
    return Answer(data, "\n".join([*notes, f"written to {options.to}"]))


_MOST_NAMED = 20
"""The most paths that are named for people for each reason to leave them out; JSON has all."""


def _batch(options: argparse.Namespace, data: dict[str, Any]) -> Answer:
    """Write the frontiers of several explorations; return what was written, and what is none."""
    from tensoropt.saved import export_frontiers

    batch = export_frontiers(options.dirs, options.csv, strategies=options.strategies)
    data["points"] = batch.points
    data["explorations"] = [
        {"exploration": name, "cluster": found.cluster.get("name"), "points": len(found.points)}
        for name, found in batch.explorations.items()
    ]
    data["left_out"] = dict(batch.left_out)
    several = counted(len(batch.explorations), "exploration")
    lines = [f"{batch.points} points of {several} written to {options.csv}"]
    if options.strategies:
        lines.append(f"their strategies written to {options.strategies}")
    for reason in dict.fromkeys(batch.left_out.values()):
        paths = [path for path, why in batch.left_out.items() if why == reason]
        more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
        lines.append(f"left out: {', '.join(paths[:_MOST_NAMED])}{more}: {reason}")
    return Answer(data, "\n".join(lines))


VERB = Verb("export", "write saved frontiers as CSV, a point as a launcher's config", add_arguments, answer)
