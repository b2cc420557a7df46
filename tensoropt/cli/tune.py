"""The verb ``tune``, which runs plans on this machine, times their steps, and keeps the fastest."""

from __future__ import annotations

import argparse
import shlex

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay
from tensoropt.units import format_seconds, parse_bytes


def _add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("target", metavar="DIR|PLAN", help="an exploration's folder, or a plan file in one")
    verb.add_argument("--point", type=WHOLE, metavar="N", help="begin with point N; default: the fastest")
    verb.add_argument("--memory", metavar="24GiB", help="the most memory that a plan may need per device")
    verb.add_argument("--rounds", type=WHOLE, default=4, metavar="N", help="candidates; default: %(default)s")
    verb.add_argument(
        "--job", metavar="COMMAND", help="time your own training: a command with {plan} where its plan goes"
    )


def _answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    from tensoropt.plan.keys import plan_key
    from tensoropt.tuning.tune import PLAN, tune

    found = tune(
        options.target,
        point=options.point,
        memory_bytes=None if options.memory is None else parse_bytes(options.memory),
        rounds=options.rounds,
        job=shlex.split(options.job) if options.job else (),
        progress=progress,
        say=progress.note,
    )
    tried = len(found.tried) - 1
    text = (
        f"{format_seconds(found.measured_s)} per step as measured, {format_seconds(found.begun_s)} before "
        f"tuning; {tried} other plan{'' if tried == 1 else 's'} tried. Its prediction is off by "
        f"{found.drift:.1%} ({abs(found.begun_predicted_s / found.begun_s - 1):.1%} before). Tuning ended "
        f"because {found.done}.\n"
        f"The best plan is saved as {PLAN} in the exploration's folder."
    )
    return Answer({**found.to_dict(), "plan": plan_key(found.plan), "drift": found.drift}, text)


VERB = Verb("tune", "run a plan here, time its steps, and look for a faster one", _add_arguments, _answer)
