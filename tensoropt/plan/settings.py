"""What can be chosen about an exploration, and how a caller says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from tensoropt.capture import COMPUTE_DTYPES, Mode
from tensoropt.errors import TensorOptError
from tensoropt.plan.constraints import Given, constraints_of
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.sharding.constraints import Constraints


@dataclass(frozen=True)
class Settings:
    """What can be chosen about an exploration; the defaults are the command line's.

    Attributes:
        mode: ``train`` or ``inference``.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        micro_batches: ``auto`` (1, 2, 4, 8 where they divide the batch) or counts.
        memory_bytes: refuse to return when not even the leanest plan fits this budget.
        epsilon: allowed gap of the frontier; 0 for the exact one.
        max_points: points kept per mesh and micro-batch count.
        dtype: ``float32`` leaves the model's own dtypes; ``bfloat16`` computes in it, with float32 master
            weights, gradients and optimizer state (:mod:`tensoropt.capture.precision`).
        recompute: ``auto`` lets the search recompute repeated blocks in backward, ``never`` does not.
        overlap: ``default`` runs communication beside computation where the executor does, ``none`` waits for
            all of it, so that the two can be compared. CPU ranks hide nothing in either case.
        constraints: what operators must or should do (:mod:`tensoropt.sharding.constraints`); given as such,
            as their content, or as the path of a file.
        measure: ``all`` times on ranks of this machine what the profile store does not know; ``never``
            prices it from a fit to what the store knows.
        process_memory: count what a process takes of a GPU beside tensors, too: CUDA's context, NCCL's
            buffers, inputs (:mod:`tensoropt.costs.process_memory`), and replay PyTorch's allocator for the
            points (:mod:`tensoropt.simulate.allocations`). They are estimates that were not compared with a
            card, and NCCL's are so large that small models have few plans left.
        pipelines: plans that cut the model into stages (:mod:`tensoropt.session.pipelines`), by a heuristic:
            ``auto`` takes a first look at them on clusters of several nodes or device kinds, ``always`` looks
            closer, on any cluster; ``never`` does neither.
        placements: plans that put every operator on one device, by planners that are quick
            (:mod:`tensoropt.planners.quick`): ``auto`` tries them where operators and devices are not too
            many, ``always`` whatever it takes, ``never`` not at all.

    Raises:
        TensorOptError: a value that means nothing; says which do.
        ConstraintError: constraints that cannot be read.
    """

    mode: Mode = "train"
    optimizer: str = "adam"
    micro_batches: str | Sequence[int] = "auto"
    memory_bytes: float | None = None
    epsilon: float = 1e-3
    max_points: int | None = None
    dtype: str = "float32"
    recompute: str = "auto"
    overlap: str = "default"
    constraints: Constraints | None = None
    measure: str = "all"
    process_memory: bool = False
    pipelines: str = "auto"
    placements: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", constraints_of(self.constraints))  # also data, or a path
        if not isinstance(self.micro_batches, str):
            object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        if self.dtype not in COMPUTE_DTYPES:
            raise TensorOptError(f"unknown dtype '{self.dtype}'; use {' or '.join(COMPUTE_DTYPES)}")
        if self.recompute not in ("auto", "never"):
            raise TensorOptError(f"unknown recompute '{self.recompute}'; use auto or never")
        if self.overlap not in ("default", "none"):
            raise TensorOptError(f"unknown overlap '{self.overlap}'; use default or none")
        if self.pipelines not in ("auto", "always", "never"):
            raise TensorOptError(f"unknown pipelines '{self.pipelines}'; use auto, always or never")
        if self.placements not in ("auto", "always", "never"):
            raise TensorOptError(f"unknown placements '{self.placements}'; use auto, always or never")
        if self.measure not in ("all", "never"):
            raise TensorOptError(f"unknown measure '{self.measure}'; use all or never")
        if self.optimizer not in OPTIMIZERS:
            raise TensorOptError(f"unknown optimizer '{self.optimizer}'; use {', '.join(OPTIMIZERS)}")
        if self.mode not in ("train", "inference"):
            raise TensorOptError(f"unknown mode '{self.mode}'; use train or inference")
        if not 0 <= self.epsilon < 1:
            raise TensorOptError(f"epsilon {self.epsilon} is not between 0 and 1; 0.001 means 0.1 %")
        if self.max_points is not None and self.max_points < 2:
            raise TensorOptError(f"max_points {self.max_points} leaves no frontier; use at least 2")
        if not self.micro_batches:
            raise TensorOptError("no micro-batch count to search; use at least one, or 'auto'")
        if not isinstance(self.micro_batches, str) and any(m < 1 for m in self.micro_batches):
            raise TensorOptError(f"micro-batch counts {list(self.micro_batches)} must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as plans and explorations keep it."""
        micro = self.micro_batches if isinstance(self.micro_batches, str) else list(self.micro_batches)
        constraints = dict(self.constraints.data) if self.constraints else None
        return {**vars(self), "micro_batches": micro, "constraints": constraints}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """The settings that :meth:`to_dict` wrote."""
        micro, constraints = data["micro_batches"], data.get("constraints")
        return cls(
            **{
                **data,
                "micro_batches": micro if isinstance(micro, str) else tuple(micro),
                "constraints": constraints_of(constraints or None),
            }
        )


class Chosen(TypedDict, total=False):
    """The fields of :class:`Settings`, each of which :func:`tensoropt.explore` also takes by its own name."""

    mode: Mode
    optimizer: str
    micro_batches: str | Sequence[int]
    memory_bytes: float | None
    epsilon: float
    max_points: int | None
    dtype: str
    recompute: str
    overlap: str
    constraints: Given
    measure: str
    process_memory: bool
    pipelines: str
    placements: str


def settings_of(settings: Settings | None, chosen: Chosen) -> Settings:
    """The settings that a caller gave, whole or one by one.

    Raises:
        TensorOptError: something is chosen twice, which it names; or a value means nothing.
        TypeError: something is chosen that is no setting.
    """
    unknown = [name for name in chosen if name not in Chosen.__annotations__]
    if unknown:
        raise TypeError(f"'{unknown[0]}' is no setting; there are {', '.join(Chosen.__annotations__)}")
    if settings is None:
        return Settings(**chosen)  # type: ignore[arg-type]  # constraints of any kind are read there
    if chosen:
        name = next(iter(chosen))
        raise TensorOptError(
            f"{name} is given twice, as {name}= and in settings=; give one of them, or "
            f"settings=dataclasses.replace(settings, {name}=...)"
        )
    return settings
