"""What a group does on one mesh axis, in the words of plans and constraints: ``rows.1@S(0)``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.ops.layouts import placement_code, placement_name


@dataclass(frozen=True, slots=True)
class Label:
    """The loop that an axis splits, and how the partial sum that this leaves is resolved.

    Its text stands in plans and explorations: ``loop``, ``loop.atom``, ``loop@placement``.

    Attributes:
        loop: a loop of the anchor's index space as its rule names it, or ``none``, ``partial`` or
            ``partial_grad``.
        atom: which atom of that loop, from the outermost on; None where the loop is a single atom.
        resolve: the placement code that the anchor's partial output is turned into before its followers read
            it; None where it stays as it is.
    """

    loop: str
    atom: int | None = None
    resolve: int | None = None

    def __str__(self) -> str:
        return self.dim if self.resolve is None else f"{self.dim}@{placement_name(self.resolve)}"

    @property
    def dim(self) -> str:
        """The name of the atom that is split, in the refined index space."""
        return self.loop if self.atom is None else f"{self.loop}.{self.atom}"

    @property
    def splits(self) -> bool:
        """Whether a loop is split at all."""
        return self.loop not in NO_LOOP

    def resolved(self, code: int) -> Label:
        """The same split with its partial sum turned into the placement ``code``."""
        return replace(self, resolve=code)

    @classmethod
    def parse(cls, text: str) -> Label:
        """Inverse of ``str``.

        Raises:
            ValueError: the atom is no number, or what follows ``@`` is no placement.
        """
        dim, _, resolve = text.partition("@")
        loop, _, atom = dim.partition(".")
        return cls(loop, int(atom) if atom else None, placement_code(resolve) if resolve else None)


WHOLE, PASSED_ON, PARTIAL_GRADIENT = Label("none"), Label("partial"), Label("partial_grad")
"""Nothing is split; a partial sum passes through; every rank computes the whole of which gradients add up."""
NO_LOOP = frozenset(label.loop for label in (WHOLE, PASSED_ON, PARTIAL_GRADIENT))
