"""Whether an operator's backward is additive: for a sum of gradients it gives the sum of its results for
each.

Autograd's own backward always is. A user's own backward may clip or normalise its gradients; gradients of
micro-batches, or of parts of a batch, then have to be added before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensoropt.ops.calls import LocalCall
from tensoropt.ops.context import SingleDevice
from tensoropt.ops.registry import bind
from tensoropt.sharding.discovery.probe_operators import ProbeOperator

TOLERANCE = 1e-4
"""Tolerance relative to the largest value; an assumption, as in the search for splits."""


def adds_up(probe: ProbeOperator, scales: Sequence[float]) -> bool:
    """Whether the backward is additive for random gradients of several sizes; False if it fails."""
    values = probe.values(0)
    generator = torch.Generator().manual_seed(0)
    made = probe.run(values)

    def drawn(scale: float) -> list[torch.Tensor]:
        return [
            (scale * torch.randn(m.shape, generator=generator, dtype=torch.float64)).to(m.dtype) for m in made
        ]

    try:
        for scale in scales:
            one, other = drawn(scale), drawn(scale)
            total = _backward(probe, values, [a + b for a, b in zip(one, other, strict=True)])
            parts = zip(total, _backward(probe, values, one), _backward(probe, values, other), strict=True)
            if not all(_alike(whole, a + b) for whole, a, b in parts):
                return False
    except Exception:  # the operator's own
        return False
    return True


def _backward(
    probe: ProbeOperator, values: dict[str, torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of the operands that have one, given gradients of the results."""
    tensors = probe.graph.tensors
    leaves = {n: v.detach().requires_grad_(tensors[n].requires_grad) for n, v in values.items()}
    call = LocalCall(probe.op.target, probe.op.args, probe.op.kwargs, probe.op.name)
    args, kwargs = call.arguments(leaves.__getitem__)
    result = bind(call, SingleDevice())(*args, **kwargs)
    results = [result] if isinstance(result, torch.Tensor) else result
    made = [value for value in results if isinstance(value, torch.Tensor)]
    pairs = [(m, g) for m, g in zip(made, gradients, strict=True) if m.requires_grad]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    if not pairs or not wanted:
        return []
    found = torch.autograd.grad([m for m, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]


def _alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not wanted.numel():
        return True
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max() + 1e-30)
