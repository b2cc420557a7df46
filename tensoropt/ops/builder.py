"""The tools with which index-space rules are written.

A rule is a function of a :class:`Builder`: it names the operator's loops and says how they address each
tensor that is read or written. A dim that is never mentioned is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor
from tensoropt.ops.index_space import IndexSpace, LoopDim, Operand

Loops = int | None | Sequence[int]
"""Loops that make up a tensor's dim: one loop, loops from the outermost on, or None if it is never split."""
Rule = Callable[["Builder"], None]
"""A function that describes one operator, or raises :class:`Opaque`."""


class Opaque(Exception):  # noqa: N818 - a signal, not an error
    """Raised by a rule that cannot describe a call; the operator is then kept whole."""


class Builder:
    """A collector of the loops and operands of one operator.

    Labels are given per tensor dim: a loop, a sequence of loops (outermost first), or None for a dim that is
    never split. Dims of size 1 lose their labels, because they are broadcast or trivial.
    """

    def __init__(self, op: Operator, graph: OperatorGraph):
        self.op = op
        self.graph = graph
        self.linear = False
        self.cheap = False
        self._loops: list[LoopDim] = []
        self._reads: dict[str, list[Operand]] = {}
        self._writes: dict[str, Operand] = {}

    # -- arguments --------------------------------------------------------------------------------

    def arg(self, index: int, name: str | None = None, default: Any = None) -> Any:
        """An argument of the call, by position or by name."""
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default) if name is not None else default

    def tensor(self, value: Any) -> Tensor:
        """The tensor that an argument refers to.

        Raises:
            Opaque: the argument is None where rules expect a tensor.
        """
        if not isinstance(value, Ref):
            raise Opaque(f"{self.op.name}: expected a tensor, found {value!r}")
        return self.graph.tensors[value.name]

    def output(self, index: int = 0) -> Tensor:
        """The tensor at this position in the results."""
        return self.graph.tensors[self.op.outputs[index]]

    # -- loops ------------------------------------------------------------------------------------

    def loop(self, name: str, size: int, *, splittable: bool = True, uneven: bool = False) -> int:
        """Add a loop to the nest; its name gets a number if another loop already has that name."""
        used = {loop.name for loop in self._loops}
        unique, count = name, 1
        while unique in used:
            count += 1
            unique = f"{name}{count}"
        # Loops of size 1 exist so that rules need not treat them specially, but no axis may cut them.
        self._loops.append(LoopDim(unique, size, splittable and size > 1, uneven))
        return len(self._loops) - 1

    def loops(self, shape: Sequence[int], prefix: str = "d", **flags: bool) -> list[int]:
        """Add one loop per dim of a shape: ``d0``, ``d1``, ..."""
        return [self.loop(f"{prefix}{i}", size, **flags) for i, size in enumerate(shape)]

    def _operand(
        self,
        name: str,
        labels: Sequence[Loops],
        added: bool,
        synced: Sequence[int] = (),
        means: Sequence[int] = (),
    ) -> Operand:
        shape = self.graph.tensors[name].shape
        assert len(labels) == len(shape), f"{self.op.name}: {len(labels)} labels for {name} of shape {shape}"
        dims: list[tuple[int, ...]] = []
        for size, label in zip(shape, labels, strict=True):
            if size == 1 or label is None:
                dims.append(())
            elif isinstance(label, int):
                dims.append((label,))
            else:
                dims.append(tuple(loop for loop in label if self._loops[loop].size > 1))
        return Operand(name, tuple(dims), added, tuple(synced), tuple(means))

    def read(self, value: Any, labels: Sequence[Loops], *, added: bool = False) -> None:
        """Describe a tensor argument; None arguments are ignored."""
        if isinstance(value, Ref):
            # A list, because a tensor that is read twice (`x @ x.T`) is addressed differently each time.
            self._reads.setdefault(value.name, []).append(self._operand(value.name, labels, added))

    def write(
        self,
        labels: Sequence[Loops],
        index: int = 0,
        *,
        synced: Sequence[int] = (),
        means: Sequence[int] = (),
    ) -> None:
        """Describe an output; the operator's ``local`` itself reduces the ``synced`` loops, and the output is
        an average over the ``means`` loops."""
        name = self.op.outputs[index]
        self._writes[name] = self._operand(name, labels, False, synced, means)

    def build(self, known: bool = True) -> IndexSpace:
        """Return the index space that was described; tensors that were not mentioned have no loops."""
        reads = []
        for name in self.op.inputs():
            described = self._reads.get(name)
            if described:
                # In the order of reading; the last description applies to all further occurrences.
                reads.append(described.pop(0) if len(described) > 1 else described[0])
            else:
                reads.append(self._operand(name, [None] * len(self.graph.tensors[name].shape), False))
        writes = tuple(
            self._writes.get(name) or self._operand(name, [None] * len(self.graph.tensors[name].shape), False)
            for name in self.op.outputs
        )
        return IndexSpace(tuple(self._loops), tuple(reads), writes, self.linear, self.cheap, known)
