"""The places where a model may be cut, and cuts that balance the stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from tensoropt.costs.source import CostSource
from tensoropt.errors import PlanError
from tensoropt.pipeline.stages import Cutter
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import find_regions


def flops_of(graph: GroupGraph, costs: CostSource) -> np.ndarray:
    """Return (groups,) FLOP of each group, forward and backward, unsplit; every group counts at least a
    little."""
    found = []
    for group in graph.groups:
        facts = costs.facts_of(workload(graph, Configuration(group, (group.unsplit,)), (1,)))
        found.append(facts.forward_flops + facts.backward_flops + 1.0)
    return np.array(found)


def parameter_bytes_of(graph: GroupGraph) -> np.ndarray:
    """Return (groups,) bytes of the parameters that each group uses."""
    tensors = graph.atoms.graph.tensors
    return np.array([float(sum(tensors[n].bytes for n in (*g.parameters, *g.shared))) for g in graph.groups])


def block_cuts(cutter: Cutter) -> list[int]:
    """Return the cuts before repeated blocks."""
    starts = {cutter.place[region.groups[0]] for region in find_regions(cutter.graph)}
    return [cut for cut in cutter.cuts if cut in starts]


def dealt(blocks: int, stages: int, *, ends: bool = True) -> list[int]:
    """Return how many repeated blocks each stage gets.

    If the blocks do not divide evenly, what precedes the first block counts as a block, and so does what
    follows the last (Llama 3, arXiv 2407.21783, section 3.3.2); if that does not divide either, earlier
    stages get one more.

    Args:
        ends: whether the model has both of these ends.
    """
    each, over = divmod(blocks + 2 * (ends and _ends_count(blocks, stages)), stages)
    return [each + (stage < over) for stage in range(stages)]


def _ends_count(blocks: int, stages: int) -> bool:
    """Return whether the ends of a model count as blocks."""
    return blocks % stages != 0 and (blocks + 2) % stages == 0


def dealt_cuts(cutter: Cutter, stages: int) -> tuple[int, ...]:
    """Return the cuts that give each stage the number of repeated blocks that :func:`dealt` says.

    Raises:
        PlanError: there are fewer blocks than stages, or the model cannot be cut between them.
    """
    blocks = find_regions(cutter.graph)
    ends = bool(blocks) and has_ends(cutter)
    if not blocks or len(blocks) + 2 * ends < stages:
        raise PlanError(f"{len(blocks)} repeated blocks are fewer than {stages} stages; give fewer stages")
    # Before each block, and after the last one.
    starts = [cutter.place[region.groups[0]] for region in blocks]
    starts.append(cutter.place[blocks[-1].groups[-1]] + 1)
    sizes = dealt(len(blocks), stages, ends=ends)
    before = [
        sum(sizes[: stage + 1]) - (ends and _ends_count(len(blocks), stages)) for stage in range(stages)
    ]
    found = tuple(starts[count] for count in before[:-1])
    if unfit := [cutter.graph.groups[cut].name for cut in found if cut not in cutter.cuts]:
        raise PlanError(f"no stage can begin with {unfit[0]}; give another number of stages than {stages}")
    return found


def has_ends(cutter: Cutter) -> bool:
    """Return whether a model of repeated blocks has parts before the first and after the last block that can
    be stages of their own."""
    blocks = find_regions(cutter.graph)
    if not blocks:
        return False
    first, last = cutter.place[blocks[0].groups[0]], cutter.place[blocks[-1].groups[-1]]
    return first in cutter.cuts and last + 1 in cutter.cuts


def stages_to_a_place(blocks: int, places: int, micro_batches: int, most: int, *, ends: bool = True) -> int:
    """Return how many stages a place should have, two or more, by the bubble and by how evenly the blocks are
    dealt; 1 if there are too few blocks for two.

    A step of equal stages takes :math:`1 + (p - 1) / (v m)` times as long as the computation, with :math:`v`
    stages on each of :math:`p` places (Narayanan et al., SC 2021, section 2.2); the fullest place takes its
    share of the blocks.

    Args:
        ends: whether what precedes and what follows the blocks may count as a block each (:func:`has_ends`).
    """
    known = [(1.0, 1)]
    for count in range(2, most + 1):
        stages = places * count
        if blocks + 2 * (ends and _ends_count(blocks, stages)) >= stages:
            sizes = dealt(blocks, stages, ends=ends)
            fullest = max(sum(sizes[place::places]) for place in range(places)) * places / sum(sizes)
            step = fullest * (1.0 + (places - 1) / (count * micro_batches))
            known.append((step, count))
    return min(known[1:] or known)[1]


def narrow_cuts(cutter: Cutter, least: int) -> list[int]:
    """Return the cuts that the fewest bytes cross: a quarter of all cuts, and at least ``least``."""
    sizes = {cut: cutter.crossing_bytes(cut) for cut in cutter.cuts}
    if not sizes:
        return []
    limit = sorted(sizes.values())[min(len(sizes) - 1, max(least - 1, len(sizes) // 4))]
    return [cut for cut, size in sizes.items() if size <= limit]


def speeds_of(graph: GroupGraph, sources: Sequence[CostSource]) -> tuple[float, ...]:
    """Return, for each source, how fast its devices compute the whole model, unsplit: models per second."""
    works = [workload(graph, Configuration(group, (group.unsplit,)), (1,)) for group in graph.groups]
    known: dict[int, float] = {}
    for source in sources:
        if id(source) not in known:
            compute = source.compute()
            known[id(source)] = 1.0 / sum(sum(compute.seconds(w, source.facts_of(w))) for w in works)
    return tuple(known[id(source)] for source in sources)


def balanced(
    weights: np.ndarray, positions: Sequence[int], stages: int, strengths: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the cuts that make the heaviest stage lightest; the first of equals. Empty if there are too few.

    Args:
        weights: (groups,) of the quantity to balance.
        positions: where stages may begin, ascending.
        strengths: for each stage, the number that divides its weight, such as the speed of its devices; 1 by
            default.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ends = [*positions, len(weights)]
    # best[e]: (heaviest, cuts) of the first stages, which end at position e.
    strength = strengths or [1.0] * stages
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (float(total[end]) / strength[0], ()) for end in ends
    }
    for stage in range(1, stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            choices = [
                (max(heaviest, float(total[end] - total[cut]) / strength[stage]), (*cuts, cut))
                for cut, (heaviest, cuts) in best.items()
                if cut < end and cut != len(weights)
            ]
            if choices:
                following[end] = min(choices)
        best = following
    return best.get(len(weights), (inf, ()))[1]
