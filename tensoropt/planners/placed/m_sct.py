"""m-SCT: earliest task first, but devices wait for favourite children, chosen by a linear program.

C. Hanen, A. Munier, *An approximation algorithm for scheduling dependent tasks on m processors with small
communication delays*, Discrete Applied Mathematics 108(3), 2001 (SCT); B. Jeon et al., *Baechi: Fast Device
Placement of Machine Learning Graphs*, SoCC 2020, section 3.1 (m-SCT). With unlimited devices, at most one
child (reader) would follow each operator on its device: the favourite child, to which nothing is sent. A
linear program chooses favourites. Then operators start as in ETF, while devices wait for favourites
(``common/earliest.py``). Each device has a memory cap.

SCT's guarantee needs every message to be shorter than every operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from tensoropt.placement import PlacementProblem
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed.common.earliest import EarliestFirst
from tensoropt.planners.placed.common.units import PlacedAnswer, Units, place_within_memory, units_of
from tensoropt.types import Floats

_THRESHOLD = 0.1
"""A child is a favourite if the program leaves at most this share of its edge's message (Baechi, section
4)."""

_SECONDS = 60.0
"""The time limit of the linear program in seconds; an assumption."""


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer:
    """Choose favourite children, then place operators by earliest start with them.

    Raises:
        UnsuitableError: the linear program is too large to be solved in time.
        InfeasibleError: an operator has no room on any device when its turn comes.
    """
    favourite = _favourites(problem, units_of(problem))
    return place_within_memory(
        "m_sct",
        problem,
        memory_limit_bytes,
        lambda memory: EarliestFirst(problem, memory, favourite).placement(),
    )


def _precedence(problem: PlacementProblem, units: Units) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Return the operators' mean seconds of forward over the allowed devices, (operators,); the producer and
    reader of each edge, (edges, 2), ascending; and each edge's seconds of messages, (edges,), as a mean over
    pairs of devices, or 0 between operators that must share a device.
    """
    allowed = units.allowed[list(units.of)]
    seconds = np.where(allowed, problem.forward_s, 0.0).sum(axis=1) / allowed.sum(axis=1)
    devices = problem.devices
    pairs = max(1, devices.count * (devices.count - 1))
    latency = float(devices.latency_s.sum()) / pairs
    per_byte = float(devices.seconds_per_byte.sum()) / pairs
    messages: dict[tuple[int, int], float] = {}
    for tensor in problem.tensors:
        for reader in tensor.readers:
            # A mean over pairs of devices: favourites are chosen before anything has a device.
            sent = latency + tensor.bytes * per_byte if devices.count > 1 else 0.0
            if units.of[tensor.producer] == units.of[reader]:
                sent = 0.0
            edge = (tensor.producer, reader)
            messages[edge] = messages.get(edge, 0.0) + sent
    edges = np.array(sorted(messages), dtype=np.intp).reshape(-1, 2)
    return seconds, edges, np.array([messages[int(i), int(j)] for i, j in edges])


def _favourites(problem: PlacementProblem, units: Units) -> list[int]:
    """Return the favourite child of each operator, or -1.

    min w over 0 <= x_ij <= 1, s_i >= 0, w (Baechi, section 3.1, constraints of the relaxed program):

        s_i + p_i + c_ij x_ij <= s_j     j starts after i, and after its message unless it is the favourite
        sum over children j of i of x_ij >= children - 1      at most one favourite child
        sum over parents i of j of x_ij >= parents - 1        at most one parent's favourite
        s_i + p_i <= w

    x_ij <= 0.1 makes j the favourite of i. Two favourites would break a sum, so an operator has at most one,
    and is the favourite of at most one. If the constraints leave a choice, a small term of the objective in
    c_ij x_ij saves the longest messages; it can raise w by a ten-thousandth at most.

    Raises:
        UnsuitableError: the linear program was not solved in time.
    """
    seconds, edges, messages = _precedence(problem, units)
    operators, count = problem.size, len(edges)
    favourite = [-1] * operators
    if not count or not messages.any():
        return favourite
    bounds = np.zeros((count + operators + 1, 2))
    bounds[:count, 1] = 1.0
    bounds[count:, 1] = np.inf
    objective = np.zeros(count + operators + 1)
    # times are counted in mean operator times, so that the solver's tolerances suit them
    scale = float(seconds.mean()) or 1.0
    seconds, messages = seconds / scale, messages / scale
    objective[-1] = count
    objective[:count] = count * 1e-4 * float(seconds.max()) * messages / float(messages.sum())
    matrix, right = _rows(edges, seconds, messages)
    limit = {"time_limit": _SECONDS}
    solution = linprog(objective, A_ub=matrix, b_ub=right, bounds=bounds, method="highs", options=limit)
    if solution.x is None or solution.status != 0:
        raise UnsuitableError(
            f"m_sct's linear program over {operators} operators and {count} edges was not solved within "
            f"{_SECONDS:.0f} s; use m_etf, which needs none, or group operators first"
        )
    for (parent, child), left in zip(edges.tolist(), solution.x[:count], strict=True):
        # The program is relaxed: x is seldom 0 or 1, and the threshold rounds it.
        if left <= _THRESHOLD:
            favourite[parent] = child
    return favourite


def _rows(edges: NDArray[np.intp], seconds: Floats, messages: Floats) -> tuple[Any, Floats]:
    """Return (A, b) of the linear program's constraints A v <= b, where v = (x, s, w)."""
    count, operators = len(edges), len(seconds)
    shape, ones = (count, operators), np.ones(count)
    parent, child = (sparse.coo_array((ones, (np.arange(count), ends)), shape=shape) for ends in edges.T)
    after = [sparse.diags(messages), parent - child, None]
    most = [[-parent.T, None, None], [-child.T, None, None]]
    end = [None, sparse.identity(operators), sparse.coo_array(-np.ones((operators, 1)))]
    children, parents = (np.bincount(ends, minlength=operators) for ends in edges.T)
    right = np.concatenate(
        # max(.., 1) for operators without children or parents, whose empty sums must be at least 0.
        [-seconds[edges[:, 0]], 1.0 - np.maximum(children, 1), 1.0 - np.maximum(parents, 1), -seconds]
    )
    return sparse.bmat([after, *most, end]), right
