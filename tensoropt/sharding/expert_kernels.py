"""Mixtures of experts on one shard."""

from __future__ import annotations

import torch

from tensoropt.sharding.kernels import ShardContext


def grouped_mm(
    context: ShardContext,
    name: str,
    target: str,
    row_axes: tuple[int, ...],
    expert_axes: tuple[int, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
) -> torch.Tensor:
    """Grouped matrix product of some of the rows with some of the experts.

    Args:
        target: the operator that multiplies.
        row_axes: the axes that split the rows; ``x`` holds this rank's.
        expert_axes: the axes that split the experts; ``weight`` holds this rank's.
        x: ``[rows, in]``, globally sorted by expert.
        weight: ``[experts, in, out]``.
        offs: ``[all experts]``, where each expert's rows end, globally.

    Returns:
        ``[rows, out]``: zeros for rows of other ranks' experts. Sizes do not depend on values, so it runs
        on fake tensors too: the rank's rows are rolled to the front and back.
    """
    from tensoropt.sharding.local import resolve_function  # which registers this module's kernels

    product = resolve_function(target)
    rows, experts = x.shape[0], weight.shape[0]
    first = context.coordinate(expert_axes) * experts
    ends = torch.cat([offs.new_zeros(1), offs])[first : first + experts + 1]
    ends = (ends - context.coordinate(row_axes) * rows).clamp(0, rows)
    if not expert_axes:
        return product(x, weight, ends[1:])
    index = torch.arange(rows, device=x.device)
    front, back = (index + ends[0]) % rows, (index - ends[0]) % rows
    mine = product(x.index_select(0, front), weight, ends[1:] - ends[0])
    inside = (back < ends[-1] - ends[0]).unsqueeze(1)
    return torch.where(inside, mine.index_select(0, back), 0.0)
