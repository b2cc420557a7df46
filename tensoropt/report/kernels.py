"""What the seconds of a group of operators go into, by class of call, and what would fuse a chain of them.

A group is timed as one piece of work: a product, and the functions behind it that follow its split. Its
seconds are divided by what its calls weigh (:mod:`tensoropt.plan.shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensoropt.graph.ir import Operator
from tensoropt.ops.calls import CostClass
from tensoropt.ops.overloads import packet_of
from tensoropt.ops.registry import cost_class_of, launches
from tensoropt.plan.shares import Weights

_FEWEST_OF_A_CHAIN = 3
"""From how many element-wise kernels on it is said what would fuse them."""
_COMPILE = "torch.compile"
_FUNCTIONS = (
    ({"tanh", "pow"}, "GELU", f"F.gelu(approximate='tanh') or {_COMPILE}"),
    ({"erf"}, "GELU", f"F.gelu or {_COMPILE}"),
    ({"rsqrt", "mean"}, "RMS norm", f"F.rms_norm or {_COMPILE}"),
)
"""Functions that models write out, by calls that only they have, and what takes their place."""


@dataclass(frozen=True)
class Kernels:
    """The calls of one class in a group.

    Attributes:
        title: ``matrix product``, or what a chain of element-wise calls computes: ``GELU``.
        count: how many calls of one group launch a kernel.
        share: their share of the group's seconds.
        remedy: what would make one kernel of them; "" if nothing would.
    """

    title: str
    count: int
    share: float
    remedy: str = ""

    @property
    def words(self) -> str:
        """The title, with the number of kernels of a chain: ``GELU (9 unfused kernels)``."""
        return f"{self.title} ({self.count} unfused kernels)" if self.remedy else self.title


def kernels_of(operators: Iterable[Operator], weights: Weights) -> tuple[Kernels, ...]:
    """Return the classes of a group's calls, the longest first; none where all are of one class and nothing
    could be fused, or where the calls' weights are unknown."""
    by_class: dict[CostClass, list[Operator]] = {}
    for op in operators:
        if launches(op.target):
            by_class.setdefault(cost_class_of(op.target) or CostClass.ELEMENT_WISE, []).append(op)
    seconds = {cls: sum(weights.seconds.get(op.name, 0.0) for op in own) for cls, own in by_class.items()}
    total = sum(seconds.values())
    if not total:
        return ()
    found = [_kernels(cls, own, seconds[cls] / total) for cls, own in by_class.items()]
    if len(found) == 1 and not found[0].remedy:
        return ()
    return tuple(sorted(found, key=lambda kernels: -kernels.share))


def _kernels(cls: CostClass, calls: Sequence[Operator], share: float) -> Kernels:
    if cls is not CostClass.ELEMENT_WISE or len(calls) < _FEWEST_OF_A_CHAIN:
        return Kernels(cls.value, len(calls), share)
    called = {packet_of(op.target) for op in calls}
    for marks, title, remedy in _FUNCTIONS:
        if marks <= called:
            return Kernels(title, len(calls), share, remedy)
    return Kernels(cls.value, len(calls), share, _COMPILE)
