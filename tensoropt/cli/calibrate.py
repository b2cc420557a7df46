"""``calibrate``: real steps of this machine, and what they say of its prices."""

from __future__ import annotations

import argparse
from typing import Any

from tensoropt.cli.arguments import Answer, Verb
from tensoropt.console import WHOLE, ProgressDisplay, columns
from tensoropt.units import format_seconds


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    verb.add_argument("--cluster", default="local", help="local, local:N or cpu:N; default: %(default)s")
    verb.add_argument(
        "--plans", type=WHOLE, default=6, metavar="N", help="of each model; default: %(default)s"
    )
    verb.add_argument("--again", action="store_true", help="run again what is known already")


def answer(options: argparse.Namespace, progress: ProgressDisplay) -> Answer:
    """Return the residuals of this machine, and how far predictions with them are off."""
    from tensoropt.calibration.calibrate import calibrate

    found = calibrate(options.cluster, plans=options.plans, again=options.again, progress=progress)
    residuals = found.residuals
    data: dict[str, Any] = {
        "cluster": found.cluster,
        "terms": dict(residuals.terms),
        "interval": [residuals.low, residuals.high],
        "holds": residuals.holds,
        "error": residuals.error,
        "raw_error": residuals.raw_error,
        "error_90th": residuals.worst,
        "plans": residuals.steps,
        "disturbed": residuals.disturbed,
        "models": list(residuals.models),
    }
    return Answer(data, _text(data))


def _text(data: dict[str, Any]) -> str:
    from tensoropt.costs.residuals import SECONDS

    low, high = data["interval"]
    rows = [["what", "in a step"]]
    for term, value in sorted(data["terms"].items()):
        rows.append([term, f"+ {format_seconds(value)}" if term in SECONDS else f"{value:.2f} x"])
    return "\n".join(
        (
            f"{data['cluster']} is calibrated: steps of models that the fit did not see are off by "
            f"{data['error']:.1%} in the median and {data['error_90th']:.1%} in the worst tenth "
            f"({data['raw_error']:.1%} before); {data['holds']:.0%} take {low:.2f} to {high:.2f} times what "
            "is predicted.",
            "",
            columns(rows),
            "",
            f"from {data['plans']} plans of {len(data['models'])} models",
            *(
                [
                    f"{data['disturbed']} of them ran while other programs used the machine, whose "
                    "collectives then wait: run this again while it is idle, and they are run once more"
                ]
                if data["disturbed"]
                else []
            ),
        )
    )


VERB = Verb(
    "calibrate",
    "run short real steps here, so that times are predicted as they happen",
    add_arguments,
    answer,
)
