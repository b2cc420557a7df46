"""Node co-placement: the heaviest edges first, by union-find, with limits on the size and the number of
groups.

NetSplit, Algorithm 3: cutting a heavy edge is what a good split avoids, so its two ends share a device from
the start, and the program decides for groups instead of operators. Here groups are also scheduled in one go
(:mod:`.contraction`), so two groups are joined only if that closes no cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.contraction import (
    ContractedBlocks,
    Contraction,
    allowed_devices,
    contract,
)


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """The limits at which co-placement stops.

    Attributes:
        most_operators: the most operators in one group.
        most_groups: joining stops as soon as there are no more than this.
        most_bytes: the most bytes that one group stores and keeps for a step.
        most_seconds: the most seconds of one group's forward and backward, on its fastest device.
    """

    most_operators: int
    most_groups: int
    most_bytes: float = float("inf")
    most_seconds: float = float("inf")


def edge_weights(problem: PlacementProblem) -> dict[tuple[int, int], int]:
    """Return (producer, reader) -> bytes of all tensors that cross between the two, their gradients
    included."""
    found: dict[tuple[int, int], int] = {}
    for tensor in problem.tensors:
        # A gradient comes back over a cut edge and is as large as the tensor.
        size = tensor.bytes * (1 + (problem.training and tensor.gradient))
        for reader in tensor.readers:
            edge = (tensor.producer, reader)
            found[edge] = found.get(edge, 0) + size
    return found


def co_place(problem: PlacementProblem, limits: GroupLimits) -> Contraction:
    """Group operators by NetSplit's Algorithm 3.

    The edges are taken from the heaviest to the lightest until ``most_groups`` is reached, and again as long
    as a round joins anything, because an edge that would have closed a cycle may be free once its detour has
    been joined too. More groups than requested remain if the other limits, cycles or missing edges forbid
    further joining: compare ``len(result.groups)``.
    """
    blocks = ContractedBlocks(problem)
    may_join = _Room(problem, limits, blocks)
    weights = edge_weights(problem)
    # Ties by the operators' numbers, so that the blocks are the same in every run.
    edges = sorted(weights, key=lambda edge: (-weights[edge], edge))
    joined = True
    while joined and blocks.count > limits.most_groups:
        joined, left = False, []
        for edge in edges:
            if blocks.count <= limits.most_groups:
                break
            u, v = (blocks.block[o] for o in edge)
            if u == v:
                continue
            if may_join(u, v) and blocks.join(u, v):
                may_join.merged(u, v)
                joined = True
            else:
                left.append(edge)
        edges = left
    # Without this, 371 operators of DeepLab-V3 were reduced to 112 blocks instead of 40.
    _gather(blocks, may_join, limits.most_groups)
    return contract(problem, blocks.groups())


def _gather(blocks: ContractedBlocks, may_join: _Room, most_groups: int) -> None:
    """Join blocks that no edge leads to, which the algorithm never meets: for example, counters of a
    normalization."""
    first: int | None = None
    for block in blocks.lone():
        if blocks.count <= most_groups:
            return
        if first is not None and may_join(first, block) and blocks.join(first, block):
            may_join.merged(first, block)
            first = blocks.block[first]
        else:
            first = block


class _Room:
    """The contents of the groups, and whether two of them stay within the limits together."""

    def __init__(self, problem: PlacementProblem, limits: GroupLimits, blocks: ContractedBlocks):
        self.limits, self.blocks = limits, blocks
        self.bytes = [problem.step_bytes(o) for o in range(problem.size)]
        self.seconds = problem.forward_s + problem.backward_s + problem.update_s
        self.allowed = allowed_devices(problem)

    def __call__(self, u: int, v: int) -> bool:
        limits, members = self.limits, self.blocks.members
        return (
            len(members[u]) + len(members[v]) <= limits.most_operators
            and self.bytes[u] + self.bytes[v] <= limits.most_bytes
            and float((self.seconds[u] + self.seconds[v]).min()) <= limits.most_seconds
            and bool(self.allowed[u] & self.allowed[v])
        )

    def merged(self, u: int, v: int) -> None:
        """Make both names stand for the group, whichever of them it kept."""
        total, seconds = self.bytes[u] + self.bytes[v], self.seconds[u] + self.seconds[v]
        devices = self.allowed[u] & self.allowed[v]
        for name in (u, v):
            self.bytes[name], self.seconds[name], self.allowed[name] = total, seconds, devices
