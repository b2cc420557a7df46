"""Where a model may be cut, and cuts that even out what stages have."""

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
    """(groups,) FLOP of each, forward and backward, unsplit; at least a little for everything."""
    found = []
    for group in graph.groups:
        facts = costs.facts_of(workload(graph, Configuration(group, (group.unsplit,)), (1,)))
        found.append(facts.forward_flops + facts.backward_flops + 1.0)
    return np.array(found)


def parameter_bytes_of(graph: GroupGraph) -> np.ndarray:
    """(groups,) bytes of the parameters that each uses."""
    tensors = graph.atoms.graph.tensors
    return np.array([float(sum(tensors[n].bytes for n in (*g.parameters, *g.shared))) for g in graph.groups])


def block_cuts(cutter: Cutter) -> list[int]:
    """The cuts before repeated blocks."""
    starts = {cutter.place[region.groups[0]] for region in find_regions(cutter.graph)}
    return [cut for cut in cutter.cuts if cut in starts]


def dealt(blocks: int, stages: int, *, ends: bool = True) -> list[int]:
    """Of how many repeated blocks each stage is made.

    Where these do not divide, what is before the first block counts as one, and so does what is behind the
    last (Llama 3, arXiv 2407.21783, section 3.3.2); where neither does, earlier stages have one more.

    Args:
        ends: whether a model has both of these.
    """
    each, over = divmod(blocks + 2 * (ends and _ends_count(blocks, stages)), stages)
    return [each + (stage < over) for stage in range(stages)]


def _ends_count(blocks: int, stages: int) -> bool:
    """Whether the ends of a model count as blocks."""
    return blocks % stages != 0 and (blocks + 2) % stages == 0


def dealt_cuts(cutter: Cutter, stages: int) -> tuple[int, ...]:
    """The cuts that give each stage as many repeated blocks, as :func:`dealt` has it.

    Raises:
        PlanError: there are fewer blocks, or the model cannot be cut between them.
    """
    blocks = find_regions(cutter.graph)
    ends = bool(blocks) and has_ends(cutter)
    if not blocks or len(blocks) + 2 * ends < stages:
        raise PlanError(f"{len(blocks)} repeated blocks are fewer than {stages} stages; give fewer stages")
    # Before each block, and behind the last one.
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
    """Whether a model of repeated blocks has something before the first and behind the last one that can be
    stages of their own."""
    blocks = find_regions(cutter.graph)
    if not blocks:
        return False
    first, last = cutter.place[blocks[0].groups[0]], cutter.place[blocks[-1].groups[-1]]
    return first in cutter.cuts and last + 1 in cutter.cuts


def stages_to_a_place(blocks: int, places: int, micro_batches: int, most: int, *, ends: bool = True) -> int:
    """How many stages a place should have, from two on, by the bubble and by how evenly blocks are dealt; 1
    where there are too few blocks for two.

    A step of equal stages takes :math:`1 + (p - 1) / (v m)` of what computing takes, with :math:`v` stages to
    each of :math:`p` places (Narayanan et al., SC 2021, section 2.2), the fullest place its share of blocks.

    Args:
        ends: whether what is before and behind the blocks may count as one each (:func:`has_ends`).
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
    """The cuts that least crosses: a quarter of all, and no fewer than ``least``."""
    sizes = {cut: cutter.crossing_bytes(cut) for cut in cutter.cuts}
    if not sizes:
        return []
    limit = sorted(sizes.values())[min(len(sizes) - 1, max(least - 1, len(sizes) // 4))]
    return [cut for cut, size in sizes.items() if size <= limit]


def speeds_of(graph: GroupGraph, sources: Sequence[CostSource]) -> tuple[float, ...]:
    """Per source how fast its devices compute the whole model, unsplit: models per second."""
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
    """The cuts at which the heaviest stage is lightest; of equals the first. Empty where there are too few.

    Args:
        weights: (groups,) of what is evened out.
        positions: where stages may begin, ascending.
        strengths: per stage what its weight is divided by, as the speed of its devices; 1 by default.
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ends = [*positions, len(weights)]
    # best[e]: (heaviest, cuts) of the first stages that end at position e.
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
