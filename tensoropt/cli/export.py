"""The verb ``export``, which writes saved frontiers as CSV files, or a point as a launcher's config."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.units import counted


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "dirs",
        metavar="DIR",
        nargs="+",
        help="the folder given to explore --out; several, or a folder of them, become one CSV",
    )
    verb.add_argument("--csv", metavar="FILE", help="one row per point")
    verb.add_argument("--strategies", metavar="FILE", help="with --csv: one row per point and operator")
    config = verb.add_argument_group("launcher config")
    config.add_argument(
        "--as",
        dest="launcher",
        metavar="torchtitan|megatron|deepspeed|accelerate",
        help="write the point of --point as this launcher's config",
    )
    config.add_argument("--point", type=WHOLE, metavar="N", help="its number, from 1")
    config.add_argument("--to", metavar="FILE", help="write it into a file; default: print it")
    config.add_argument(
        "--nearest",
        action="store_true",
        help="if the launcher cannot express this point, write the closest plan it can, with its cost",
    )


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    if options.launcher:
        return _config(options, progress)
    for name in ("to", "nearest", "point"):
        if getattr(options, name) not in (None, False):
            raise TensorOptError(f"--{name} is for --as; add --as LAUNCHER, or leave out --{name}")
    if not options.csv and not options.strategies:
        raise TensorOptError(
            "nothing to write: give --csv FILE for the frontier, or --as LAUNCHER --point N for a point"
        )
    if options.strategies and not options.csv:
        raise TensorOptError("--strategies is written beside --csv; give both")
    from tensoropt.exploration.cluster_offers import loaded
    from tensoropt.exploration.export import write_frontier_csv, write_strategies_csv

    every = [one for folder in options.dirs for one in loaded(folder).items()]
    found = dict({Path(name).resolve(): (name, one) for name, one in every}.values())
    alone = [*map(Path, found)] == [Path(options.dirs[0])]
    saved = next(iter(found.values())) if alone else found
    write_frontier_csv(saved, options.csv)
    points = sum(len(exploration.points) for exploration in found.values())
    lines = [f"{points} points of {counted(len(found), 'exploration')} written to {options.csv}"]
    if options.strategies:
        write_strategies_csv(saved, options.strategies)
        lines.append(f"their strategies written to {options.strategies}")
    data = {
        "csv": options.csv,
        "strategies": options.strategies,
        "points": points,
        "explorations": [
            {"exploration": name, "cluster": one.cluster.get("name"), "points": len(one.points)}
            for name, one in found.items()
        ],
    }
    return Answer(data, "\n".join(lines))


def _config(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    from tensoropt.files import write_text
    from tensoropt.launchers.registry import launcher_named
    from tensoropt.saved import export_job, opened

    launcher_named(options.launcher)  # an unknown name is refused first
    if options.csv or options.strategies:
        raise TensorOptError("--as writes a config, and --csv a table; give one of them")
    if len(options.dirs) > 1 or options.point is None:
        raise TensorOptError(
            f"--as {options.launcher} exports one point of one exploration; give one DIR, and --point N"
        )
    exploration = opened(options.dirs[0])
    title = exploration.title(exploration.index(point=options.point))
    job = export_job(exploration, options.launcher, options.point, nearest=options.nearest, progress=progress)
    notes = [f"{title} as a config of {options.launcher}: {job.sentence()}"]
    notes += [f"the closest plan, not the point itself: {job.reason}"] if not job.is_the_point else []
    notes += job.priced.notes
    data = {
        "launcher": options.launcher,
        "point": options.point,
        "is_the_point": job.is_the_point,
        "memory_bytes": job.priced.point.memory_bytes,
        "time_s": job.priced.point.time_s,
        "notes": notes,
        "text": job.text,
    }
    if not options.to:
        for note in notes:
            progress.note(note)
        return Answer(data, job.text.rstrip("\n"))
    write_text(options.to, job.text)
    return Answer(data, "\n".join([*notes, f"written to {options.to}"]))


VERB = Verb("export", "write saved frontiers as CSV, a point as a launcher's config", _add_arguments, _answer)
