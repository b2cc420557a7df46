"""Faults that are planted in processes of their own: ranks, and checks of the self-test."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.verify import rank_checks
from tensoropt.verify.rank_checks import RankFindings, check_plan


def wrong_on_the_last_rank(rank: int, world: int, *arguments: Any) -> RankFindings:
    """:func:`check_plan` of an engine whose last rank gets its first gradient wrong."""
    true = rank_checks.first_step

    def wrong(*given: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        outputs, gradients = true(*given)
        if rank == world - 1:
            name = next(iter(gradients))
            gradients[name] = gradients[name] * 1.5
        return outputs, gradients

    with mock.patch.object(rank_checks, "first_step", wrong):
        return check_plan(rank, world, *arguments)


def passes(context: CheckContext) -> Outcome:
    """A check in order, which says much."""
    print("a model's own words")
    return Outcome.of([Bounded("of nothing", 0.0, 0), Bounded("step", 0.25, unit="s")], device=context.device)


def raises(context: CheckContext) -> Outcome:
    """A check that meets a file that it cannot read."""
    (context.folder / "deep" / "weights.bin").read_bytes()
    raise AssertionError


def dies(context: CheckContext) -> Outcome:
    """A check whose process ends at a kernel's fault."""
    os.write(2, b"an illegal memory access was encountered")
    os._exit(70)


def hangs(context: CheckContext) -> Outcome:
    """A check that never ends; it says whether it is still there."""
    while True:
        Path(os.environ["STILL_THERE"]).write_text(str(os.getpid()))
        time.sleep(0.05)
