"""The recommended plan: the simplest that takes at most 3 % longer than the fastest plan that fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import JOIN, exceptions
from tensoropt.units import share_words

_WITHIN = 0.03
"""The share by which a simpler plan may take longer than the fastest, below the error of predictions."""
_FOR_A_CONFIG = re.compile(
    r"one device|(DP|ZeRO-\d|TP|CP|EP) ?[\d×]*( \+ SP)?( \((ring|Ulysses)\))?|PP .*|\d+ micro-batches"
    r"|.* recomputed(?!.*in part).*"
)
"""The parts of a plan's name that apply to all operators alike, such as degrees and stages."""
_KINDS = ("DP", "ZeRO", "TP", "SP", "CP", "EP", "PP", "placed", "other")
"""The kinds of parallelism, by the words in a plan's name."""


class Recommendation(NamedTuple):
    """The recommended plan and the fastest plan that fits.

    Attributes:
        row, fastest: the indices of the two plans in :attr:`Findings.all_points`.
    """

    row: int
    fastest: int

    @property
    def rule(self) -> str:
        """The reason why the plan is recommended, in words."""
        near = f"within {share_words(_WITHIN)} of"
        if self.row == self.fastest:
            return f"the fastest plan that fits; none {near} it is simpler"
        return f"the simplest plan {near} the fastest that fits"


def recommended(
    findings: Findings, limit_bytes: float, rows: Sequence[int] | np.ndarray | None = None
) -> Recommendation | None:
    """Return the simplest plan that fits and takes at most 3 % longer than the fastest one; None if none
    fits.

    Simplicity compares, in this order: whether a launcher's config can express the plan, its number of kinds
    of parallelism, the share of time in operators that are split otherwise than the plan's name says,
    micro-batches, step time.

    Args:
        limit_bytes: the most memory in bytes that a plan may need on a device.
        rows: indices of the points to consider; by default all, including those of other planners.
    """
    needs, times = findings.needs, findings.all_points.time
    asked = np.arange(len(needs)) if rows is None else np.asarray(rows, dtype=int)
    fitting = asked[needs[asked] <= limit_bytes]
    if not len(fitting):
        return None
    # Of equals, the leanest.
    fastest = int(fitting[np.lexsort((needs[fitting], times[fitting]))[0]])
    near = fitting[times[fitting] <= times[fastest] * (1 + _WITHIN)].tolist()

    points = [findings.all_points[row] for row in near]
    shares = dict(zip(near, exceptions(points, findings.spaces, findings.weights).tolist(), strict=True))

    def complexity(row: int) -> tuple[float, ...]:
        name, space = findings.names[row], findings.spaces[findings.all_points[row].space]
        simple = not a_config_says(name), kinds_of(name), shares[row], space.micro_batches
        return *simple, float(times[row]), float(needs[row])

    return Recommendation(min(near, key=complexity), fastest)


def a_config_says(name: str) -> bool:
    """Return whether a launcher's config can express the plan with this name, as all operators are split
    alike and only whole blocks are recomputed."""
    return all(_FOR_A_CONFIG.fullmatch(part) for part in name.split(JOIN))


def kinds_of(name: str) -> int:
    """Return the number of kinds of parallelism (DP, ZeRO, TP, ...) in a plan's name."""
    words = set(re.findall(r"[A-Za-z]+", name))
    return sum(kind in words for kind in _KINDS)
