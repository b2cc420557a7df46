"""Verbs on a saved exploration: ``choose``, ``show``, ``recost``, ``export``."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.answer import Answer
from tensoropt.cli.question import writable_folder
from tensoropt.cli.searching import profile_answer
from tensoropt.console import Progress
from tensoropt.errors import TensorOptError
from tensoropt.units import parse_bytes, parse_seconds


def choose(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan.made_for import for_gpus
    from tensoropt.report.table import point_lines, points_data, run_line

    memory = parse_bytes(options.memory) if options.memory is not None else None
    time_s = parse_seconds(options.time) if options.time is not None else None
    if options.profile:
        from tensoropt.plan.device_sweep import load_family

        return *profile_answer(load_family(options.dir)), 0
    found = chosen_exploration(options, memory, time_s)
    index = found.index(memory_bytes=memory, time_s=time_s, knee_point=options.knee)
    plan = found.plan(index)
    lines = point_lines(found, index)
    if options.out:
        plan.save(options.out)
        gpus = for_gpus(found.cluster)
        how = "run it on CPU ranks" if gpus else "run it"
        lines.append(f"saved: {options.out}; {how}: {run_line(plan.devices, options.out, gpus=gpus)}")
    else:
        lines.append("not saved; give --out plan.json to keep it")
    data = {
        **points_data(found, [index])[0],
        "out": options.out,
        "plan": plan.model_dump(by_alias=True, mode="json"),
    }
    return data, "\n".join(lines), 0


def chosen_exploration(options: argparse.Namespace, memory: float | None, time_s: float | None) -> Any:
    """The exploration of a folder, or of a family in it the one that ``--devices`` means."""
    from tensoropt.plan import load_exploration
    from tensoropt.plan.device_sweep import fewest_devices, folders_in, load_family, member

    if options.devices is None:
        inside = list(folders_in(options.dir))
        if len(inside) > 1:
            raise TensorOptError(
                f"{options.dir} holds {len(inside)} explorations; add --devices auto for the fewest devices "
                "that will do, --devices N, or --profile for a table of all"
            )
        return load_exploration(inside[0] if inside else options.dir)
    family = load_family(options.dir)
    if options.devices == "auto":
        return family[-1] if options.knee else fewest_devices(family, memory, time_s)
    if not options.devices.isdecimal():
        raise TensorOptError(f"--devices '{options.devices}' is neither auto nor a number")
    return member(family, int(options.devices))


def show(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan import load_exploration
    from tensoropt.report.detail import detail
    from tensoropt.report.explain import detail_lines
    from tensoropt.report.table import point_lines
    from tensoropt.report.trace import write_trace

    memory = parse_bytes(options.memory) if options.memory is not None else None
    time_s = parse_seconds(options.time) if options.time is not None else None
    if options.top < 1:
        raise TensorOptError(f"--top {options.top} lists nothing; give at least 1")
    found = load_exploration(options.dir)
    index = options.point
    if index is None:
        index = found.index(memory_bytes=memory, time_s=time_s, knee_point=options.knee)
    told = detail(found, index)
    lines = [*point_lines(found, index), "", *detail_lines(told, options.top)]
    if options.trace:
        write_trace(told.trace(), options.trace)
        lines.append(
            f"trace written to {options.trace}; open it at https://ui.perfetto.dev or chrome://tracing"
        )
    return {**told.to_dict(), "headline": told.headline(), "trace": options.trace}, "\n".join(lines), 0


def recost(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan import load_exploration

    before = load_exploration(options.dir)
    from tensoropt import api
    from tensoropt.report.explain import recosted_lines
    from tensoropt.report.table import comparison_text, frontier_text, points_data, summary_lines

    with writable_folder(options.out) as folder:
        found, again = api.recost(
            before, cluster=options.cluster, progress=progress, planners=options.planners or ()
        )
        found.save(folder)
    data = {
        "out": str(folder),
        "points": points_data(found),
        "report": dict(found.report),
        "same_strategies": [vars(point) for point in again],
    }
    text = "\n".join(
        [frontier_text(found), "", *summary_lines(found), *recosted_lines(before, found, again),
         *([comparison_text(found)] if found.comparison else []), f"saved: {folder}"]
    )  # fmt: skip
    return data, text, 0


def export(options: argparse.Namespace, progress: Progress) -> Answer:
    from tensoropt.plan import load_exploration
    from tensoropt.plan.export import write_frontier_csv, write_strategies_csv

    found = load_exploration(options.dir)
    write_frontier_csv(found, options.csv)
    lines = [f"{len(found.points)} points written to {options.csv}"]
    if options.strategies:
        write_strategies_csv(found, options.strategies)
        lines.append(f"their strategies written to {options.strategies}")
    data = {"points": len(found.points), "csv": options.csv, "strategies": options.strategies}
    return data, "\n".join(lines), 0
