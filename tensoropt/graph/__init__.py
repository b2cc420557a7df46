"""The computation: tensors, operators and the graph they form (no PyTorch needed)."""

from tensoropt.graph.ir import (
    DTYPE_BYTES,
    FLOATING,
    Operator,
    OperatorGraph,
    Ref,
    Tensor,
    TorchLiteral,
    iter_refs,
    map_refs,
)

__all__ = [
    "DTYPE_BYTES",
    "FLOATING",
    "Operator",
    "OperatorGraph",
    "Ref",
    "Tensor",
    "TorchLiteral",
    "iter_refs",
    "map_refs",
]
