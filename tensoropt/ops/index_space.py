"""Index spaces: the loop nest of an operator, and how its loops address its tensors.

``linear`` is ``y[b,s,o] = sum_i x[b,s,i] * w[o,i] + bias[o]``: four loop dims, three operands read, one
written. A configuration assigns one loop dim, or none, to each mesh axis; every placement then follows from
:func:`operand_placement`, the one table on which all sharding rests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE

NONE = REPLICATE
"""The assignment of an axis that splits nothing."""


@dataclass(frozen=True, slots=True)
class LoopDim:
    """One loop of the nest.

    Attributes:
        name: for people; unique within the operator.
        size: global trip count.
        splittable: whether a mesh axis may cut it.
        uneven: whether it may be cut into unequal shards (vocabularies, output features).
    """

    name: str
    size: int
    splittable: bool = True
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that is read or written: per tensor dim, the loop dims that make it up, outermost first.

    An empty tuple is a dim that no loop indexes: size 1, broadcast, or opaque. ``added`` marks an operand
    added outside the contraction (a bias). ``synced`` lists contracted loops over which ``local`` itself
    reduces (statistics of a batch norm), so that the result is whole; ``means`` lists those over which the
    result is an average, which ``local`` divides so that its parts add up.
    """

    tensor: str
    dims: tuple[tuple[int, ...], ...]
    added: bool = False
    synced: tuple[int, ...] = ()
    means: tuple[int, ...] = ()

    @property
    def loops(self) -> frozenset[int]:
        """All loops that index the tensor."""
        return frozenset(loop for dim in self.dims for loop in dim)


@dataclass(frozen=True, slots=True)
class IndexSpace:
    """The loop dims and operands of one operator.

    Attributes:
        reads, writes: operands in argument and output order.
        linear: linear in all its activations jointly, so that a partial sum may pass through.
        cheap: only moves or rescales data; it follows the operator that feeds it.
        known: made by a rule or by discovery (False: the fallback that splits nothing).
        discovered: determined by running the operator in pieces.
        additive: the backward of a sum of gradients is the sum of their backwards, so they may be added
        afterwards.
    """

    dims: tuple[LoopDim, ...]
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    linear: bool = False
    cheap: bool = False
    known: bool = True
    discovered: bool = False
    additive: bool = True

    def with_dims(self, dims: tuple[LoopDim, ...]) -> IndexSpace:
        """The same operands over other loops."""
        return replace(self, dims=dims)


def operand_placement(space: IndexSpace, operand: Operand, choice: int, *, written: bool) -> int:
    """The placement code of an operand on an axis with this choice; the README of ``ops`` has the table.

    ``choice`` is a loop dim, or ``NONE``, ``PARTIAL`` or ``PARTIAL_GRAD``. The code of a sharded operand is
    the position of the loop among the operand's loops, which is the atom's position in the tensor once the
    space is refined into atoms.
    """
    if choice < 0:
        return choice
    position = 0
    for dim in operand.dims:
        for loop in dim:
            if loop == choice:
                return position
            position += 1
    # The kernel has already reduced it.
    if choice in operand.synced:
        return REPLICATE
    if written:
        return PARTIAL
    # A bias is one summand of a contracted sum: on all parts it would be added once per part.
    contracted = not any(choice in output.loops for output in space.writes)
    if operand.added and contracted:
        return PARTIAL
    # Without the loop, all parts see the same operand, and each of them gives a part of its gradient.
    return PARTIAL_GRAD
