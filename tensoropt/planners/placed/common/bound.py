"""A lower bound on the time of a step under any placement."""

from __future__ import annotations

from tensoropt.placement import PlacementProblem


def lower_bound_s(problem: PlacementProblem) -> float:
    """Return a lower bound in seconds on the step of any placement: the longest chain of operators or, if
    that is longer, all computation spread evenly over the devices.
    """
    forward, backward = problem.forward_s.min(axis=1), problem.backward_s.min(axis=1)
    ahead, finish = forward.copy(), backward.copy()
    for reader in range(problem.size):
        before = (ahead[problem.tensors[t].producer] for t in problem.read[reader])
        ahead[reader] += max(before, default=0.0)
    # Backward of an operator waits for its own forward and for the gradients of its readers. Messages and the
    # optimizer count nothing, so that this stays below every placement's step.
    for producer in reversed(range(problem.size)):
        tensors = (problem.tensors[t] for t in problem.made[producer])
        gradients = [finish[r] for t in tensors if t.gradient for r in t.readers]
        finish[producer] += max([ahead[producer], *gradients])
    once = problem.micro_batches * (problem.forward_s + problem.backward_s)
    work = (once + problem.update_s).min(axis=1).sum()
    return float(max(finish.max(initial=0.0), work / problem.devices.count))
