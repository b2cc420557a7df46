"""The planners that every exploration runs beside its search, and the conditions for each.

Placed plans and pipelines are not in the space of the sharded search, so they can beat its frontier. Sharded
plans can beat it only if the search allowed a gap. The common *sharded* planners always run. *Placing*
planners run where a placed plan can be best (branches that can run in parallel, devices of several kinds, CPU
ranks), for a share of the exploration's time. *Pipelined* planners run on small models only; for larger ones
there is the search for pipelines (``--pipelines``).
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.plan.plan_names import HEURISTICS
from tensoropt.planners.registry import ENTRIES, Entry

SHARDED = ("data_parallel", "zero", "megatron")
_PLACED = (*HEURISTICS, "local_search")
_FEW_PLACED = ("placer", "os_dpos")
_CUTTING = ("cut_search",)
_PIPELINED = ("gpipe", "pipedream_1f1b", "dapple", "alpa", "galvatron")

BASELINES = (*SHARDED, *HEURISTICS, "gpipe", "pipedream_1f1b")
"""The planners that people would use by hand. The best plan of each is kept even if other points beat it."""

MOST_OPERATORS, MOST_PAIRS = 1_500, 12_000
"""The numbers of operators, and of operators times devices, up to which placing planners are quick. Each runs
for every micro-batch count and takes about a second for 1,000 operators on four devices. Assumptions."""
_MOST_PIECES = 1_000
"""The number of operators times devices up to which a planner that cuts operators is quick; an assumption."""
_SECONDS = {"local_search": 1.0, "cut_search": 1.0}
"""The effort of slower planners, in seconds; an assumption about how long a person waits."""
_FEW_GROUPS = 64
"""The most operators of a model for which pipelined planners and ``_FEW_PLACED`` are quick: with twice as
many, each pipelined planner takes seconds."""
_PARALLEL = 1.5
"""On equal GPUs, placing planners run if a model's FLOP are at least this multiple of those of its longest
chain of operators. The ratio is 1.0 to 1.4 for models of one stack (with parallel projections), and 1.6 to 3
for Inception-v3, AmoebaNet-D and two towers."""
MOST_LIMITS = 5
"""The most frontier points within whose memory heuristics are run; an assumption."""
SHARE, LEAST_S = 0.1, 3.0
"""The share of an exploration's time that placing planners may take, and the seconds that they may always
take; assumptions about how long a person waits."""


def quick_planners(operators: int, devices: int) -> tuple[Entry, ...]:
    """Return the planners that are quick for these numbers of operators and devices, in running order."""
    names = [*SHARDED, *_PLACED]
    if operators <= _FEW_GROUPS:
        names += [*_FEW_PLACED, *_PIPELINED]
    if operators * devices <= _MOST_PIECES:
        names += _CUTTING
    options = {name: {"seconds": seconds} for name, seconds in _SECONDS.items()}
    return tuple(replace(ENTRIES[name], options=options.get(name, {})) for name in names)


def placed_refusal(wanted: str, operators: int, devices: int, parallelism: float | None = None) -> str:
    """Return the reason why placing planners are not tried, or "" if they are.

    Args:
        wanted: ``auto``, ``always`` or ``never``, as in the settings.
        operators: the number of operators to place.
        parallelism: the model's FLOP, divided by that of its longest chain of operators; None if placed plans
            can be best at any ratio.
    """
    if wanted == "never":
        return "--placements never"
    if devices < 2:
        return "there is one device"
    if wanted == "always":
        return ""
    if parallelism is not None and parallelism < _PARALLEL:
        return (
            f"on equal GPUs placed plans gain from branches, and the model's FLOP are {parallelism:.1f} "
            f"times those of its longest chain of operators (tried from {_PARALLEL:g} times on); "
            "--placements always tries placed plans"
        )
    if operators <= MOST_OPERATORS and operators * devices <= MOST_PAIRS:
        return ""
    return (
        f"{operators:,} operators on {devices:,} devices are more than is placed quickly (at most "
        f"{MOST_OPERATORS:,} operators, and {MOST_PAIRS:,} operators times devices); --placements always "
        "tries placed plans"
    )
