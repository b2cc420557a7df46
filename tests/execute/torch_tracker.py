"""PyTorch's own memory tracker on a step: a second opinion on what a step keeps alive."""

from __future__ import annotations

from typing import Any

from torch.distributed._tools.mem_tracker import MemTracker

from tensoropt.execute.steps import Step


class _Totals(MemTracker):
    """Without statistics of modules, which it refuses to make of one that is called several times
    (micro-batches)."""

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None: ...

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None: ...

    def _pre_bw_hook(self, module: Any, args: Any) -> None: ...

    def _post_bw_hook(self, module: Any, args: Any) -> None: ...


def torch_peak_bytes(step: Step) -> int:
    """The most bytes alive in a step, by ``torch.distributed._tools.mem_tracker``; inputs and constants count
    where an operator gives a view of them.

    While it watches, autograd copies the gradients it accumulates, which otherwise it takes over: up to the
    largest gradient more, and it may go on doing so, so that a step is to be watched by this one last.

    Args:
        step: one that was run already, so that the optimizer's state is there.
    """
    shards = step.engine.shards
    tracker = _Totals()
    tracker.track_external(
        *shards.leaves.values(), *(flat for _, flat in shards.buckets), *step.optimizer_state()
    )
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")
    return sum(int(kinds["Total"]) for kinds in peak.values())
