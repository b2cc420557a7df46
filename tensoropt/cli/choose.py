"""``choose``: a point of a saved frontier as a plan."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tensoropt.cli.arguments import (
    Answer,
    Verb,
    add_amount,
    add_folder,
    add_headroom,
    add_point,
    headroom_option,
    limits,
    told_point,
)
from tensoropt.console import ProgressDisplay

if TYPE_CHECKING:
    from tensoropt.exploration.exploration import Exploration

BASELINES = ("ddp", "zero1", "zero2", "fsdp", "tp")
"""The plans that people make by hand, as the option calls them; without the package that knows them, so that
``--help`` stays quick."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_folder(verb)
    verb.add_argument(
        "--devices",
        metavar="auto|N",
        help="in a folder made with explore --devices: plans for N devices, or for the fewest that will do",
    )
    verb.add_argument(
        "--batch",
        metavar="auto|N",
        help="in a folder made with explore --batch: plans at batch N, or at the one with most samples/s",
    )
    add_headroom(verb)
    add_point(verb.add_mutually_exclusive_group())
    verb.add_argument(
        "--fastest", action="store_true", help="the fastest that fits, not the simplest within 3 %% of it"
    )
    verb.add_argument(
        "--baseline",
        choices=[*BASELINES],
        help="the plan that people make by hand, in its best form: with and without recomputation and "
        "micro-batches",
    )
    verb.add_argument(
        "--why",
        action="store_true",
        help="also what the step and the memory at its peak go into, and what would make it faster",
    )
    verb.add_argument("--trace", metavar="FILE", help="write the step's timeline for ui.perfetto.dev")
    verb.add_argument("--out", metavar="plan.json", help="where to write the plan")
    add_amount(verb)


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the chosen point, and save its plan if requested."""
    wanted = limits(options)
    wanted["headroom"] = headroom_option(options, lambda: _device_bytes(options.dir))
    wanted["fastest"] = options.fastest
    from tensoropt.exploration.answer import answer as answer_within
    from tensoropt.exploration.figure_rows import points_data
    from tensoropt.report.commands import run_ways
    from tensoropt.saved import chosen_point

    exploration, index = chosen_point(
        options.dir,
        point=options.point,
        baseline=options.baseline,
        devices=options.devices,
        batch=options.batch,
        **wanted,
    )
    plan = exploration.plan(index)
    lines, told = told_point(options, exploration, index)
    within = answer_within(exploration, wanted["memory_bytes"], wanted["headroom"])
    taken = within.taken_words() if within.row == index and options.point is None else ""
    lines = [within.sentence(), *([taken] if taken else []), "", *lines]
    if options.why or options.trace:
        reasons, more = _reasons(exploration, index, options)
        lines += ["", *reasons]
        told |= more
    if options.out:
        plan.save(options.out)
        ways = run_ways(exploration.cluster, plan.devices, options.out)
        lines += [f"saved: {options.out}", *(f"{way.title}: {way.line}" for way in ways)]
    else:
        lines.append("not saved; give --out plan.json to keep it")
    data = {
        **points_data(exploration, [index])[0],
        **told,
        "answer": within.to_data(),
        "out": options.out,
        "plan": plan.to_data(),
    }
    return Answer(data, "\n".join(lines))


def _reasons(
    exploration: Exploration, index: int, options: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    from tensoropt.report.detail import detail
    from tensoropt.report.explain import why_lines
    from tensoropt.report.faster import what_is_faster
    from tensoropt.report.owners import point_owners
    from tensoropt.report.step_parts import write_trace

    of_point = detail(exploration, index)
    lines: list[str] = []
    data: dict[str, Any] = {}
    if options.why:
        owners, faster = point_owners(exploration, index), what_is_faster(exploration, index)
        lines += why_lines(of_point, owners, faster)
        data["why"] = {
            **of_point.to_dict(),
            "headline": of_point.headline(),
            "owners": owners.at().to_dict(),
            "faster": [asdict(one) for one in faster],
        }
    if options.trace:
        write_trace(of_point.trace(), options.trace)
        lines.append(f"trace written to {options.trace}; open it at https://ui.perfetto.dev")
    return lines, data


def _device_bytes(folder: str) -> float:
    from tensoropt.exploration.cluster_offers import folders_in
    from tensoropt.exploration.exploration import load_exploration

    inside = list(folders_in(folder))
    return load_exploration(inside[0] if inside else folder).device_bytes


VERB = Verb("choose", "turn a point of a saved frontier into a plan", add_arguments, answer)
