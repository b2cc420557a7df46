"""The check that dropout draws the same bits on every device and for every shard."""

from __future__ import annotations

import torch

from tensoropt.engine.models import ModelSpec, open_model
from tensoropt.ops.families.generators import keep_mask, random_kernel
from tensoropt.ops.kernels import SingleDevice
from tensoropt.selftest.models import device_of_check, unsplit_engine
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.verify.reference import first_step, outputs_difference

ROWS, _COLUMNS, SHARDS = 384, 1000, 4
_CHANCE = 0.1
_LOSS_BOUND = 1e-4
"""The bound on the relative difference of the loss of a model with dropout from the CPU's. A different mask
changes it by per cents; other kernels' sums, off by a few units of 6e-8 each, change it by some 1e-6. An
assumption."""


def run(context: CheckContext) -> Outcome:
    """Compare the device's masks and numbers with the CPU's, and whole masks with their shards."""
    device = device_of_check(context)
    reference = torch.device("cpu")
    masks = [mask(step, reference) for step in range(3)]
    figures = [
        Bounded("bits of masks that differ, shards against the whole", _shards_differ(device, masks[0]), 0),
        Bounded("bits that are alike in two steps, beyond chance", _alike(masks[0], masks[1]), 0.01),
        Bounded("share dropped, beside what was asked for", abs(_dropped(masks[0]) - _CHANCE), 0.005),
    ]
    if not context.on_gpu:
        return Outcome.of(figures, "there is no GPU whose bits could be compared with the CPU's")
    differ = sum(int((mask(step, device).cpu() != want).sum()) for step, want in enumerate(masks))
    numbers = int((_numbers(device).cpu() != _numbers(reference)).sum())
    return Outcome.of(
        [
            Bounded("bits of masks that differ, GPU against CPU", differ, 0),
            Bounded("uniform numbers that differ, GPU against CPU", numbers, 0),
            Bounded("loss of a model with dropout, GPU against CPU", _loss_difference(device), _LOSS_BOUND),
            *figures,
        ]
    )


class _Shard(SingleDevice):
    """A rank of several along axis 1, without the others."""

    def __init__(self, index: int):
        super().__init__(seed=7)
        self.index = index

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return self.index


def mask(step: int, device: torch.device) -> torch.Tensor:
    """Return the whole mask of a step, rows by columns."""
    pieces = ((ROWS, _COLUMNS, ROWS, ()), (_COLUMNS, 1, _COLUMNS, ()))
    return keep_mask(SingleDevice(7, step), "selftest", _CHANCE, (ROWS, _COLUMNS), pieces, device)


def _shards_differ(device: torch.device, whole: torch.Tensor) -> int:
    part = ROWS // SHARDS
    pieces = ((part, _COLUMNS, part, (1,)), (_COLUMNS, 1, _COLUMNS, ()))
    shards = [
        keep_mask(_Shard(index), "selftest", _CHANCE, (part, _COLUMNS), pieces, device).cpu()
        for index in range(SHARDS)
    ]
    return int((torch.cat(shards) != whole).sum())


def _alike(first: torch.Tensor, second: torch.Tensor) -> float:
    chance = _CHANCE**2 + (1 - _CHANCE) ** 2
    return abs(float((first == second).double().mean()) - chance)


def _dropped(kept: torch.Tensor) -> float:
    return 1.0 - float(kept.double().mean())


def _numbers(device: torch.device) -> torch.Tensor:
    pieces = ((ROWS, _COLUMNS, ROWS, ()), (_COLUMNS, 1, _COLUMNS, ()))
    with device:
        return random_kernel(SingleDevice(7), "selftest", pieces, "rand", (ROWS, _COLUMNS), torch.float32)


def _loss_difference(device: torch.device) -> float:
    losses = []
    for where in (torch.device("cpu"), device):
        loaded = open_model(ModelSpec("zoo:gpt-mini-dropout", device=where.type))
        losses.append([value.cpu() for value in first_step(unsplit_engine(loaded, where), loaded)[0]])
    return outputs_difference(losses[1], losses[0])
