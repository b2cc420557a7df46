"""The boxes of the operator graph: modules inside modules, with equal blocks folded into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tensoropt.report.step_parts import kind_of


class Foldable(Protocol):
    """An operator, by what has to be the same of those that are folded into one."""

    @property
    def group(self) -> str:
        """Its name."""

    @property
    def module(self) -> str:
        """The path of its module."""

    @property
    def axes(self) -> str:
        """How it is split."""

    @property
    def options(self) -> str:
        """How it is stored, and in a pipeline its stage."""

    @property
    def recomputed(self) -> bool:
        """Whether it is computed again in backward."""


@dataclass(frozen=True)
class Box:
    """The box of an operator, inside those of its modules.

    Attributes:
        path: the names of the modules around it, from the outermost: ``network``, ``h.0–11``, ``mlp.c_fc``.
        block: its own block, ``h.3``; "" outside of blocks.
        blocks: how many equal blocks are folded into one here.
    """

    path: tuple[str, ...]
    block: str = ""
    blocks: int = 1


def boxes(rows: Sequence[Foldable]) -> dict[str, Box]:
    """Return the box of each operator, by its name.

    A block is a module with a number for a name, as in a list of layers. Blocks that follow each other are
    equal if their operators are: by module, kind, split, storage and recomputation; in a pipeline also by
    stage. A module's own operators have a box for each time that the model comes back to it, so that the
    second addition of a block follows its MLP.

    Args:
        rows: operators in the model's order.
    """
    blocks: dict[tuple[str, ...], list[Foldable]] = {}
    for row in rows:
        blocks.setdefault(_block(row), []).append(row)
    outer = {
        ".".join(path[:end])
        for row in rows
        for path in [row.module.split(".")]
        for end in range(1, len(path))
    }
    run_of = {block: run for run in _runs(blocks) for block in run}
    found, times, before = {}, Counter[str](), ""
    for row in rows:
        block, path = _block(row), row.module.split(".") if row.module else [row.group]
        run = run_of.get(block, ())
        names = path
        if run:
            first, last = run[0][-1], run[-1][-1]
            name = ".".join([*block[-2:-1], first if first == last else f"{first}–{last}"])
            names = [*path[: max(len(block) - 2, 0)], name, *path[len(block) :]]
        if row.module in outer:
            times[row.module] += row.module != before
            names = [*names, f"#{times[row.module]}"]
        before = row.module
        found[row.group] = Box(tuple(names), ".".join(block), max(len(run), 1))
    return found


def _block(row: Foldable) -> tuple[str, ...]:
    """Return the path of the outermost block that an operator is in; empty outside of blocks."""
    path = row.module.split(".")
    number = next((at for at, name in enumerate(path) if name.isdigit()), None)
    return () if number is None else tuple(path[: number + 1])


def _runs(blocks: dict[tuple[str, ...], list[Foldable]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield equal blocks that follow each other, a list for each run."""
    run: list[tuple[str, ...]] = []
    for block in filter(None, blocks):
        if (
            run
            and block[:-1] == run[-1][:-1]
            and int(block[-1]) == int(run[-1][-1]) + 1
            and (_looks(block, blocks[block]) == _looks(run[-1], blocks[run[-1]]))
        ):
            run.append(block)
            continue
        if run:
            yield run
        run = [block]
    if run:
        yield run


def _looks(block: tuple[str, ...], rows: Sequence[Foldable]) -> list[tuple[object, ...]]:
    return [
        (r.module.split(".")[len(block) :], kind_of(r.group), r.axes, r.options, r.recomputed) for r in rows
    ]


def keys(boxed: dict[str, Box], most: int, opened: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each operator, the path of the box that shows it: as many levels as stay under ``most``
    boxes, and what was opened.

    Args:
        opened: the names of boxes that a person opened.
    """
    deepest = max((len(box.path) for box in boxed.values()), default=1)
    depth = next((d for d in range(deepest, 1, -1) if len({b.path[:d] for b in boxed.values()}) <= most), 1)
    shown = {}
    for group, box in boxed.items():
        end = depth
        while end < len(box.path) and ".".join(box.path[:end]) in opened:
            end += 1
        shown[group] = box.path[:end]
    return shown
