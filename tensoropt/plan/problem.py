"""The question: a model made ready for costs, and what may be chosen about its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.capture import COMPUTE_DTYPES, Capture, Mode
from tensoropt.errors import TensorOptError
from tensoropt.graph import OperatorGraph
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import (
    MicroBatchRefused,
    batch_placements,
    micro_batch_strategies,
)
from tensoropt.sharding.constraints import Constraints, constraints_from_dict
from tensoropt.sharding.discovery.discover import Kept
from tensoropt.sharding.groups import AxisStrategy, GroupGraph, group_operators
from tensoropt.sharding.regions import Region, find_regions

AUTO_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Settings:
    """What can be chosen about an exploration; the defaults are the command line's."""

    mode: Mode = "train"
    optimizer: str = "adam"
    micro_batches: str | Sequence[int] = "auto"
    memory_bytes: float | None = None
    epsilon: float = 1e-3
    max_points: int | None = None
    dtype: str = "float32"
    recompute: str = "auto"
    constraints: Constraints | None = None
    measure: str = "all"

    def __post_init__(self) -> None:
        if self.dtype not in COMPUTE_DTYPES:
            raise TensorOptError(f"unknown dtype '{self.dtype}'; use {' or '.join(COMPUTE_DTYPES)}")
        if self.recompute not in ("auto", "never"):
            raise TensorOptError(f"unknown recompute '{self.recompute}'; use auto or never")
        if self.measure not in ("all", "never"):
            raise TensorOptError(f"unknown measure '{self.measure}'; use all or never")
        if self.optimizer not in ("sgd", "momentum", "adam"):
            raise TensorOptError(f"unknown optimizer '{self.optimizer}'; use sgd, momentum or adam")
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
        micro = self.micro_batches if isinstance(self.micro_batches, str) else list(self.micro_batches)
        constraints = dict(self.constraints.data) if self.constraints else None
        return {**vars(self), "micro_batches": micro, "constraints": constraints}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Inverse of :meth:`to_dict`."""
        micro, constraints = data["micro_batches"], data.get("constraints")
        return cls(
            **{
                **data,
                "micro_batches": micro if isinstance(micro, str) else tuple(micro),
                "constraints": constraints_from_dict(constraints) if constraints else None,
            }
        )


@dataclass
class Problem:
    """A model made ready for costs: captured, factored into atoms, grouped.

    Attributes:
        captured: None where only the operator graph is there.
        micro: per group its strategy on the micro-batch axis (all unsplit when refused).
        refusal: why the model cannot run in micro-batches, or "".
    """

    captured: Capture | None
    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    refusal: str = ""


def prepare(captured: Capture, kept: Kept | None = None) -> Problem:
    """Atoms, groups and micro-batch strategies of a captured model."""
    return prepare_graph(captured.graph, captured, kept)


def prepare_graph(
    operators: OperatorGraph, captured: Capture | None = None, kept: Kept | None = None
) -> Problem:
    """Atoms, groups and micro-batch strategies of an operator graph.

    Args:
        kept: what was discovered before of operators without a rule; what is found now is added.
    """
    graph = group_operators(refine_graph(operators, kept))
    try:
        return Problem(captured, graph, micro_batch_strategies(graph))
    except MicroBatchRefused as refusal:
        whole = {g.name: g.unsplit for g in graph.groups}
        return Problem(captured, graph, whole, str(refusal))


def offered_regions(problem: Problem, settings: Settings) -> tuple[Region, ...]:
    """The blocks that the search may recompute."""
    return find_regions(problem.graph) if settings.recompute == "auto" else ()


def micro_batch_counts(problem: Problem, settings: Settings) -> tuple[int, ...]:
    """The micro-batch counts to search.

    Raises:
        TensorOptError: a count asked for is refused by the model or does not divide its batch.
    """
    operators = problem.graph.atoms.graph
    inputs = [operators.tensors[n] for n in operators.inputs]
    places = batch_placements(problem.graph)
    batch = next((t.shape[0] for t in inputs if places[t.name] == 0), 1)
    if settings.micro_batches == "auto":
        if problem.refusal or settings.mode == "inference":
            return (1,)
        return tuple(m for m in AUTO_MICRO_BATCHES if batch % m == 0)
    if isinstance(settings.micro_batches, str):
        raise TensorOptError(
            f"micro-batches '{settings.micro_batches}' is neither 'auto' nor a list such as 1,2,4"
        )
    for count in settings.micro_batches:
        if count > 1 and problem.refusal:
            raise TensorOptError(
                f"{count} micro-batches are refused: {problem.refusal}; use --micro-batches 1"
            )
        if batch % count:
            raise TensorOptError(f"{count} micro-batches do not divide the batch of {batch}; use a divisor")
    return tuple(dict.fromkeys(settings.micro_batches))
