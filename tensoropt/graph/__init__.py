"""The computation of a model as plain data: tensors, operators and their graph, without PyTorch."""

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
