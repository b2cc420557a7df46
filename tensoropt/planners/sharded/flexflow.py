"""FlexFlow: a random walk over strategies, with the simulator as its oracle.

Z. Jia, M. Zaharia, A. Aiken, *Beyond Data and Model Parallelism for Deep Neural Networks*, MLSys 2019,
section 6: Metropolis-Hastings. A proposal replaces the configuration of one random operator by a random one,
and is accepted with probability ``min(1, exp(beta * (cost - new cost)))`` (equation 2). One walk starts from
data parallelism, one from a random strategy (section 6.2). A walk stops when its budget is spent, or half of
the budget yielded nothing better. FlexFlow has no memory term. Here a strategy over the limit is penalised by
its excess, so that the walk can find its way back to plans that fit.

FlexFlow chooses for operators alone. The layouts of tensors with several readers and of stored parameters are
chosen anew for each proposal, as cheaply as their neighbours allow.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np

from tensoropt.costs.cost_graph import EdgeTable
from tensoropt.costs.tables import CostTables
from tensoropt.evaluation.evaluate import Evaluator, costs_of
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.sharded.common.restricted import batch_labels
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.simulate.candidates import overlap_of

_PROPOSALS = 600
"""The number of proposals per walk, of which every mesh and micro-batch count has two; an assumption.
FlexFlow's own budget is time (section 6.2)."""

_SECONDS = 30.0
"""The seconds for both walks of a mesh and micro-batch count; an assumption. If they run out before the
proposals, the notes say so: the result then depends on the machine."""

_SHARPNESS = 20.0
"""``beta`` times the starting cost: a proposal 5 % worse than the start is accepted with probability e^-1."""


class _Chain:
    def __init__(self, task: PlanningTask, number: int, limit: float | None):
        space, self.graph, self.limit = task.spaces[number], task.prepared.graph, limit
        self.tables: CostTables = space.tables
        self.groups = [g.name for g in self.tables.graph.groups]
        self.followers = [v.key for v in self.tables.variables if v.key.kind != "group"]
        self.edges: dict[str, list[EdgeTable]] = {v.key: [] for v in self.tables.variables}
        for edge in self.tables.edges:
            self.edges[edge.a].append(edge)
            self.edges[edge.b].append(edge)
        overlap = overlap_of(task.cluster, space.mesh, beside=self.tables.prices.beside)
        self.evaluate = Evaluator(self.tables, overlap)
        # The fastest option of a configuration is the same in all proposals, so that it is found once.
        costs: dict[str, list[np.ndarray]] = {v.key: v.costs for v in self.tables.variables}
        self.fastest = {name: [t[:, 1].argmin() for t in tables] for name, tables in costs.items()}
        self.least = {name: np.array([t[:, 1].min() for t in tables]) for name, tables in costs.items()}
        self.plain = {
            name: [i for i, recomputed in enumerate(self.tables.of[name].again) if not recomputed]
            for name in self.groups
        }

    def complete(self, choice: dict[str, int], names: Sequence[str]) -> bool:
        for name in names:
            costs = self.least[name]
            for edge in self.edges[name]:
                if edge.a == name:
                    costs = costs + edge.table[edge.rows, edge.cols[choice[edge.b]], 1]
                else:
                    costs = costs + edge.table[edge.rows[choice[edge.a]], edge.cols, 1]
            choice[name] = int(costs.argmin())
            if not math.isfinite(costs[choice[name]]):
                return False
        return True

    def options(self, choice: dict[str, int]) -> dict[object, int]:
        return {name: int(self.fastest[name][index]) for name, index in choice.items()}

    def cost(self, choice: dict[str, int]) -> float:
        options = self.options(choice)
        if not math.isfinite(self.tables.breakdown(choice, options)[0]):
            return math.inf
        ((memory, seconds),) = costs_of(self.evaluate([(choice, options)]))
        excess = 0.0 if self.limit is None else max(0.0, float(memory) / self.limit - 1.0)
        # FlexFlow has no memory term. Ten is an assumption: the larger, the harder it is to pass through
        # plans that do not fit on the way to better ones; the less, the likelier a chain ends on one.
        return float(seconds) * (1.0 + 10.0 * excess)

    def data_parallel(self) -> dict[str, int] | None:
        try:
            labels = batch_labels(self.graph)
        except UnsuitableError:
            return None
        choice = {}
        for name in self.groups:
            fitting = [i for i in self.plain[name] if set(self.tables.labels(name, i)) <= {labels[name]}]
            if not fitting:
                return None
            choice[name] = fitting[0]
        return choice if self.complete(choice, self.followers) else None

    def anything(self, rng: random.Random) -> dict[str, int] | None:
        choice = {name: rng.choice(self.plain[name]) for name in self.groups}
        return choice if self.complete(choice, self.followers) else None

    def propose(self, choice: dict[str, int], rng: random.Random) -> dict[str, int] | None:
        name = rng.choice(self.groups)
        proposed = dict(choice)
        proposed[name] = rng.choice(self.plain[name])
        ends = {end for edge in self.edges[name] for end in (edge.a, edge.b)}
        # Only variables next to the changed operator are chosen anew: all others have the same neighbours.
        followers = [f for f in self.followers if f in ends]
        return proposed if self.complete(proposed, followers) else None


def _metropolis_hastings(
    chain: _Chain, start: dict[str, int], proposals: int, rng: random.Random, seconds: float
) -> tuple[float, dict[str, int], bool]:
    """Run one walk; return (cost, configurations) of the best strategy, and whether time ran out."""
    end = time.monotonic() + seconds
    current, cost = start, chain.cost(start)
    best, lowest, last = current, cost, 0
    # Relative to the start, so that one sharpness suits models of microseconds and of minutes.
    beta = _SHARPNESS / cost if math.isfinite(cost) else 0.0
    for step in range(proposals):
        if time.monotonic() > end:
            return lowest, best, True
        # Section 6.2: a chain ends when half of its budget brought nothing better.
        if step - last > proposals // 2:
            break
        proposed = chain.propose(current, rng)
        if proposed is None:
            continue
        new = chain.cost(proposed)
        if new <= cost or rng.random() < math.exp(min(0.0, beta * (cost - new))):
            current, cost = proposed, new
            if cost < lowest:
                best, lowest, last = current, cost, step
    return lowest, best, False


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return the best strategy that the walks visited, for every mesh and micro-batch count.

    Raises:
        UnsuitableError: no walk found a possible strategy to start from.
    """
    selections = []
    for number in range(len(task.spaces)):
        # Each space draws from a generator of its own, so that its result does not depend on the other
        # spaces.
        chain, rng = _Chain(task, number, memory_limit_bytes), random.Random(f"{seed}/{number}")
        starts = [s for s in (chain.data_parallel(), chain.anything(rng)) if s is not None]
        ends = [_metropolis_hastings(chain, start, _PROPOSALS, rng, _SECONDS / 2) for start in starts]
        late = any(end[2] for end in ends)
        ends = [end for end in ends if math.isfinite(end[0])]
        if ends:
            choice = min(ends, key=lambda end: end[0])[1]
            notes = (f"stopped after {_SECONDS:.0f} s, before all proposals were tried",) if late else ()
            selections.append(Selection(number, choice, chain.options(choice), notes))
    if not selections:
        raise UnsuitableError("flexflow found no possible strategy to start from; use the frontier or ilp")
    return selections
