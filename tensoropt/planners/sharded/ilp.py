"""Find the shortest step within a memory limit by a 0-1 integer program.

L. Zheng et al., *Alpa*, OSDI 2022, section 4.2, equation 1: one binary per configuration, the quadratic edge
costs linearised, solved by an off-the-shelf solver. The memory constraint is AutoParallel's. Edge costs
depend only on classes of configurations (``EdgeTable.rows``, ``cols``). So there is one linearised variable
per pair of classes, tied to the binaries by transport constraints; their relaxation is tighter than that of
one product at a time. HiGHS solves the program (through ``scipy.optimize.milp``).

The limit applies to the simulated memory, which the program approximates by a sum. If the simulator finds
more, the excess is taken off the limit and the program is solved again, a few times at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from tensoropt.costs.tables import CostTables
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.results import simulated_points
from tensoropt.planners.task import PlanningTask, Selection

_TIME_LIMIT_S = 60.0
"""The seconds per program; an assumption. The best solution by then is returned with its proven gap."""

_ROUNDS = 4
"""The most times that a program is solved with a lower limit, if the simulator finds more memory; an
assumption."""
_GAP = 1e-6
"""The relative gap at which HiGHS may stop, and below which a solution counts as proven."""


@dataclass(frozen=True)
class _Solved:
    """A solution of the program. ``gap``: the proven relative gap to the optimum, 0 if it is optimal."""

    choice: dict[str, int]
    options: dict[Any, int]
    seconds: float
    memory_bytes: float
    gap: float


class _ZeroOneProgram:
    """The 0-1 program of the cost tables of one mesh and micro-batch count."""

    def __init__(self, tables: CostTables):
        self.tables = tables
        self.columns: list[tuple[float, float, bool]] = []
        """For each column of the program, its memory, its time, and whether it is a binary."""
        self.of: dict[str, list[tuple[int, int, int]]] = {}
        self.entries: list[tuple[int, int, float]] = []
        self.right: list[float] = []
        for variable in tables.variables:
            self.of[variable.key] = [
                (self._column(m, t, binary=True), index, option)
                for index, costs in enumerate(variable.costs)
                for option, (m, t) in enumerate(costs)
                if np.isfinite(m + t)
            ]
            self._row([(column, 1.0) for column, _, _ in self.of[variable.key]], 1.0)
        for edge in tables.edges:
            self._edge(edge.a, edge.b, edge.table, edge.rows, edge.cols)

    def _column(self, memory: float, time: float, *, binary: bool) -> int:
        self.columns.append((float(memory), float(time), binary))
        return len(self.columns) - 1

    def _row(self, terms: list[tuple[int, float]], right: float) -> None:
        number = len(self.right)
        self.entries += [(number, column, weight) for column, weight in terms]
        self.right.append(right)

    def _edge(self, a: str, b: str, table: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> None:
        """Add an edge's variables (a flow per pair of classes) and constraints that tie flows to choices."""
        # An edge that costs nothing anywhere needs neither columns nor rows.
        if not table.any():
            return
        possible = np.isfinite(table).all(axis=2)
        # Flows need not be integer: once both ends have chosen, the rows leave one flow of 1. A pair that is
        # impossible has no column, so that it cannot be chosen.
        flows = {
            (r, c): self._column(table[r, c, 0], table[r, c, 1], binary=False)
            for r, c in zip(*np.nonzero(possible), strict=True)
        }
        for name, classes, side, count in ((a, rows, 0, table.shape[0]), (b, cols, 1, table.shape[1])):
            terms: list[list[tuple[int, float]]] = [[] for _ in range(count)]
            for key, column in flows.items():
                terms[key[side]].append((column, 1.0))
            for column, index, _ in self.of[name]:
                terms[classes[index]].append((column, -1.0))
            for row in terms:
                if row:
                    self._row(row, 0.0)

    def solve(self, limit: float | None) -> _Solved | None:
        """Return the fastest strategy found with at most ``limit`` bytes in the additive model, or None."""
        memory, time, binary = np.array(self.columns).T
        # Bytes and seconds differ by many orders of magnitude; the solver's tolerances are for numbers around
        # 1.
        unit_m, unit_t = memory.max(initial=1.0), time.max(initial=1e-12)
        row, column, weight = (np.array(x) for x in zip(*self.entries, strict=True))
        matrix = sparse.csr_matrix((weight, (row, column)), shape=(len(self.right), len(time)))
        constraints = [LinearConstraint(matrix, self.right, self.right)]
        if limit is not None:
            constraints.append(LinearConstraint(sparse.csr_matrix(memory / unit_m), -np.inf, limit / unit_m))
        result = milp(
            time / unit_t,
            integrality=binary.astype(int),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": _GAP},
        )
        if result.x is None:
            return None
        choice: dict[str, int] = {}
        options: dict[Any, int] = {}
        for name, columns in self.of.items():
            # Binaries are 1 up to the solver's tolerance only.
            _, choice[name], options[name] = max(columns, key=lambda entry: result.x[entry[0]])
        memory_bytes, compute, communication = self.tables.breakdown(choice, options)
        gap = 0.0 if result.status == 0 else float(result.mip_gap or 0.0)
        return _Solved(choice, options, compute + communication, memory_bytes, gap)


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return the program's solutions for every mesh and micro-batch count.

    If the simulated memory exceeds the limit, the program is solved again with a lower limit.

    Raises:
        UnsuitableError: the solver found no solution within the limit and its time.
    """
    selections = []
    for number, space in enumerate(task.spaces):
        program, limit = _ZeroOneProgram(space.tables), memory_limit_bytes
        for _ in range(_ROUNDS):
            solved = program.solve(limit)
            if solved is None:
                break
            notes = (f"optimum not proven: gap {solved.gap:.2%}",) if solved.gap > _GAP else ()
            selection = Selection(number, solved.choice, solved.options, notes)
            selections.append(selection)
            if memory_limit_bytes is None or limit is None:
                break
            (point,) = simulated_points(task, "ilp", [selection])
            if point.memory_bytes <= memory_limit_bytes:
                break
            # The limit falls from the bytes that this program used, if those are fewer: otherwise the next
            # one could fill the room that this one left.
            limit = min(limit, solved.memory_bytes) - (point.memory_bytes - memory_limit_bytes)
    if not selections:
        raise UnsuitableError(
            "the program has no solution within the limit, or none was found in "
            f"{_TIME_LIMIT_S:.0f} s per mesh; raise the limit, or use the frontier"
        )
    return selections
