"""The reduction of an activation's gradient, overlapped with the product that computes the weight's gradient.

The backward of a linear operator computes two products: the gradient of its input, and that of its weight. A
resharding reduces the first one on its way back; the second one does not depend on it, so it is computed
while the first is being sent. Megatron-LM does this (``LinearWithGradAccumulationAndAsyncCommunication``;
Narayanan et al., SC 2021; with sequence parallelism, where the gradient is scattered: Korthikanti et al.,
arXiv 2205.05198, section 4.2.2).

The executor and the costs both use this module, so that they agree on every edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensoropt.graph import Operator, OperatorGraph, Ref
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.reshard.steps import Step


@dataclass(frozen=True)
class LinearProduct:
    """A linear operator and its operands.

    Attributes:
        operator, group: the names of the operator and of its group, whose anchor it is.
        read, weight, bias: names of its operands; "" if there is no bias.
        transposed: the weight is stored as (outputs, inputs); otherwise as (inputs, outputs).
    """

    operator: str
    group: str
    read: str
    weight: str
    bias: str
    transposed: bool


def products_beside(graph: GroupGraph) -> Mapping[str, LinearProduct]:
    """The linear operator of each activation whose backward gives both its gradient and that of a weight.

    Of several readers it is the first one, which backward reaches last, when the gradients of the others
    already exist.
    """
    source = graph.atoms.graph
    if not source.training:
        return {}
    readers: dict[str, list[Group]] = {}
    for group in graph.groups:
        for name in group.reads:
            readers.setdefault(name, []).append(group)
    leaving, found = {*source.outputs, *source.mutations.values()}, {}
    for name, groups in readers.items():
        product = reader_product(source, groups[0], name)
        if product is None or name in leaving or not source.tensors[name].requires_grad:
            continue
        others = (op.name for group in groups[1:] for op in group.operators if name in op.inputs())
        # Groups come in the order of their anchors; an operator that joined one of them may come earlier than
        # a later anchor.
        if all(source.places[other] > source.places[product.operator] for other in others):
            found[name] = product
    return found


def reader_product(source: OperatorGraph, group: Group, name: str) -> LinearProduct | None:
    """The linear operator of a group that is the only reader of a tensor there; None if there is none."""
    product = linear_product(source, group.anchor, group.name)
    if product is None or product.read != name:
        return None
    return product if sum(op.inputs().count(name) for op in group.operators) == 1 else None


def linear_product(source: OperatorGraph, op: Operator, group: str) -> LinearProduct | None:
    """The operands of a linear operator whose weight is a trained parameter; None for any other operator."""
    places = spec_of(op.target).linear
    # Other arguments scale its operands.
    if places is None or set(op.kwargs) - {"bias"}:
        return None
    arguments = (*op.args, *op.kwargs.values())
    operands = [arguments[place] if place < len(arguments) else None for place in places[:3]]
    read, weight, bias = (one.name if isinstance(one, Ref) else "" for one in operands)
    if not read or not weight:
        return None
    tensors = source.tensors
    parameter = tensors[weight]
    learns = parameter.kind == "parameter" and parameter.requires_grad
    if not learns or len(parameter.shape) != 2 or len(tensors[read].shape) < 2:
        return None
    if bias and (len(tensors[bias].shape) != 1 or bias in (read, weight)):
        return None
    return LinearProduct(op.name, group, read, weight, bias, places.transposed)


def is_one_reduction(backward: Sequence[Step], mesh: Sequence[int]) -> bool:
    """Whether a gradient takes a single step on its way back, which sums it over several ranks."""
    if len(backward) != 1 or backward[0].kind not in ("all_reduce", "reduce_scatter"):
        return False
    return any(axis > 0 and mesh[axis] > 1 for axis in backward[0].axes)


def takes_over_hub(own: tuple[Sequence[Step], Sequence[Step]], *, again: bool, inside: bool) -> bool:
    """Whether the first reader of a hub can return the hub's whole gradient to where the hub was made.

    Args:
        own: the (forward, backward) steps from the hub to this reader.
        again: the reader is recomputed.
        inside: the hub is produced in the reader's region.
    """
    # A recomputed reader would pass the hub on once more to readers outside its region.
    return not own[0] and not own[1] and (inside or not again)
