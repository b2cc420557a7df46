"""``show``: why a point of a saved frontier costs what it costs."""

from __future__ import annotations

import argparse

from tensoropt.cli.amounts import add_amount, amount_option, tariff_option
from tensoropt.cli.arguments import add_folder, limits, point_option
from tensoropt.cli.verb import Answer, Verb
from tensoropt.console import ProgressDisplay
from tensoropt.errors import TensorOptError
from tensoropt.units import parse_seconds


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_folder(verb)
    point = verb.add_mutually_exclusive_group()
    point.add_argument("--point", type=int, metavar="N", help="its number, from 1; default: the fastest")
    point.add_argument("--memory", metavar="24GiB", help="the fastest within this much per device")
    point.add_argument("--time", metavar="0.5", help="the leanest within this time per step (seconds, 500ms)")
    point.add_argument("--knee", action="store_true", help="the point from which both directions cost most")
    verb.add_argument(
        "--trace", metavar="FILE", help="write its timeline for ui.perfetto.dev, chrome://tracing"
    )
    verb.add_argument(
        "--owners",
        nargs="?",
        const="",
        metavar="AT",
        help="whose the memory is at AT of the step (seconds, 350ms); without AT at its peak",
    )
    verb.add_argument(
        "--beside",
        metavar="FILE",
        help="measured beside it: a CUDA memory snapshot, a trace of torch.profiler or verified.json",
    )
    verb.add_argument(
        "--align",
        metavar="STEP",
        help="what of that file is the step: ProfilerStep#N, peak (both peaks at one moment) or whole",
    )
    verb.add_argument(
        "--top", type=int, default=10, metavar="N", help="operators and edges listed; default: %(default)s"
    )
    add_amount(verb)


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """The detail of one point."""
    wanted = limits(options)
    at_s = parse_seconds(options.owners) if options.owners else None
    if options.align is not None and options.beside is None:
        raise TensorOptError(f"--align {options.align} is about a measured file; give it with --beside FILE")
    if options.top < 1:
        raise TensorOptError(f"--top {options.top} lists nothing; give at least 1")
    amount, tariff = amount_option(options), tariff_option(options)
    from tensoropt.observed.files import read_observation
    from tensoropt.plan.facts import rate_facts
    from tensoropt.plan.facts_table import fact_lines
    from tensoropt.plan.figure_rows import FigureRow, rates_data
    from tensoropt.plan.rates import kinds_of
    from tensoropt.report.beside import beside
    from tensoropt.report.explain import detail_lines
    from tensoropt.report.owners import point_owners
    from tensoropt.report.table import point_lines
    from tensoropt.report.trace import write_trace
    from tensoropt.saved import opened, show

    found = opened(options.dir)
    told = show(found, point_option(options, found), **wanted)
    summed = found.all_points[told.point].carried is None
    tariff.check(kinds_of(found))
    row = FigureRow.of(found, told.point, tariff)
    lines = [
        *point_lines(row),
        *fact_lines(rate_facts(row, amount)),
        "",
        *detail_lines(told, options.top, summed=summed),
    ]
    if options.trace:
        write_trace(told.trace(), options.trace)
        lines.append(
            f"trace written to {options.trace}; open it at https://ui.perfetto.dev or chrome://tracing"
        )
    owned = None
    if options.owners is not None:
        of_point = point_owners(found, told.point)
        owned = of_point.at(None if at_s is None else of_point.number_at(at_s))
        lines += ["", *owned.lines(options.top), *([of_point.note] if of_point.note else [])]
    measured = None
    if options.beside is not None:
        measured = beside(found, told, read_observation(options.beside), options.align)
        lines += ["", *measured.lines()]
    data = {**told.to_dict(), "point": told.point + 1, "headline": told.headline(), "trace": options.trace}
    if measured is not None:
        data["beside"] = measured.to_dict()
    if owned is not None:
        data["owners"] = owned.to_dict()
    data["rates"] = rates_data(row, amount)
    return Answer(data, "\n".join(lines))


VERB = Verb("show", "say why a point of a saved frontier costs what it costs", add_arguments, answer)
