"""The verb ``choose``, which describes a point of a saved frontier and writes it as a plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tensoropt.cli.arguments import Answer, Verb, add_amount, add_headroom, amount_option, tariff_option
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.files import write_text
from tensoropt.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from tensoropt.exploration.exploration import Exploration


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("dir", metavar="DIR", help="the folder given to explore --out")
    verb.add_argument(
        "--devices",
        metavar="auto|N",
        help="in a folder made with explore --devices: plans for N devices, or for the fewest that fit one",
    )
    verb.add_argument(
        "--batch",
        metavar="auto|N",
        help="in a folder made with explore --batch: plans at batch N, or at the one with most samples/s",
    )
    add_headroom(verb)
    which = verb.add_mutually_exclusive_group()
    which.add_argument(
        "--point",
        type=WHOLE,
        metavar="N",
        help="the point's number, from 1; plans of other planners follow the frontier's; default: the "
        "recommended plan",
    )
    which.add_argument(
        "--memory", metavar="24GiB", help="the recommended plan that needs at most this much per device"
    )
    which.add_argument(
        "--time", metavar="0.5", help="the leanest plan within this time per step (seconds, or 500ms)"
    )
    which.add_argument("--knee", action="store_true", help="the point where saving memory or time costs most")
    verb.add_argument(
        "--fastest", action="store_true", help="the fastest that fits, not the simplest within 3 %% of it"
    )
    verb.add_argument(
        "--why",
        action="store_true",
        help="also the parts of the step and of its peak memory, and changes that would make it faster",
    )
    verb.add_argument("--trace", metavar="FILE", help="write the step's timeline for ui.perfetto.dev")
    verb.add_argument("--out", metavar="plan.json", help="where to write the plan")
    add_amount(verb)


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    memory = parse_bytes(options.memory) if options.memory is not None else None
    from tensoropt.exploration.answer import answer as answer_within
    from tensoropt.exploration.figure_rows import points_data
    from tensoropt.plan.keys import plan_key
    from tensoropt.report.commands import run_ways
    from tensoropt.saved import chosen_point

    exploration, index = chosen_point(
        options.dir,
        point=options.point,
        devices=options.devices,
        batch=options.batch,
        memory_bytes=memory,
        headroom=options.headroom,
        time_s=parse_seconds(options.time) if options.time is not None else None,
        knee_point=options.knee,
        fastest=options.fastest,
    )
    plan = exploration.plan(index)
    lines, facts = _described(options, exploration, index, memory)
    within = answer_within(exploration, memory, options.headroom)
    chosen = within.chosen if within.row == index and options.point is None else None
    lines = [within.sentence(), *([] if chosen is None else [f"taken as {chosen.rule}"]), "", *lines]
    if options.why or options.trace:
        reasons, more = _reasons(exploration, index, options)
        lines += ["", *reasons]
        facts |= more
    if options.out:
        plan.save(options.out)
        ways = run_ways(exploration.cluster, plan.devices, options.out)
        lines += [f"saved: {options.out}", *(f"{way.title}: {way.line}" for way in ways)]
    else:
        lines.append("not saved; give --out plan.json to keep it")
    data = {
        **points_data(exploration, [index])[0],
        "key": plan_key(plan),
        **facts,
        "answer": within.to_data(),
        "out": options.out,
        "plan": plan.to_data(),
    }
    return Answer(data, "\n".join(lines))


def _described(
    options: argparse.Namespace, exploration: Exploration, index: int, memory_bytes: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Return lines of text on a point, on time and cost of a training, and on runs of its plan; and the same
    as data with the keys ``rates``, ``fit``, ``range`` and ``verified``."""
    from tensoropt.exploration.facts import rate_facts
    from tensoropt.exploration.figure_rows import FigureRow, rates_data
    from tensoropt.exploration.rates import kinds_of
    from tensoropt.exploration.time_range import range_of
    from tensoropt.exploration.verified import load_verified
    from tensoropt.plan.facts_table import Fact, fact_lines
    from tensoropt.report.ran import ran_words
    from tensoropt.report.table import point_lines

    amount, tariff = amount_option(options), tariff_option(options)
    tariff.check(kinds_of(exploration))
    row = FigureRow.of(exploration, index, tariff)
    budget = exploration.settings.get("memory_bytes") if memory_bytes is None else memory_bytes
    spread = range_of(exploration, index)
    ran = [run for run in load_verified(options.dir) if run.is_of(exploration, index)]
    words = [Fact("measured", f"{ran_words(r, exploration.cluster)} ({r.checked_on})") for r in ran]
    data = {
        "rates": rates_data(row, amount),
        "fit": exploration.fit(index, budget).to_data(),
        "range": None if spread is None else {"words": spread.words, **asdict(spread)},
        "verified": [asdict(run) for run in ran],
    }
    return [*point_lines(row), *fact_lines([*words, *rate_facts(row, amount)])], data


def _reasons(
    exploration: Exploration, index: int, options: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    from tensoropt.report.detail import detail
    from tensoropt.report.explain import why_lines
    from tensoropt.report.faster import what_is_faster
    from tensoropt.report.owners import point_owners

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
        write_text(options.trace, json.dumps(of_point.trace()) + "\n")
        lines.append(f"trace written to {options.trace}; open it at https://ui.perfetto.dev")
    return lines, data


VERB = Verb("choose", "turn a point of a saved frontier into a plan", _add_arguments, _answer)
