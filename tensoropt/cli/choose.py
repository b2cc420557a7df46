"""``choose``: a point of a saved frontier as a plan."""

from __future__ import annotations

import argparse

from tensoropt.cli.arguments import (
    Answer,
    Verb,
    add_amount,
    add_folder,
    add_headroom,
    add_point,
    amount_option,
    budget,
    limits,
    tariff_option,
    told_point,
)
from tensoropt.cli.shop import offers_answer
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError


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
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--profile", action="store_true", help="the table devices x memory -> time, no plan, like shop"
    )
    add_point(which, default="")
    verb.add_argument("--out", metavar="plan.json", help="where to write the plan")
    add_amount(verb)


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the chosen point, and save its plan if requested."""
    if options.headroom is not None and options.memory is None:
        raise TensorOptError("--headroom says what a budget leaves free; give --memory with it")
    if options.profile:
        from tensoropt.exploration.rates import THOUSAND_STEPS

        wanted = {"amount": amount_option(options) or THOUSAND_STEPS, "tariff": tariff_option(options)}
        return offers_answer(options.dir, wanted)
    wanted = limits(options)
    wanted["memory_bytes"] = budget(options, lambda: _device_bytes(options.dir))
    from tensoropt.exploration.answer import answer as answer_within
    from tensoropt.exploration.figure_rows import points_data
    from tensoropt.exploration.rates import for_gpus
    from tensoropt.report.table import run_line
    from tensoropt.saved import chosen_point

    exploration, index = chosen_point(
        options.dir, point=options.point, devices=options.devices, batch=options.batch, **wanted
    )
    plan = exploration.plan(index)
    lines, told = told_point(options, exploration, index)
    within = answer_within(exploration, wanted["memory_bytes"])
    lines = [within.sentence(), "", *lines]
    if options.out:
        plan.save(options.out)
        gpus = for_gpus(exploration.cluster)
        how = "run it on CPU ranks" if gpus else "run it"
        lines.append(f"saved: {options.out}; {how}: {run_line(plan.devices, options.out, gpus=gpus)}")
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


def _device_bytes(folder: str) -> float:
    """Return the memory of the smallest device of the explored cluster, or of a part of it."""
    from tensoropt.cluster import Cluster
    from tensoropt.exploration.cluster_offers import folders_in
    from tensoropt.exploration.exploration import load_exploration

    inside = list(folders_in(folder))
    exploration = load_exploration(inside[0] if inside else folder)
    return Cluster.from_dict(exploration.cluster).memory_bytes


VERB = Verb("choose", "turn a point of a saved frontier into a plan", add_arguments, answer)
