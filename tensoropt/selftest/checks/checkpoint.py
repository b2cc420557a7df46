"""A checkpoint saved in mid-training and loaded into a fresh model, which then trains on as the first would
have."""

from __future__ import annotations

import torch
from torch import nn

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, open_model
from tensoropt.execute.checkpoint import load_checkpoint, optimizer_state, save_checkpoint
from tensoropt.execute.parallel import parallelize
from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.selftest.models import device_of_check, loss_of, module_of
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.verify.reference import outputs_difference

SOURCE = "zoo:gpt-mini"
_STEPS = 2
_BOUND = 1e-5
"""The bound on the difference of losses after loading from those without; kernels that sum in no fixed order
are allowed roundoff. An assumption; on a CPU the losses are the same bits."""


def run(context: CheckContext) -> Outcome:
    """Compare parameters and optimizer state bit for bit, and the losses of the steps after."""
    device = device_of_check(context)
    first, second = (_Training(seed, device) for seed in (0, 1))
    first.steps(_STEPS)
    save_checkpoint(context.folder / "checkpoint", first.model, first.optimizer)
    saved = first.state()
    load_checkpoint(context.folder / "checkpoint", second.model, second.optimizer)
    loaded = second.state()
    unlike = [
        name
        for name in saved.keys() | loaded.keys()
        if name not in saved or name not in loaded or not torch.equal(saved[name], loaded[name])
    ]
    goes_on = [run.steps(_STEPS) for run in (first, second)]
    return Outcome.of(
        [
            Bounded("tensors that are not what was saved, bit for bit", len(unlike), 0),
            Bounded("tensors saved", len(saved)),
            Bounded("losses of the steps after", outputs_difference(goes_on[1], goes_on[0]), _BOUND),
        ],
        unlike=sorted(unlike)[:5],
    )


class _Training:
    """A small model in training on one device, with Adam."""

    def __init__(self, seed: int, device: torch.device):
        spec = ModelSpec(SOURCE, seed)
        model, args, kwargs = spec.build()
        strategy = unsplit_strategy(open_model(spec).graph)
        self.model: nn.Module = parallelize(model, strategy, args, kwargs, device=device, as_measured=False)
        # The same batch for all seeds: losses are compared.
        _, self.args, self.kwargs = module_of(ModelSpec(SOURCE, 0), device)
        self.optimizer = make_optimizer("adam", self.model.parameters())

    def steps(self, count: int) -> list[torch.Tensor]:
        """Return the losses of so many steps."""
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = loss_of(self.model(*self.args, **self.kwargs))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach().cpu())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of parameters, buffers and optimizer state, by name."""
        everything = {**self.model.state_dict(), **optimizer_state(self.model, self.optimizer)}
        return {
            name: value.detach().cpu().clone()
            for name, value in everything.items()
            if isinstance(value, torch.Tensor)
        }
