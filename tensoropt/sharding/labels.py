"""The labels of a group's behaviour on one mesh axis, as in plans and constraints: ``rows.1@S(0)``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.ops.layouts import placement_code, placement_name


@dataclass(frozen=True, slots=True)
class Label:
    """The loop that an axis splits, and how the resulting partial sum is resolved.

    Plans and explorations contain its text: ``loop``, ``loop.atom``, ``loop@placement``.

    Attributes:
        loop: a loop of the anchor's index space, as named by its rule, or ``none``, ``partial`` or
            ``partial_grad``.
        atom: the number of the atom in that loop, from the outermost on; None if the loop is a single atom.
        resolve: the placement code into which the anchor's partial output is converted before its followers
            read it; None if it stays unchanged.
    """

    loop: str
    atom: int | None = None
    resolve: int | None = None

    def __str__(self) -> str:
        return self.dim if self.resolve is None else f"{self.dim}@{placement_name(self.resolve)}"

    @property
    def dim(self) -> str:
        """The name of the split atom in the refined index space."""
        return self.loop if self.atom is None else f"{self.loop}.{self.atom}"

    @property
    def splits(self) -> bool:
        """Whether any loop is split."""
        return self.loop not in NO_LOOP

    def resolved(self, code: int) -> Label:
        """The same split, with its partial sum converted to the placement ``code``."""
        return replace(self, resolve=code)

    @classmethod
    def parse(cls, text: str) -> Label:
        """Inverse of ``str``.

        Raises:
            ValueError: the atom is not a number, or the text after ``@`` is not a placement.
        """
        dim, _, resolve = text.partition("@")
        loop, _, atom = dim.partition(".")
        return cls(loop, int(atom) if atom else None, placement_code(resolve) if resolve else None)


WHOLE, PASSED_ON, PARTIAL_GRADIENT = Label("none"), Label("partial"), Label("partial_grad")
"""Nothing is split; a partial sum passes through; every rank computes everything, and the gradients add
up."""
NO_LOOP = frozenset(label.loop for label in (WHOLE, PASSED_ON, PARTIAL_GRADIENT))
