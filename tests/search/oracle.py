"""A second way to the frontier of a chain or a tree, in plain Python: it takes nothing from the package.

The table of an operator holds, per configuration, the frontier of all that hangs below it. An operator takes
its children one by one: *union over the child's configurations of child + edge*, added to what it has. Costs
are whole numbers, so that sums are the same in any order.
"""

from __future__ import annotations

import random

Points = list[tuple[int, int]]


def staircase(points: Points) -> Points:
    """What no other point beats, memory ascending, time descending."""
    kept: Points = []
    for m, t in sorted(points):
        if not kept or t < kept[-1][1]:
            kept.append((m, t))
    return kept


def shifted(points: Points, options: Points) -> Points:
    """Every point with every option added, in ascending runs."""
    return [(m + dm, t + dt) for dm, dt in options for m, t in points]


class Tree:
    """Operators numbered so that a parent comes before its children.

    Attributes:
        parents: per operator its parent; None for the first.
        nodes: per operator and configuration its options.
        edges: per operator but the first, by its parent's configuration and its own, the options of the edge
            above it.
    """

    def __init__(self, seed: int, parents: list[int | None], configurations: int, options: int, most: int):
        self.rng, self.most = random.Random(seed), most
        self.parents = parents
        self.nodes = [
            [self._options(self.rng.randint(1, options)) for _ in range(self.rng.randint(2, configurations))]
            for _ in parents
        ]
        self.edges: list[list[list[Points]]] = [[]]
        for v, parent in enumerate(parents):
            if parent is not None:
                self.edges.append([[self._edge() for _ in self.nodes[v]] for _ in self.nodes[parent]])

    def _options(self, count: int) -> Points:
        """Whole costs on a falling line with noise, so that long frontiers come about."""
        found = []
        for _ in range(count):
            memory, noise = self.rng.randrange(self.most), self.most // 8
            time = self.most - memory + self.rng.randrange(-noise, noise)
            found.append((memory, max(0, time)))
        return found

    def _edge(self) -> Points:
        if self.rng.random() < 0.04:
            return []  # these two configurations do not go together
        return [(0, 0)] if self.rng.random() < 0.4 else self._options(self.rng.choice((1, 1, 2)))

    def frontier(self) -> Points:
        """Every trade-off between memory and time of the whole tree."""
        tables = [[staircase(options) for options in node] for node in self.nodes]
        for v in range(len(self.parents) - 1, 0, -1):
            parent, below = self.parents[v], tables[v]
            tables[parent] = [
                _together(own, self._message(v, k, below)) for k, own in enumerate(tables[parent])
            ]
            tables[v] = []
        return staircase([point for front in tables[0] for point in front])

    def _message(self, v: int, k: int, below: list[Points]) -> Points:
        """Least costs of what hangs below an operator where its parent has configuration ``k``."""
        pairs = zip(self.edges[v][k], below, strict=True)
        return staircase([point for options, front in pairs for point in shifted(front, options)])


def _together(left: Points, right: Points) -> Points:
    short, long = sorted((left, right), key=len)
    return staircase(shifted(long, short))


def chain(operators: int) -> list[int | None]:
    return [None, *range(operators - 1)]


def with_twigs(operators: int, seed: int) -> list[int | None]:
    """A chain from which twigs of up to four operators hang."""
    rng = random.Random(seed)
    parents: list[int | None] = [None]
    trunk = 0
    while len(parents) < operators:
        parents.append(trunk)
        trunk = len(parents) - 1
        if rng.random() < 0.4:
            end = trunk
            for _ in range(rng.randint(1, 4)):
                parents.append(end)
                end = len(parents) - 1
    return parents


def any_tree(operators: int, seed: int) -> list[int | None]:
    """Every operator below one of the four before it."""
    rng = random.Random(seed)
    return [None, *(rng.randrange(max(0, v - 4), v) for v in range(1, operators))]
