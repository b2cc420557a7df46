"""A fault that is planted in ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

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
