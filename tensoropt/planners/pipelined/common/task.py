"""The input of a method that cuts a model into pipeline stages, and a pipeline that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.restrictions import FREE
from tensoropt.costs.source import CostSource
from tensoropt.costs.tables import CostTables
from tensoropt.errors import PlanError
from tensoropt.evaluation.problem import Problem
from tensoropt.pipeline.compose import Composition, Offer, compose
from tensoropt.pipeline.composer import Composer, Composing, Crossings, Cut
from tensoropt.pipeline.costs import degrees_of, job_meshes
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.points import pipelined_space
from tensoropt.pipeline.stage_frontiers import PlaceFrontiers, StageSearch, Thoroughness
from tensoropt.pipeline.stages import Cutter, block_cuts, cheaper_to_duplicate, flops_of, narrow_cuts
from tensoropt.plan.space import Space
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.tables import Scheme, following_the_batch, in_a_form, whole
from tensoropt.question.settings import Settings

_MOST_PLACES, _MOST_AXES = 16, 2
"""The highest pipeline degree that methods try, and the most mesh axes of a stage."""
_MULTIPLES = (8, 4, 2, 1)
"""Micro-batches per pipeline rank, if no number is requested; the first suitable number is used. GPipe calls
its bubble "negligible" from 4 on (Huang et al., NeurIPS 2019, section 2.3)."""
_FEW = 8
"""The number of possible cuts up to which a model may be cut at any of them; models with more are cut only
before blocks. This number and those above are assumptions."""
_STEP = 0.01
"""The least relative drop in memory from one pipeline of a method to the next."""
_EFFORT = Thoroughness(gap=1e-2, candidates=32, in_flight=False)
_ALONG_THE_BATCH = Crossings(("batch",), ("batch",))
_FOR_MEMORY_AND_TIME: Composing = partial(compose, step=_STEP)


def flat(mesh: Mesh) -> bool:
    """Return whether a stage's mesh has at most one axis."""
    return len(mesh.shape) <= 2


def data_parallel(*, recomputing: bool = False) -> Scheme:
    """Return the scheme (mask) of data parallelism: parameters whole, and all blocks recomputed or none."""
    allowed = following_the_batch(lambda tables, group: str(tables.micro[group].label), whole)
    return partial(in_a_form, allowed, recomputing)


def as_if(change: Callable[[Offer], Offer]) -> Composing:
    """Return a function that composes stages as if their strategies had the costs that ``change`` returns."""

    def composing(
        offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int
    ) -> Iterator[Composition[Cut]]:
        changed = [{ends: change(offer) for ends, offer in of_stage.items()} for of_stage in offers]
        yield from _FOR_MEMORY_AND_TIME(changed, micro_batches)

    return composing


class PipelinedAnswer(NamedTuple):
    """A simulated pipeline that a method chose."""

    evaluation: PipelineEvaluation
    mesh: Mesh


@dataclass(frozen=True)
class PipelineTask:
    """The input of methods that cut a model into pipeline stages: a model on a cluster.

    Attributes:
        first_space: the index of the first of :attr:`spaces` among the exploration's search spaces.
    """

    problem: Problem
    cluster: Cluster
    costs: CostSource
    settings: Settings
    first_space: int

    @cached_property
    def cutter(self) -> Cutter:
        """The possible cuts of the model's graph."""
        return Cutter(self.problem.graph)

    @cached_property
    def duplicated(self) -> frozenset[str]:
        """The tensors that each stage computes for itself, because computing is cheaper than sending."""
        return cheaper_to_duplicate(self.cutter, self.costs)

    @cached_property
    def flops(self) -> np.ndarray:
        """(groups,) the FLOP count of each operator group, unsplit, forward and backward."""
        return flops_of(self.problem.graph, self.costs)

    @cached_property
    def jobs(self) -> tuple[tuple[Mesh, int], ...]:
        """The meshes of possible pipelines, each with its number of micro-batches; none in inference."""
        if not self.problem.graph.atoms.graph.training or self.problem.refusal:
            return ()
        most = min(_MOST_PLACES, len(self.cutter.cuts) + 1)
        jobs = []
        for places in degrees_of(self.cluster):
            if places <= most and (count := self._micro_batches(places)):
                jobs += [(mesh, count) for mesh in job_meshes(self.cluster, places, _MOST_AXES)]
        return tuple(jobs)

    def _micro_batches(self, places: int) -> int | None:
        """Return the largest permitted number of micro-batches that divides the batch; None if none does.
        Numbers whose micro-batches divide evenly among a stage's devices come first.
        """
        batch, requested = self.problem.batch, self.settings.micro_batches
        multiples = _MULTIPLES if isinstance(requested, str) else sorted(requested, reverse=True)
        counts = [places * m for m in multiples if batch % (places * m) == 0]
        devices = self.cluster.device_count // places
        return next((m for m in counts if (batch // m) % devices == 0), counts[0] if counts else None)

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The search space of each mesh and micro-batch count of :attr:`jobs`."""
        keys = self.problem.parameter_keys
        return tuple(pipelined_space(mesh, count, keys) for mesh, count in self.jobs)

    def space_of(self, mesh: Mesh, micro_batches: int) -> int:
        """Return the exploration's index of the search space of one mesh and micro-batch count."""
        return self.first_space + self.jobs.index((mesh, micro_batches))

    def positions(self, stages: int) -> list[int]:
        """Return the cuts at which stages may begin: all cuts of small models, otherwise those before
        repeated blocks or, if these are too few, those that the fewest bytes cross.
        """
        if len(self.cutter.cuts) <= _FEW:
            return list(self.cutter.cuts)
        blocks = block_cuts(self.cutter)
        return blocks if len(blocks) >= stages - 1 else narrow_cuts(self.cutter, stages - 1)

    def suiting(self, suits: Callable[[Mesh], bool]) -> list[tuple[Mesh, int]]:
        """Return the (mesh, number of micro-batches) of :attr:`jobs` for which ``suits`` is true.

        Raises:
            UnsuitableError: none suits, or the method cannot treat the model, the cluster or the settings.
        """
        if not self.problem.graph.atoms.graph.training:
            raise UnsuitableError("pipelines are planned for training only; use --mode train")
        if len(self.cluster.device_types) > 1:
            raise UnsuitableError(
                f"published pipeline planners need devices of one type, not {self.cluster.counts}"
            )
        if self.settings.constraints is not None:
            raise UnsuitableError(
                "published pipeline planners cannot keep to constraints; leave these out, or plan pipelines "
                "with the option '--pipelines always'"
            )
        suited = [(mesh, count) for mesh, count in self.jobs if suits(mesh)]
        if not suited:
            raise UnsuitableError(
                "no pipeline of this kind suits the model, its batch and the cluster: stages need trained "
                "parameters and equally many devices each, and the micro-batches must divide the batch; "
                "choose a batch that is a multiple of the number of stages, times --micro-batches if given"
            )
        return suited

    def compose(
        self,
        mesh: Mesh,
        micro_batches: int,
        allowed: Scheme,
        positions: Sequence[Sequence[int]],
        *,
        schedule: str = "1f1b",
        crossings: Crossings = _ALONG_THE_BATCH,
        composing: Composing = _FOR_MEMORY_AND_TIME,
    ) -> Iterator[PipelinedAnswer]:
        """Yield simulated pipelines on one mesh, whose stages use only choices that ``allowed`` permits.

        Args:
            positions: for each stage after the first, the cuts at which it may begin.
            composing: the function that chooses cuts and stage strategies.
        """

        def restricted(tables: CostTables) -> CostTables:
            # Published methods keep gathered tensors, in stages as in :class:`TableSpace`.
            return tables.without_moves.restricted(partial(allowed, tables))

        problem, cutter, remade = self.problem, self.cutter, self.duplicated
        search = StageSearch(
            problem, self.settings, cutter, remade, mesh, micro_batches, FREE, _EFFORT, restricted
        )
        frontiers = PlaceFrontiers(search, self.costs)
        try:
            composer = Composer(frontiers, schedule, crossings, composing)
        except PlanError as refusal:
            raise UnsuitableError(str(refusal)) from None
        for evaluation in composer.pipelines([[0], *positions, [len(self.problem.graph.groups)]]):
            yield PipelinedAnswer(evaluation, mesh)
