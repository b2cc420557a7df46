"""Calls in eval mode, lowered to a rank's part: the interface, and its implementation for sharded plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.lower import lower
from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.graph import OperatorGraph, Tensor
from tensoropt.sharding.evaluating import evaluating_strategy
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy

Read = Callable[[str], torch.Tensor]
"""A function from the name of a parameter or buffer in the call's graph to this rank's part of it."""
Collect = Callable[[Tensor, torch.Tensor | None, int], torch.Tensor]
"""A function that broadcasts a result, given its tensor, its value (or None) and the device group with it."""


@dataclass(frozen=True)
class CallGraph:
    """The graph of a call in eval mode.

    Attributes:
        groups: the graph, captured for inference.
        planned: parameter in this graph -> its name in the plan; others are whole on every rank.
        divided: the inputs with a batch dim.
        by_rows: the results with a batch dim.
    """

    groups: GroupGraph
    planned: Mapping[str, str]
    divided: frozenset[str]
    by_rows: frozenset[str]

    @property
    def source(self) -> OperatorGraph:
        return self.groups.atoms.graph


class LoweredCall(ABC):
    """The graph of a call in eval mode, lowered for this rank."""

    @abstractmethod
    def __call__(self, inputs: Sequence[torch.Tensor], read: Read) -> list[torch.Tensor]:
        """Return the results, with this rank's rows where there is a batch dim; every rank must call it.

        Args:
            read: a function from the name of a parameter or buffer to this rank's part of it.
        """

    def whole(self, inputs: Sequence[torch.Tensor], names: Collection[str]) -> Sequence[torch.Tensor]:
        """Return the inputs, with those in ``names`` gathered from all ranks; a collective."""
        return inputs


class ShardedCall(LoweredCall):
    """A call in eval mode, run by a sharded plan.

    Args:
        engine: the plan's runtime, whose seed and device the call uses.
        axes: the mesh axes along which ranks pass different rows.
    """

    def __init__(self, plan: Strategy, call: CallGraph, engine: Runtime, axes: tuple[int, ...]):
        self.by_rows = call.by_rows
        self.strategy = evaluating_strategy(plan, call.groups, call.planned, axes)
        runtime = Runtime(self.strategy.mesh, seed=engine.seed, device=engine.device)
        self.share = BatchShare(self.strategy if axes else None, runtime, axes, call.divided)
        self.lowered = lower(self.strategy, runtime, share=self.share)
        self.lowered.module.to(engine.device)

    def whole(self, inputs: Sequence[torch.Tensor], names: Collection[str]) -> Sequence[torch.Tensor]:
        return self.share.with_whole(inputs, names)

    def __call__(self, inputs: Sequence[torch.Tensor], read: Read) -> list[torch.Tensor]:
        program = self.lowered.program
        inputs = self.share.with_whole(inputs, self.share.gathered)
        made = self.lowered.module(*inputs, *map(read, (*program.parameters, *program.buffers)))
        return [
            self._own_rows(name, made[i]) if name in self.by_rows else made[i]
            for i, name in enumerate(program.outputs)
        ]

    def _own_rows(self, name: str, value: torch.Tensor) -> torch.Tensor:
        # Of the inputs, those that were not gathered are this rank's rows as they were passed.
        if name in self.strategy.leaving or name in self.share.divided - self.share.gathered:
            return value
        size = len(value) // self.share.world
        return value[self.share.index * size :][:size]


def given_result(
    source: OperatorGraph, name: str, inputs: Sequence[torch.Tensor], buffer: Read
) -> torch.Tensor:
    """Return a result that no operator computes: an input, buffer or constant. PlanError for a parameter."""
    tensor = source.tensors[name]
    if tensor.kind == "parameter":
        raise PlanError(
            f"the model returns its parameter {tensor.key}, which a placed plan keeps on one device; return "
            "what is computed with it, or choose a sharded plan"
        )
    if tensor.kind == "input":
        value = inputs[source.inputs.index(name)]
    else:
        value = buffer(name) if tensor.kind == "buffer" else source.constants[name]
    return value.expand(tensor.shape)
