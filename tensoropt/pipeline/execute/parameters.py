"""The parameters of all stages on a rank, presented as those of one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.local_parameters import LocalParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.pipeline.strategy import PipelinedStrategy


class StagedGradients:
    """The gradients of several stages, with the interface of
    :class:`~tensoropt.engine.gradients.Gradients`."""

    def __init__(self, parts: Sequence[Gradients]):
        self.parts = tuple(parts)

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter."""
        return {name: view for part in self.parts for name, view in part.views.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold the gradients."""
        return [tensor for part in self.parts for tensor in part.tensors]

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        for part in self.parts:
            part.clear()

    def show_as(
        self, owners: Mapping[str, torch.Tensor], wrap: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Show gradients on ``owners`` from now on, each as ``wrap(name, view)``."""
        for part in self.parts:
            part.show_as(owners, wrap)


class StagedParameters:
    """A rank's part of a pipelined plan's parameters: those of its stages, as these store them.

    Attributes:
        leaves: the leaves of all stages on this rank; no two of these stages use the same parameter.
        accumulated: their gradients.
    """

    def __init__(self, stages: Sequence[LocalParameters]):
        self.stages = tuple(stages)
        self.leaves = {name: leaf for stage in stages for name, leaf in stage.leaves.items()}
        self.accumulated = StagedGradients([stage.accumulated for stage in stages])
        self._stage_of = {name: stage for stage in stages for name in stage.leaves}

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of a whole parameter of one of its stages, in the type in which
        it is stored."""
        return self._stage_of[name].shard(name, value)

    def shard_index(self, name: str) -> tuple[int, ...]:
        """Return the index of this rank's part of a parameter: ranks with equal indices have equal values."""
        return self._stage_of[name].shard_index(name)

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """Return the axes of the job's mesh along which ranks of the parameter's stage have the same part of
        it."""
        # After the micro-batch axis, the job's mesh has a pipeline axis, which a stage's mesh lacks.
        return tuple(axis + 1 for axis in self._stage_of[name].replica_axes(name))

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to whole values."""
        for stage in self.stages:
            stage.load(values)

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradient of each trained parameter."""
        return self.accumulated.views

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        self.accumulated.clear()


class TiedParameters:
    """Parameters that several stages use, with a copy in each stage and one common gradient.

    This is how Megatron-LM treats the embedding that the head shares (Narayanan et al., SC 2021): the sums
    over each stage's micro-batches are summed over these stages, once per step, so that the copies stay
    equal.
    """

    def __init__(self, strategy: PipelinedStrategy, runtime: Runtime):
        self.groups: dict[str, dist.ProcessGroup] = {}
        inner = strategy.devices_per_place
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name in strategy.tied:
            if not strategy.graph.atoms.graph.tensors[name].requires_grad:
                continue
            places = tuple(sorted(strategy.place_of(stage) for stage in strategy.holders(name)))
            # All ranks create all process groups, in the same order.
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
