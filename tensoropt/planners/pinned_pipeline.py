"""A configuration with a pipeline that somebody else chose, simulated as one pipelined strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tensoropt.cluster import Mesh
from tensoropt.costs.source import CostSource
from tensoropt.errors import PlanError
from tensoropt.pipeline.balance import dealt_cuts
from tensoropt.pipeline.compose import Composition, Offer, compose
from tensoropt.pipeline.composer import Composer, Crossings, Cut
from tensoropt.pipeline.evaluate import PipelineEvaluation, assemble
from tensoropt.pipeline.place_frontiers import PlaceFrontiers
from tensoropt.pipeline.points import pipelined_point
from tensoropt.pipeline.stage_frontiers import StageSearch, Thoroughness
from tensoropt.pipeline.stages import Cutter
from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.plan.point import Point
from tensoropt.plan.problem import Problem
from tensoropt.plan.settings import Settings
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pinned import PinnedConfiguration, Pinning, check_pinned

EFFORT = Thoroughness(gap=1e-3, candidates=4, in_flight=False)
"""How thoroughly to search what a pinned stage leaves open; an assumption: it leaves little."""


@dataclass(frozen=True)
class PinnedPipelinePoint:
    """A pinned pipeline with its simulated figures.

    Attributes:
        point: its step time, memory, collectives and the sources of the figures.
        evaluation: its stages, and its schedule over time.
        notes: what could not be pinned as requested, in words.
    """

    point: Point
    evaluation: PipelineEvaluation
    notes: tuple[str, ...] = ()


def simulate_pinned_pipeline(
    problem: Problem,
    settings: Settings,
    costs: CostSource,
    pinned: PinnedConfiguration,
    cuts: Sequence[int] | None = None,
) -> PinnedPipelinePoint:
    """Return the fastest pipelined strategy of a pinned configuration, simulated.

    Tensors cross cuts split along the batch; on the tensor axis they cross whole, or split along the sequence
    if activations between products are. As in Megatron-LM, parameters are gathered from the beginning of the
    step on, and gradients are reduced while other micro-batches and earlier stages compute.

    Args:
        problem: captured at the global batch size, in the settings' mode and dtype.
        settings: blocks are recomputed (``auto``) if that is pinned.
        costs: the costs of a cluster with as many devices as the configuration takes.
        cuts: where the stages after the first begin; by default all stages have equally many blocks
            (:func:`~tensoropt.pipeline.balance.dealt_cuts`).

    Raises:
        UnsuitableError: the model cannot be cut or split so; the message says what does not divide, or is not
            understood.
    """
    check_pinned(problem, costs, pinned)
    pinning, cutter = Pinning(problem, pinned), Cutter(problem.graph)
    mesh = Mesh(
        shape=(pinned.places, *(size for size in pinned.mesh.shape if size > 1)),
        names=(STAGE_AXIS, *pinning.names),
    )

    again, restriction = cutter.can_be_made_again, pinning.restriction()
    search = StageSearch(
        problem,
        settings,
        cutter,
        again,
        mesh,
        pinned.micro_batches,
        restriction,
        EFFORT,
        lambda tables: tables.restricted(pinning.allowed),
    )
    frontiers = PlaceFrontiers(search, costs)
    # Megatron-LM sends a part from each tensor-parallel rank and gathers it within the node (Narayanan et
    # al., SC 2021, section 4.1), which is searched beside sending the whole from each.
    inner: tuple[str, ...] = ("batch",)
    if pinned.tensor > 1:
        inner = ("second",) if pinned.sequence_parallel else ("whole", "second")
    try:
        composer = Composer(
            frontiers,
            pinned.schedule,
            Crossings(ways=inner, outer=("batch",), everywhere_alike=True),
            _fastest,
            per_place=pinned.stages_per_place,
        )
        cuts = dealt_cuts(cutter, composer.stages) if cuts is None else tuple(cuts)
        positions = [[0], *([cut] for cut in cuts), [len(problem.graph.groups)]]
        found = list(composer.pipelines(positions))
    except PlanError as refusal:
        raise UnsuitableError(str(refusal)) from None
    if not found:
        raise UnsuitableError(
            "; ".join(("the pinned configuration leaves no pipeline", *composer.notes))
            + "; pin degrees that divide the model's sizes"
        )
    best = min(
        (assemble(one.strategy, one.stages, frontiers.prices, communicating_apart=True) for one in found),
        key=lambda one: one.time_s,
    )
    point = pipelined_point(best, mesh, space=0, planner="pinned")
    return PinnedPipelinePoint(point, best, (*pinning.notes, *composer.notes))


def _fastest(
    offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int
) -> Iterator[Composition[Cut]]:
    """Yield the composition with the shortest step."""
    return islice(compose(offers, micro_batches), 1)
