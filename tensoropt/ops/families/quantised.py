"""Linear layers with quantised weights (:mod:`tensoropt.ops.quantised`), each as one operator."""

from __future__ import annotations

import torch

from tensoropt.ops.calls import CostClass, OpSpec, Precision
from tensoropt.ops.index_space import Builder
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.quantised import QuantisedProduct, Scheme

QUANTISED_LINEAR = "quantised_kernels.quantised_linear"
"""The operator's and kernel's name; arguments: x, codes, scales, nested scales, offset, bias, scheme."""


def _quantised_linear(b: Builder) -> None:
    """Describe a linear layer; in 4 bits, inputs are split only between blocks of inputs with one scale."""
    x, codes, scales, nested, _, bias, name = b.op.args
    scheme = Scheme.of(name)
    outputs, width = b.tensor(codes).shape
    rows = b.loops(b.tensor(x).shape[:-1])
    o = b.loop("out_features", outputs, uneven=True)
    if not scheme.table:
        i = b.loop("in_features", width)
        b.read(x, [*rows, i])
        b.read(codes, [o, i])
        b.read(scales, [o, None][: len(b.tensor(scales).shape)])
    else:
        blocks = b.tensor(scales).shape[1]
        groups = b.tensor(nested).shape[1] if nested is not None else 1
        group, i = b.loop("groups", groups), b.loop("in_features", blocks // groups)
        place = b.loop("place", b.tensor(x).shape[-1] // blocks, splittable=False)
        byte = b.loop("byte", width // blocks, splittable=False)
        b.read(x, [*rows, (group, i, place)])
        b.read(codes, [o, (group, i, byte)])
        b.read(scales, [o, (group, i)])
        b.read(nested, [o, group])
    b.read(bias, [o], added=True)
    b.write([*rows, o])


def quantised_linear(
    context: ShardContext,
    name: str,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    scheme: str,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` for this rank's part of the weight.

    Args:
        x: ``[..., inputs]``.
        codes, scales, nested, offset: fields of this rank's :class:`~tensoropt.ops.quantised.WeightBytes`.
        bias: ``[outputs]``, in any floating-point type.
    """
    product: torch.Tensor = QuantisedProduct.apply(x, codes, scales, nested, offset, bias, scheme)
    return product


SPECS = (
    OpSpec(
        targets=(QUANTISED_LINEAR,),
        rule=_quantised_linear,
        kernels={QUANTISED_LINEAR: quantised_linear},
        cost_class=CostClass.MATRIX,
        # Scales stay float32 under mixed precision, as a bias does, which is cast where it is added.
        precision=Precision.NARROW_INPUT,
    ),
)
