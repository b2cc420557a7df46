"""The division of a global batch among ranks, when each rank passes only its own rows to the model."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from tensoropt.engine.runtime import Runtime
from tensoropt.graph import OperatorGraph
from tensoropt.ops.layouts import REPLICATE, Atoms, Layout
from tensoropt.sharding.groups import batch_inputs
from tensoropt.sharding.program import Argument, Slice, lower_program
from tensoropt.sharding.strategy import Strategy


class BatchShare:
    """This rank's rows of the global batch.

    Each micro-batch is cut into ``world`` parts. Part ``i`` of every micro-batch belongs to share ``i``.

    Args:
        strategy: the plan; None if all ranks pass the global batch.
        axes: the mesh axes that split the batch; by default those along which the plan splits it.
        divided: the names of the inputs to split; by default all inputs with a batch dim.

    Attributes:
        axes: the mesh axes along which ranks have different rows; the first is outermost.
        index, world: the index of this rank's share, and the number of shares.
        divided: the names of the inputs of which each rank passes only its rows.
        gathered: the inputs that the plan does not split along ``axes``; every call all-gathers those of them
            that are also in ``divided``.
    """

    def __init__(
        self,
        strategy: Strategy | None,
        runtime: Runtime,
        axes: tuple[int, ...] | None = None,
        divided: Collection[str] | None = None,
    ):
        self.runtime = runtime
        self.micro_batches = runtime.mesh[0]
        self.axes: tuple[int, ...] = ()
        self.divided = self.gathered = frozenset[str]()
        self.inputs: tuple[str, ...] = ()
        if strategy is not None:
            self._divide(strategy, axes, divided)
        self.index, self.world = runtime.coordinate(self.axes), runtime.parts(self.axes)

    def _divide(
        self, strategy: Strategy, axes: tuple[int, ...] | None, divided: Collection[str] | None
    ) -> None:
        source = strategy.graph.atoms.graph
        self.inputs = tuple(source.inputs)
        follows = _followed(strategy, self.runtime)
        self.axes = _common_axes(source, follows) if axes is None else axes
        if not self.axes:
            return
        self.divided = frozenset(batch_inputs(source) if divided is None else divided)
        self.gathered = frozenset(name for name, cut in follows.items() if cut[: len(self.axes)] != self.axes)

    def rows(self, batch: int) -> list[int]:
        """Return the indices of this rank's rows in a global batch of ``batch`` rows."""
        size = batch // (self.micro_batches * self.world)
        starts = [(m * self.world + self.index) * size for m in range(self.micro_batches)]
        return [start + row for start in starts for row in range(size)]

    def shape(self, name: str, shape: Sequence[int]) -> torch.Size:
        """Return the shape of a rank's share of an input with the global shape ``shape``."""
        if name not in self.divided:
            return torch.Size(shape)
        return torch.Size((shape[0] // self.world, *shape[1:]))

    def as_passed(self, name: str, atoms: Atoms, layout: Layout) -> tuple[Atoms, Layout]:
        """Return the factors of an input's dims, and its layout, once each rank passes only its rows."""
        if name not in self.divided or name in self.gathered:
            return atoms, layout
        (first, *rest), *others = atoms
        left = tuple(REPLICATE if axis in self.axes else code for axis, code in enumerate(layout))
        return ((first // self.world, *rest), *others), left

    def with_whole(self, inputs: Sequence[torch.Tensor], names: Collection[str]) -> Sequence[torch.Tensor]:
        """Return the inputs; those in ``names`` of which ranks pass only their rows are all-gathered."""
        if self.world == 1:
            return inputs
        return [
            self._whole(value) if name in names and name in self.divided else value
            for name, value in zip(self.inputs, inputs, strict=False)
        ]

    def rows_of_all(self, value: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor's rows from all shares and concatenate them; shares may differ in length."""
        if self.world == 1:
            return value
        group = self.runtime.group(self.axes)
        counts = torch.empty(self.world, dtype=torch.int64, device=value.device)
        dist.all_gather_into_tensor(counts, torch.tensor([len(value)], device=value.device), group=group)
        most = int(counts.max())
        # Gloo gathers no booleans.
        dtype = torch.uint8 if value.dtype == torch.bool else value.dtype
        own = value.new_zeros((most, *value.shape[1:]), dtype=dtype)
        own[: len(value)] = value
        whole = own.new_empty((self.world * most, *value.shape[1:]))
        dist.all_gather_into_tensor(whole, own, group=group)
        parts = zip(whole.split(most), counts.tolist(), strict=True)
        return torch.cat([part[:count] for part, count in parts]).to(value.dtype)

    def _whole(self, share: torch.Tensor) -> torch.Tensor:
        rows, *rest = share.shape
        group, size = self.runtime.group(self.axes), rows // self.micro_batches
        whole = share.new_empty((self.world * rows, *rest))
        dist.all_gather_into_tensor(whole, share.contiguous(), group=group)
        parts = whole.view(self.world, self.micro_batches, size, *rest)
        return parts.transpose(0, 1).reshape(self.world * rows, *rest)


def _followed(strategy: Strategy, runtime: Runtime) -> Mapping[str, tuple[int, ...]]:
    source, mesh = strategy.graph.atoms.graph, strategy.mesh
    batch = set(batch_inputs(source))
    found: dict[str, tuple[int, ...]] = {}
    for node in lower_program(strategy, runtime.place).nodes:
        for name, provider in node.reads.items():
            if name not in batch or not isinstance(provider, Argument):
                continue
            axes = _cut_by(strategy, name, node.layout) if isinstance(node, Slice) else ()
            found[name] = _common(found.get(name, axes), axes)
    for name, axes in found.items():
        rows = source.tensors[name].shape[0] // mesh[0]
        while axes and rows % prod(mesh[axis] for axis in axes):
            axes = axes[:-1]
        found[name] = axes
    return found


def _common_axes(source: OperatorGraph, follows: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    cut = {name: axes for name, axes in follows.items() if axes}
    if not cut:
        return ()
    common = functools.reduce(_common, cut.values())
    return common or cut[max(cut, key=lambda name: source.tensors[name].bytes)]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    same = (number for number, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1)
    return first[: next(same, min(len(first), len(second)))]


def _cut_by(strategy: Strategy, name: str, layout: Layout) -> tuple[int, ...]:
    """Return the device axes (not that of micro-batches) that split the outermost factor of an input's batch
    dim; () if each rank gets two chunks of that factor, one from either end (zig-zag order)."""
    mesh = strategy.mesh
    axes = [axis for axis, code in enumerate(layout) if code == 0 and mesh[axis] > 1]
    if 0 in strategy.zigzag_atoms(name):
        return ()
    if mesh[0] == 1:
        return tuple(axes)
    return tuple(axes[1:]) if axes[:1] == [0] else ()
