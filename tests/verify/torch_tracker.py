"""PyTorch's own memory tracker on a step: a second opinion on what a step keeps alive."""

import itertools
from typing import Any

from torch.distributed._tools.mem_tracker import MemTracker

from tensoropt.verify.fake_ranks import RunStep


class NoModules:
    """Stands where PyTorch's tracker keeps its tracker of modules.

    That one calls ``register_multi_grad_hook`` with the tensors that a module is called with, to learn when
    its backward ends. The engine calls its module with the parameters, so the hook holds the gradient of each
    until all are there; and what somebody else holds, autograd copies instead of taking it over. A step that
    nobody watches does neither (test_torch_tracker.py shows both).
    """

    parents = frozenset({"Global"})
    is_bw = False

    def register_user_hooks(self, *hooks: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_: Any) -> None: ...


def torch_peak_bytes(step: RunStep) -> int:
    """The most bytes alive in a step, inputs and constants left out, by PyTorch's ``mem_tracker``.

    Args:
        step: one that was run already, so that the optimizer's state is there.
    """
    engine = step.engine
    # Views of them are seen, so they are counted in any case; then they are taken off.
    aside = {
        id(value.untyped_storage()): value
        for value in itertools.chain(step.inputs, engine.module.buffers(), engine.buffers.values())
    }
    kept = [*engine.parameter_tensors(), *engine.gradient_tensors(), *step.optimizer_state()]
    tracker = MemTracker()
    tracker._mod_tracker = NoModules()
    tracker.track_external(*kept, *aside.values())
    del kept  # the step replaces the unsharded parameters, so nobody else may keep the old ones
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")
    total = sum(int(kinds["Total"]) for kinds in peak.values())
    return total - sum(value.untyped_storage().nbytes() for value in aside.values())
