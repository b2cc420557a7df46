"""Planners that every exploration runs beside its search, and when a model calls for them.

The search is over one configuration per operator on all devices. Published plans outside of this space can
lie below its frontier: those with a device for each operator, and those with stages. Sharded plans inside of
it can, too, if a gap was allowed or the simulator prefers what the sums do not. This module says which
planners are tried; :mod:`tensoropt.session.quick_plans` decides which plans are taken in.

*Sharded* planners are always tried. *Placing* ones are tried if they are quick, whatever the model's shape:
they win on large models because of branches, and even on chains of small operators, which run faster on one
device after the other because they wait for fewer messages. *Pipelined* ones are tried on small models, for
which all of them together take about a second; larger models have the search for pipelines (``--pipelines``).
"""

from __future__ import annotations

SHARDED = ("data_parallel", "zero", "megatron")
PLACED = ("m_topo", "m_etf", "m_sct", "dpos")
PIPELINED = ("gpipe", "pipedream_1f1b", "dapple", "alpa", "galvatron")

MOST_OPERATORS, MOST_PAIRS = 1_500, 12_000
"""The numbers of operators, and of operators times devices, up to which placing planners are quick: each runs
for every micro-batch count, and takes about a second for a thousand operators on four devices.
Assumptions."""
FEW_GROUPS = 64
"""The number of a model's operators up to which pipelined planners are quick: with twice as many, each takes
seconds."""


def placed_refusal(wanted: str, operators: int, devices: int) -> str:
    """Return why placing planners are not tried; "" if they are.

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
