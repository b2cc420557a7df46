"""Index spaces: an operator as a nest of loops, and which loops run over each dim of its tensors.

``linear`` is ``y[b,s,o] = sum_i x[b,s,i] * w[o,i] + bias[o]``: four loops, three operands read, one written.
Each mesh axis splits one loop or none; :func:`operand_placement` derives the placements of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from math import gcd, prod
from typing import Any

from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Atoms

NONE = REPLICATE
"""The choice of an axis that splits no loop."""


@dataclass(frozen=True, slots=True)
class LoopDim:
    """One loop of an operator's loop nest.

    Attributes:
        name: unique name within the operator.
        size: number of iterations on all ranks together.
        splittable: whether a mesh axis may split the loop.
        uneven: whether an axis may cut it into unequal shards if these are large (vocabularies).
        growing: whether later iterations take more work, as in causal attention.
        along: for a joint loop, the loops of different operands that one axis splits at once; the kernel
            exchanges data between the ranks.
        aligned: whether the loops of ``along`` run over the same positions; then only the first must be
            splittable.
        small_parts: whether unequal shards may have any size but 0 (samples, positions, heads).
        blocks: whether only the outermost factor may be split, because the kernel finds a shard by its start.
    """

    name: str
    size: int
    splittable: bool = True
    uneven: bool = False
    growing: bool = False
    along: tuple[int, ...] = ()
    aligned: bool = False
    small_parts: bool = False
    blocks: bool = False

    def cut_together(self, dims: Sequence[LoopDim]) -> bool:
        """Return whether one axis may split all loops of ``along``; ``dims`` are the operator's loops."""
        cut = [dims[loop].splittable for loop in self.along]
        return cut[0] if self.aligned else all(cut)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator reads or writes, and the loops that run over its dims.

    Attributes:
        dims: numbers of the loops of each tensor dim, outermost first; none for size 1 or a dim never split.
        added: whether the operand is added outside the summation, like a bias.
        synced: summed loops over which the kernel itself reduces (a batch norm's statistics).
        means: loops over which the operator averages; its kernel divides each shard's result, so that they
            add up.
    """

    tensor: str
    dims: tuple[tuple[int, ...], ...]
    added: bool = False
    synced: tuple[int, ...] = ()
    means: tuple[int, ...] = ()

    @property
    def loops(self) -> tuple[int, ...]:
        """The numbers of the operand's loops in order; after refinement, one per factor (atom) of a dim."""
        return tuple(loop for dim in self.dims for loop in dim)


@dataclass(frozen=True, slots=True)
class IndexSpace:
    """The loops and operands of one operator.

    Attributes:
        reads, writes: operands in argument order, and results in output order.
        linear: whether the operator is linear in all activations jointly, so that partial sums may pass
            through.
        cheap: whether the operator only moves or rescales data, so that it takes over its producer's splits.
        known: whether a rule or discovery made the space; False for the fallback without loops.
        discovered: whether discovery made the space, by running the operator in pieces.
        additive: whether backward is linear in the gradient, so that partial gradients may be added after it.
    """

    dims: tuple[LoopDim, ...]
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    linear: bool = False
    cheap: bool = False
    known: bool = True
    discovered: bool = False
    additive: bool = True


def operand_placement(space: IndexSpace, operand: Operand, choice: int, *, written: bool) -> int:
    """Return the placement code of an operand on a mesh axis that splits the loop ``choice``.

    A negative ``choice`` (``NONE``, ``PARTIAL`` or ``PARTIAL_GRAD``) is returned unchanged. For a sharded
    operand, the code is the index of the split loop among the operand's loops; after refinement, this is the
    number of the split factor (atom) of its dims. The README of ``ops`` has the table of all cases.
    """
    if choice < 0:
        return choice
    cut = space.dims[choice].along or (choice,)
    for position, loop in enumerate(operand.loops):
        if loop in cut:
            return position
    if space.dims[choice].along:
        # The kernel fetches other parts' data; each part contributes to the gradient.
        return PARTIAL if written else PARTIAL_GRAD
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


Loops = int | None | Sequence[int]
"""The loops of a tensor's dim: one, several from the outermost on, or None if it is never split."""
Rule = Callable[["Builder"], None]
"""A function that describes one operator to a builder, or raises :class:`Opaque`."""


class Opaque(Exception):  # noqa: N818 - a signal, not an error
    """Raised by a rule that cannot describe a call; discovery then looks for splits, as without a rule."""


def alike(names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that names arguments a rule need not read, because shards take the same values, or
    values that follow from their shapes.

    Args:
        names: names of arguments, separated by blanks; ``*`` for all that are no tensors.
    """

    def marked(rule: Rule) -> Rule:
        _ALIKE[rule] = frozenset(names.split())
        return rule

    return marked


_ALIKE: dict[Rule, frozenset[str]] = {}
_ALWAYS_ALIKE = frozenset({
    "copy", "cudnn_enable", "cudnn_enabled", "device", "dtype", "eps", "generator", "half_to_float",
    "implicit", "layout", "memory_format", "momentum", "non_blocking", "out_dtype", "pin_memory",
})  # fmt: skip


def need_not_ask(rule: Rule, argument: str) -> bool:
    names = _ALIKE.get(rule, frozenset())
    return argument in _ALWAYS_ALIKE or argument in names or "*" in names


class Builder:
    """A collector of the loops and operands of one operator, filled by the operator's rule.

    A label gives the loops of one tensor dim: a loop's number, several (outermost first), or None for a dim
    that is never split. Dims of size 1 have no loop.
    """

    def __init__(self, op: Operator, graph: OperatorGraph):
        self.op = op
        self.graph = graph
        self.linear = False
        self.cheap = False
        self._loops: list[LoopDim] = []
        self._reads: dict[str, list[Operand]] = {}
        self._writes: dict[str, Operand] = {}
        self.consulted: set[int | str] = set()
        """Positions and names of the arguments that the rule has read."""

    # -- arguments --------------------------------------------------------------------------------

    def arg(self, index: int, name: str | None = None, default: Any = None) -> Any:
        self.consulted |= {index} if name is None else {index, name}
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default) if name is not None else default

    def tensor(self, value: Any) -> Tensor:
        """Return the tensor to which an argument refers; raise Opaque if it refers to none."""
        if not isinstance(value, Ref):
            raise Opaque(f"{self.op.name}: expected a tensor, found {value!r}")
        return self.graph.tensors[value.name]

    def output(self, index: int = 0) -> Tensor:
        return self.graph.tensors[self.op.outputs[index]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first argument."""
        return self.tensor(self.arg(0)).shape

    def dim(self, index: int, name: str | None = None, default: int | None = None) -> int:
        """Return an argument that is the number of a dim of the first argument, counted from the front."""
        dim: int = self.arg(index, name, default) % max(len(self.shape), 1)
        return dim

    # -- loops ------------------------------------------------------------------------------------

    def loop(self, name: str, size: int, *, splittable: bool = True, **flags: Any) -> int:
        """Add a loop and return its number; a name that is taken gets a numeral.

        Args:
            flags: ``uneven``, ``growing``, ``small_parts`` and ``blocks`` of :class:`LoopDim`.
        """
        used = {loop.name for loop in self._loops}
        numbered = (f"{name}{number}" for number in count(2))
        unique = next(text for text in chain([name], numbered) if text not in used)
        # Loops of size 1 exist so that rules need not treat them specially, but no axis may cut them.
        self._loops.append(LoopDim(unique, size, splittable and size > 1, **flags))
        return len(self._loops) - 1

    def together(self, name: str, loops: Sequence[int], *, aligned: bool = False) -> None:
        """Add a joint loop called ``name``: a mesh axis that splits it splits all of ``loops`` at once. For
        example, ring attention splits the positions of queries and those of keys.

        Args:
            loops: numbers of loops, each of a different operand.
            aligned: whether all of ``loops`` run over the same positions; then only the first must be
                splittable.
        """
        # Of its size only the loops' own count, which `fits` in configurations.py divides.
        sizes = [self._loops[loop].size for loop in loops]
        dim = LoopDim(name, min(sizes), along=tuple(loops), aligned=aligned)
        self._loops.append(replace(dim, splittable=dim.cut_together(self._loops)))

    def loops(self, shape: Sequence[int], prefix: str = "d", **flags: bool) -> list[int]:
        """Add one loop per dim of a shape, called ``d0``, ``d1``, ...; return their numbers."""
        return [self.loop(f"{prefix}{i}", size, **flags) for i, size in enumerate(shape)]

    def around(self, touched: Collection[int], *, added: bool = False) -> list[Loops]:
        """Describe the first argument with one new loop per dim; the dims ``touched`` stay whole."""
        labels: list[Loops] = [
            None if i in touched else self.loop(f"d{i}", size) for i, size in enumerate(self.shape)
        ]
        self.read(self.arg(0), labels, added=added)
        return labels

    def along(self, *touched: int) -> list[Loops]:
        """Describe the first argument and all results with one loop per dim; dims ``touched`` stay whole."""
        labels = self.around(touched)
        for index in range(len(self.op.outputs)):
            self.write(labels, index)
        return labels

    def _operand(self, name: str, labels: Sequence[Loops] | None = None, **fields: Any) -> Operand:
        shape = self.graph.tensors[name].shape
        labels = [None] * len(shape) if labels is None else labels
        assert len(labels) == len(shape), f"{self.op.name}: {len(labels)} labels for {name} of shape {shape}"
        dims: list[tuple[int, ...]] = []
        for size, label in zip(shape, labels, strict=True):
            if size == 1 or label is None:
                dims.append(())
            elif isinstance(label, int):
                dims.append((label,))
            else:
                dims.append(tuple(loop for loop in label if self._loops[loop].size > 1))
        return Operand(name, tuple(dims), **fields)

    def read(self, value: Any, labels: Sequence[Loops], *, added: bool = False) -> None:
        """Describe a tensor argument by one label (its loops) per dim; an argument None is skipped."""
        if isinstance(value, Ref):
            # A list, because a tensor that is read twice (`x @ x.T`) is addressed differently each time.
            self._reads.setdefault(value.name, []).append(self._operand(value.name, labels, added=added))

    def write(self, labels: Sequence[Loops], index: int = 0, **loops: Sequence[int]) -> None:
        """Describe an output by one label per dim; ``loops``: ``synced`` and ``means`` of
        :class:`Operand`."""
        name = self.op.outputs[index]
        self._writes[name] = self._operand(name, labels, **{kind: tuple(of) for kind, of in loops.items()})

    def leaves_out_a_result(self) -> bool:
        """Return whether the rule has left out a result that is used."""
        graph, described = self.graph, self._writes
        used = [*graph.outputs, *graph.mutations.values()]
        return any(
            name not in described and (name in graph.consumers or name in used) for name in self.op.outputs
        )

    def build(self, known: bool = True) -> IndexSpace:
        """Return the index space; tensors that the rule did not describe are never split."""
        reads = []
        for name in self.op.inputs():
            described = self._reads.get(name)
            if described:
                # In the order of reading; the last description applies to all further occurrences.
                reads.append(described.pop(0) if len(described) > 1 else described[0])
            else:
                reads.append(self._operand(name))
        writes = tuple(self._writes.get(name) or self._operand(name) for name in self.op.outputs)
        return IndexSpace(tuple(self._loops), tuple(reads), writes, self.linear, self.cheap, known)


@dataclass(frozen=True)
class AtomGraph:
    """An operator graph whose loops are refined into atoms: the finest factors of dims that any view needs.

    Attributes:
        graph: the operator graph.
        spaces: index space of each operator; loop ``j`` of an operand is atom ``j`` of its tensor.
        atoms: sizes of the atoms of each dim, by tensor.
        discovered: splits found by running an operator in pieces, by operator without a rule.
        zigzag: (tensor, number of the atom) of each atom that zig-zag order of sequences may cut.
    """

    graph: OperatorGraph
    spaces: Mapping[str, IndexSpace]
    atoms: Mapping[str, Atoms]
    discovered: Mapping[str, Any] = field(default_factory=dict)
    zigzag: frozenset[tuple[str, int]] = frozenset()

    def may_zigzag(self, mesh: Sequence[int]) -> bool:
        """Return whether this mesh can cut sequences into two chunks per rank, as zig-zag order needs."""
        return bool(self.zigzag) and self._common_divisor % (2 * prod(mesh[1:])) == 0

    @cached_property
    def _common_divisor(self) -> int:
        return gcd(*(self.atom_sizes(name)[position] for name, position in self.zigzag))

    def lost(self) -> dict[str, str]:
        """Return, by target, why splits could not be discovered: a crash, a hang, or a wrong fake kernel."""
        targets = self.graph.by_name
        return {
            targets[name].target: discovery.refused
            for name, discovery in self.discovered.items()
            if discovery.lost or discovery.wrong
        }

    def atom_sizes(self, tensor: str) -> tuple[int, ...]:
        """Return the sizes of all atoms of a tensor, outermost first."""
        return tuple(size for dim in self.atoms[tensor] for size in dim)


def canonical(tensor: Tensor, code: int) -> int:
    """Return ``code``, but R (whole) for R/P (whole, partial gradients) if the tensor has no gradient."""
    return REPLICATE if code == PARTIAL_GRAD and not tensor.requires_grad else code
