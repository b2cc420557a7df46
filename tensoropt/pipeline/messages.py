"""The messages between the ranks of a pipeline in a step, beside those among the ranks of one stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import local_shape
from tensoropt.pipeline.stages import arriving_group, departing_group
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective

PIPELINE = 0
"""The axis of a job's mesh along which its stages lie, counted as people do, without the micro-batch axis."""


def coordinate(strategy: Strategy, inner: int) -> tuple[int, ...]:
    """Return the coordinates of a stage's rank on the stage's mesh, micro-batches included."""
    place: list[int] = []
    for size in reversed(strategy.mesh[1:]):
        place.insert(0, inner % size)
        inner //= size
    return (0, *place)


def crossing_bytes(strategy: Strategy, group: str, name: str, inner: int | None = None) -> int:
    """Return the bytes of one micro-batch of what arrives or departs by a group, on one rank of the stage;
    without ``inner`` on the fullest rank."""
    layout = strategy.configurations[group].layout(name)
    where = None if inner is None else coordinate(strategy, inner)
    shape = local_shape(strategy.atoms(name), layout, strategy.mesh, where)
    return prod(shape) * strategy.tensor(name).element_bytes


def departing_bytes(strategy: PipelinedStrategy, stage: int, *, learning: bool = False) -> int:
    """Return the bytes that a rank of a stage sends on for each micro-batch; with ``learning`` those that
    come back."""
    tensors, own = strategy.graph.atoms.graph.tensors, strategy.stages[stage]
    return sum(
        crossing_bytes(own, departing_group(name), name)
        for name in strategy.parts[stage].departing
        if tensors[name].requires_grad or not learning
    )


def arriving_bytes(strategy: PipelinedStrategy, stage: int, *, learning: bool = False) -> int:
    """Return the bytes that a rank of a stage receives for each micro-batch; with ``learning`` those it sends
    back."""
    tensors, own = strategy.graph.atoms.graph.tensors, strategy.stages[stage]
    return sum(
        crossing_bytes(own, arriving_group(name), name)
        for name in strategy.parts[stage].arriving
        if tensors[name].requires_grad or not learning
    )


def new_buffer_bytes(strategy: Strategy) -> int:
    """Return the bytes of the new values that a stage gives to buffers; every rank of the stage has them
    whole."""
    graph = strategy.graph.atoms.graph
    return sum(graph.tensors[name].bytes for name in graph.mutations) if graph.training else 0


def stored_bytes(strategy: Strategy, name: str, inner: int | None = None) -> int:
    """Return the bytes of a parameter's gradient on one rank of the stage; without ``inner`` on the fullest
    rank."""
    where = None if inner is None else coordinate(strategy, inner)
    shape = local_shape(strategy.atoms(name), strategy.stored[name], strategy.mesh, where)
    return prod(shape) * DTYPE_BYTES[strategy.tensor(name).stored_dtype]


def sent_by_rank(
    strategy: PipelinedStrategy, rank: int, of_stage: Sequence[Mapping[Collective, int]]
) -> Counter[Collective]:
    """Return the collectives that one rank issues in a training step, or in a call for inference.

    Args:
        of_stage: for each stage, the collectives among its ranks; axes are those of its own mesh, from 0.
    """
    inner, found = rank % strategy.devices_per_place, Counter[Collective]()
    place, source = rank // strategy.devices_per_place, strategy.graph.atoms.graph
    for stage in strategy.stages_at(place):
        for one, count in of_stage[stage].items():
            found[one._replace(axes=tuple(axis + 1 for axis in one.axes))] += count
        found += _messages(strategy, stage, rank, inner)
    for name in strategy.tied:
        if source.tensors[name].requires_grad and source.training:
            for stage in strategy.holders(name):
                if strategy.place_of(stage) == place:
                    size = stored_bytes(strategy.stages[stage], name, inner)
                    found[Collective("all_reduce", (PIPELINE,), size)] += 1
    for name in (*strategy.sent_buffers, *source.outputs):
        found[Collective("broadcast", (PIPELINE,), source.tensors[name].bytes)] += 1
    return found


def _messages(strategy: PipelinedStrategy, stage: int, rank: int, inner: int) -> Counter[Collective]:
    """Return the messages from one stage to its neighbours; none between stages on the same rank."""
    found, own, part = Counter[Collective](), strategy.stages[stage], strategy.parts[stage]
    tensors, size = strategy.graph.atoms.graph.tensors, strategy.devices_per_place
    place, training = strategy.place_of(stage), strategy.graph.atoms.graph.training
    for name in part.departing:
        to = strategy.place_of(stage + 1)
        if to != place:
            size_bytes = crossing_bytes(own, departing_group(name), name, inner)
            found[Collective("send", (rank, to * size + inner), size_bytes)] += strategy.micro_batches
    for name in part.arriving:
        to = strategy.place_of(stage - 1)
        if to != place and training and tensors[name].requires_grad:
            size_bytes = crossing_bytes(own, arriving_group(name), name, inner)
            found[Collective("send", (rank, to * size + inner), size_bytes)] += strategy.micro_batches
    return found
