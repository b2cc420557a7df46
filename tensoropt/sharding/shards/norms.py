"""Batch norm over a split batch."""

from __future__ import annotations

from tensoropt.graph import DTYPE_BYTES
from tensoropt.sharding.local import MICRO_AXIS, InnerCollective, LocalCall, Placed, localiser


@localiser("aten._native_batch_norm_legit_functional.default")
def _batch_norm(placed: Placed, call: LocalCall) -> LocalCall:
    axes = tuple(a for a in placed.split(placed.loop_named("batch")) if a != MICRO_AXIS)
    if not axes:
        return call
    x = placed.atoms.graph.tensors[placed.op.inputs()[0]]
    count = x.elements // x.shape[1]
    channels = placed.read_shape(0)[1] * max(x.element_bytes, DTYPE_BYTES["float32"])
    collectives = (
        InnerCollective("all_reduce", axes, channels),
        InnerCollective("all_reduce", axes, channels),
        InnerCollective("all_reduce", axes, 2 * channels, backward=True),
    )
    return LocalCall("kernels.sync_batch_norm", call.args, call.kwargs, call.name, (axes, count), collectives)
