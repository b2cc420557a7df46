"""The findings about a strategy: the one form in which real ranks and fake ones report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.verify.tolerances import Differences


@dataclass(frozen=True)
class RunFindings:
    """The results of running a strategy; None stands for what was not checked.

    Attributes:
        differences: the differences from the unsplit model.
        worst_gradient, worst_parameter: the names of the largest difference of each kind; "" if there is
            none.
        not_finite: how many values of the unsplit model itself are NaN or infinite, by what they belong to.
        replicas_agree: whether ranks with the same shard have the same bits, or on GPUs nearly the same
            values.
        replica_difference: how far they are apart, relative; None if bits differ and decide.
        unsplit_on: the device that the unsplit model ran on.
        numerics_ok: whether differences are rounding and replicas agree.
        compared_in: the precision in which ``differences`` were taken.
        narrow: the differences in the model's own precision, if the decision took double precision.
        collectives_issued: as :func:`tensoropt.verify.recorder.summarise` writes them; those of the first
            rank if
            all run the same program, otherwise of all ranks.
        issued_order: for that first rank, the row in ``collectives_issued`` of each collective in the order
            of issue; None if ranks run different programs.
        collectives_of_ranks: the same for each of ``ranks_checked``, if ranks run different programs.
        ranks_checked: the numbers of the ranks that were checked.
        ranks_unlike: a line for each case in which ranks that should issue the same collectives do not.
        memory_tracked: bytes of the fullest rank by purpose, and their ``peak``; on GPUs also the allocator's
            own peaks, ``allocated`` and ``reserved``.
        memory_tracked_of_ranks: the peaks of all ranks.
        time_measured_s: the median step of the slowest rank.
        error: why the strategy could not be run, or that it is right only in double precision.
    """

    differences: Differences = field(default_factory=Differences)
    worst_gradient: str | None = None
    worst_parameter: str | None = None
    not_finite: Mapping[str, int] = field(default_factory=dict)
    replicas_agree: bool | None = None
    replica_difference: float | None = None
    unsplit_on: str | None = None
    numerics_ok: bool | None = None
    compared_in: str | None = None
    narrow: Differences | None = None
    collectives_issued: list[dict[str, Any]] = field(default_factory=list)
    issued_order: list[int] | None = None
    collectives_of_ranks: list[list[dict[str, Any]]] = field(default_factory=list)
    ranks_checked: list[int] | None = None
    ranks_unlike: list[str] = field(default_factory=list)
    memory_tracked: Mapping[str, int] = field(default_factory=dict)
    memory_tracked_of_ranks: list[int] = field(default_factory=list)
    time_measured_s: float | None = None
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> RunFindings:
        """Make the findings of a strategy that could not be run."""
        return cls(
            Differences.infinite(),
            worst_gradient="",
            worst_parameter="",
            replicas_agree=False,
            numerics_ok=False,
            time_measured_s=math.inf,
            error=error,
        )

    @property
    def memory_tracked_bytes(self) -> int:
        """The peak of the fullest rank."""
        return self.memory_tracked.get("peak", 0)
