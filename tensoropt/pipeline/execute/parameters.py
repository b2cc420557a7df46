"""The parameters of the stages that a rank has, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.local_parameters import LocalParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.pipeline.strategy import PipelinedStrategy


class StagedGradients:
    """Gradients of several stages, as :class:`~tensoropt.engine.gradients.Gradients` shows those of one."""

    def __init__(self, parts: Sequence[Gradients]):
        self.parts = tuple(parts)

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """Per trained parameter its gradient."""
        return {name: view for part in self.parts for name, view in part.views.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What holds the gradients."""
        return [tensor for part in self.parts for tensor in part.tensors]

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        for part in self.parts:
            part.clear()

    def show_as(
        self, owners: Mapping[str, torch.Tensor], wrap: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Show gradients on ``owners`` from now on, as ``wrap(name, view)``."""
        for part in self.parts:
            part.show_as(owners, wrap)


class StagedParameters:
    """What a rank has of a pipelined plan's parameters: those of its stages, as these store them.

    Attributes:
        leaves: of all stages here; no two of them use one parameter.
        accumulated: their gradients.
    """

    def __init__(self, stages: Sequence[LocalParameters]):
        self.stages = tuple(stages)
        self.leaves = {name: leaf for stage in stages for name, leaf in stage.leaves.items()}
        self.accumulated = StagedGradients([stage.accumulated for stage in stages])
        self._stage_of = {name: stage for stage in stages for name in stage.leaves}

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of a whole parameter of a stage here, in the type it is stored in."""
        return self._stage_of[name].shard(name, value)

    def shard_index(self, name: str) -> tuple[int, ...]:
        """Which part of a parameter this rank has: ranks with equal indices have equal values."""
        return self._stage_of[name].shard_index(name)

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """The axes of the job's mesh along which ranks of its stage have the same part of a parameter."""
        # Behind the micro-batches the job's mesh has the pipeline, which a stage's has not.
        return tuple(axis + 1 for axis in self._stage_of[name].replica_axes(name))

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to whole values."""
        for stage in self.stages:
            stage.load(values)

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Per trained parameter its gradient."""
        return self.accumulated.views

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        self.accumulated.clear()


class TiedParameters:
    """Parameters that several stages use, each with a copy of its own: their gradients are one.

    As Megatron-LM does it with the embedding that the head shares (Narayanan et al., SC 2021): what the
    stages' micro-batches add up to is summed over these stages, once per step, so that the copies stay equal.
    """

    def __init__(self, strategy: PipelinedStrategy, runtime: Runtime):
        self.groups: dict[str, dist.ProcessGroup] = {}
        inner = strategy.devices_per_place
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name in strategy.tied:
            if not strategy.graph.atoms.graph.tensors[name].requires_grad:
                continue
            places = tuple(sorted(strategy.place_of(stage) for stage in strategy.holders(name)))
            # All ranks make all groups, in one order.
            for offset in range(inner):
                ranks = tuple(place * inner + offset for place in places)
                if ranks not in made:
                    everyone = len(ranks) == strategy.devices
                    made[ranks] = dist.group.WORLD if everyone else dist.new_group(list(ranks))
                if runtime.rank in ranks:
                    group = made[ranks]
                    assert group is not None
                    self.groups[name] = group

    @torch.no_grad()
    def add_up(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sum the gradients of tied parameters over their stages."""
        for name, group in self.groups.items():
            dist.all_reduce(gradients[name], group=group)
