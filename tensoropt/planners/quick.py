"""The planners that every exploration runs beside its search, and the models for which it runs them.

The search is over one configuration per operator on all devices. Published plans outside of this space can
lie below its frontier: those with a device for each operator, and those with stages. Sharded plans inside of
it can, too, if a gap was allowed or the simulator prefers what the sums do not. This module says which
planners are tried; :mod:`tensoropt.session.quick_plans` decides which plans are taken in.

*Sharded* ones are always tried. *Placing* ones are tried where they are quick, whatever the model's shape:
branches are why they win on large models, and waiting for messages is why even chains of small operators do
better on one device after the other. On small models more of both kinds are quick. *Pipelined* ones are
tried on small models, on which all of them together take about a second; on larger ones the search for
pipelines is there (``--pipelines``).
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.plan.plan_names import HEURISTICS
from tensoropt.planners.registry import ENTRIES, Entry

SHARDED = ("data_parallel", "zero", "megatron")
PLACED = (*HEURISTICS, "local_search")
MORE_SHARDED = ("tofu",)
FEW_SHARDED = ("optcnn",)
FEW_PLACED = ("placer", "os_dpos")
CUTTING = ("cut_search",)
PIPELINED = ("gpipe", "pipedream_1f1b", "dapple", "alpa", "galvatron")

BASELINES = (*SHARDED, *HEURISTICS, "gpipe", "pipedream_1f1b")
"""What people do by hand, and what they would run first: its plans stay beside the points that beat them."""

MOST_OPERATORS, MOST_PAIRS = 1_500, 12_000
"""The numbers of operators, and of operators times devices, up to which placing planners are quick: each runs
for every micro-batch count, and takes about a second for a thousand operators on four devices.
Assumptions."""
MOST_PIECES = 1_000
"""The number of operators times devices up to which one that cuts all of them into pieces is quick; an
assumption."""
SECONDS = {"local_search": 2.0, "cut_search": 2.0}
"""The effort of planners that would take longer; an assumption about how long a person waits for what they
find."""
FEW_GROUPS = 64
"""The most operators of a model up to which pipelined planners, and those in ``FEW_...``, are quick: of
pipelined ones each takes seconds with twice as many.
"""
MORE_GROUPS = 400
"""The same for those in ``MORE_...``; an assumption."""
MOST_PLACINGS = 50_000
"""The number of operators times points up to which heuristics run within the memory of every point: about ten
seconds on four devices. An assumption."""


def quick_planners(operators: int, devices: int) -> tuple[Entry, ...]:
    """Return the planners that are quick for a model of ``operators`` operators on so many devices, in the
    order in which they run.
    """
    names: tuple[str, ...]
    if operators > MORE_GROUPS:
        names = (*SHARDED, *PLACED)
    elif operators > FEW_GROUPS:
        names = (*SHARDED, *MORE_SHARDED, *PLACED)
    else:
        names = (*SHARDED, *MORE_SHARDED, *FEW_SHARDED, *PLACED, *FEW_PLACED, *PIPELINED)
    if operators * devices <= MOST_PIECES:
        names = (*names, *CUTTING)
    options = {name: {"seconds": seconds} for name, seconds in SECONDS.items()}
    return tuple(replace(ENTRIES[name], options=options.get(name, {})) for name in names)


def placed_refusal(wanted: str, operators: int, devices: int) -> str:
    """Return the reason why placing planners are not tried; "" if they are.

    Args:
        wanted: ``auto``, ``always`` or ``never``, as in the settings.
        operators: the number of groups of the model's operators to place.
    """
    if wanted == "never":
        return "--placements never"
    if devices < 2:
        return "there is one device"
    if wanted == "always" or (operators <= MOST_OPERATORS and operators * devices <= MOST_PAIRS):
        return ""
    return (
        f"{operators:,} operators on {devices:,} devices are more than is placed quickly (at most "
        f"{MOST_OPERATORS:,} operators, and {MOST_PAIRS:,} operators times devices); --placements always "
        "tries them"
    )
