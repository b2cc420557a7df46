"""Lookups in a table that is split along what is looked up, or counted along a split dim."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tensoropt.graph import Ref
from tensoropt.sharding.local import LocalCall, Placed, localiser
from tensoropt.sharding.placement import chunk


@localiser("aten.embedding.default")
def _embedding(placed: Placed, call: LocalCall) -> LocalCall:
    axes = placed.split(placed.loop_named("vocabulary"))
    if not axes:
        return call
    vocabulary = placed.atoms.graph.tensors[placed.op.inputs()[0]].shape[0]
    step = chunk(vocabulary, prod(placed.mesh[a] for a in axes), 0)[1]
    return LocalCall("kernels.vocabulary_embedding", call.args[:3], {}, call.name, (axes, step))


@localiser("aten.embedding_bag.padding_idx")
def _embedding_bag(placed: Placed, call: LocalCall) -> LocalCall:
    axes, bags = placed.split(placed.loop_named("vocabulary")), placed.split(placed.loop_named("bag"))
    if not axes and not bags:
        return call
    vocabulary = placed.atoms.graph.tensors[placed.op.inputs()[0]].shape[0]
    step = chunk(vocabulary, prod(placed.mesh[a] for a in axes), 0)[1]
    return replace(call, function="kernels.embedding_bag", static=(axes, step))


@localiser("aten.index.Tensor")
def _index(placed: Placed, call: LocalCall) -> LocalCall:
    """Indices that count along a split loop are made relative to the shard."""
    source = placed.space.reads[0]
    refs = {p: value.name for p, value in enumerate(placed.op.args[1]) if isinstance(value, Ref)}
    counting = tuple(p for p in refs if placed.split(source.dims[p]))
    if not counting:
        return call
    return LocalCall("kernels.index_relative", call.args, {}, call.name, (counting,))
