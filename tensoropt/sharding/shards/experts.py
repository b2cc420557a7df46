"""Mixtures of experts."""

from __future__ import annotations

from tensoropt.sharding.local import LocalCall, Placed, localiser


@localiser("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def _grouped_mm(placed: Placed, call: LocalCall) -> LocalCall:
    """Offsets count rows of the whole batch and all experts; the kernel finds this rank's."""
    rows, experts = placed.split(placed.loop_named("rows")), placed.split(placed.loop_named("experts"))
    if not rows and not experts:
        return call
    offs = placed.argument(2, "offs", None)
    static = (call.function, rows, experts)
    return LocalCall("expert_kernels.grouped_mm", (*call.args[:2], offs), {}, call.name, static)
