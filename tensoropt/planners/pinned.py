"""Simulate a launcher's job: given parallel degrees, ZeRO stage, micro-batches and recomputation.

Choices that the job leaves open (such as layouts between operators) are made for the shortest step, as for
every published scheme (:mod:`tensoropt.planners.sharded.common.restricted`). Cost tables cover only the
strategies that the job permits, so that a model of a hundred layers takes seconds.

A job with a pipeline is simulated as one pipelined strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.restrictions import Restriction
from tensoropt.costs.source import CostSource, build_tables, real_shape
from tensoropt.costs.tables import CostTables
from tensoropt.errors import PlanError, suggest
from tensoropt.evaluation.evaluate import Evaluation, Evaluator, space_of
from tensoropt.evaluation.problem import Problem
from tensoropt.launchers.job import NOTHING, LaunchedJob
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.families.routed_experts import DISPATCH, EXPERTS
from tensoropt.ops.layouts import Layout
from tensoropt.ops.ring_attention import RING
from tensoropt.pipeline.compose import compose
from tensoropt.pipeline.composer import Composer, Crossings
from tensoropt.pipeline.evaluate import PipelineEvaluation, assemble
from tensoropt.pipeline.points import pipelined_point
from tensoropt.pipeline.stage_frontiers import PlaceFrontiers, StageSearch, Thoroughness
from tensoropt.pipeline.stages import Cutter, dealt_cuts
from tensoropt.plan.kinds import STAGE_AXIS
from tensoropt.plan.point import Point
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.sharded.common.restricted import MOST_POINTS, batch_labels
from tensoropt.planners.sharded.megatron import inner_labels, makers_of
from tensoropt.planners.sharded.zero import STAGES, reduction_times
from tensoropt.question.settings import Settings
from tensoropt.search import NoStrategyError, track_frontier
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.recipes import RECIPES, groups_run_once, recipes_of
from tensoropt.sharding.regions import find_regions
from tensoropt.sharding.sequence import QUERIES, sequence_strategies
from tensoropt.sharding.storage import Storage
from tensoropt.simulate.candidates import overlap_of

_WHOLE_STAGE = 0
"""The stage number for no ZeRO: parameters, gradients and state are whole on every data-parallel rank."""


def _shards(job: LaunchedJob) -> int:
    """Return the number of data-parallel ranks over which ZeRO shards, not counting context parallelism."""
    return 1 if job.stage == _WHOLE_STAGE else (job.shard_group or job.data or 1)


def _recomputes(job: LaunchedJob, block: int, blocks: int) -> bool:
    if job.first is not None:
        return block % max(-(-blocks // (job.places * job.stages_per_place)), 1) < job.first
    return (block + 1) % job.every == 0


def mesh_of(job: LaunchedJob) -> Mesh:
    """Return the mesh of one pipeline rank: replicas outside, then the ranks of a shard group, then context
    parallelism, tensor parallelism innermost (Megatron-LM's order of ranks).
    """
    data, shards = job.data or 1, _shards(job)
    sizes = {"replica": data // shards, "shard": shards, "context": job.context, "tensor": job.tensor}
    axes = {name: size for name, size in sizes.items() if size > 1} or {"replica": 1}
    return Mesh(shape=tuple(axes.values()), names=tuple(axes))


@dataclass(frozen=True)
class PinnedPoint:
    """A launcher's job with its simulated figures.

    Attributes:
        point: the job's step time, memory, collectives, and the sources of these figures.
        evaluation: the simulated step.
        tables: cost tables with only the configurations that the job permits.
        choice: for each variable of the tables (such as a group), the index of its configuration.
        mesh: the mesh on which the job runs.
        notes: remarks on settings that could not be simulated as requested.
    """

    point: Point
    evaluation: Evaluation
    tables: CostTables
    choice: Mapping[str, int]
    mesh: Mesh
    notes: tuple[str, ...] = ()


def simulate_pinned(problem: Problem, costs: CostSource, job: LaunchedJob) -> PinnedPoint:
    """Return the fastest strategy that a job permits, simulated.

    Args:
        problem: the model captured at the global batch size, in the settings' mode and dtype.
        costs: the cost model of the job's cluster.

    Raises:
        JobError: the job's degrees need another device count, or its micro-batches do not divide the batch.
        UnsuitableError: the model cannot be split as the job says. The message names the size that does not
            divide, or the unsupported part.
    """
    job, micro_batches = _checked(problem, costs, job)
    assert job.places == 1, "simulate_pinned_pipeline is for jobs with stages"
    cluster, mesh = costs.cluster, _with_copies(mesh_of(job), problem.graph)
    pinning = _Pinning(problem, job, micro_batches, mesh)
    limits = {(mesh.label, micro_batches): pinning.restriction()}
    ((_, tables, _),) = build_tables(
        problem.graph, problem.micro, costs, [mesh], [micro_batches], pinning.regions, limits
    )
    names = space_of(problem, mesh, tables, ())
    try:
        frontier = track_frontier(pinning.restricted(tables), epsilon=1e-3, max_points=MOST_POINTS)
    except NoStrategyError as error:
        raise UnsuitableError(f"no strategy has the job's degrees and settings: {error}") from None
    # Ascending in memory, so that the last one is the fastest.
    fastest = frontier.strategies([-1])
    chosen = fastest.strategy(0), fastest.options_of(0)
    memory, compute, communication = tables.breakdown(*chosen)
    (evaluation,) = Evaluator(tables, overlap_of(cluster, mesh, beside=costs.beside))([chosen])
    point = evaluation.point(0, names, 0, additive=(memory, compute + communication), planner="pinned")
    return PinnedPoint(point, evaluation, tables, chosen[0], mesh, tuple(pinning.notes))


def _checked(problem: Problem, costs: CostSource, job: LaunchedJob) -> tuple[LaunchedJob, int]:
    """Return the job with all degrees set for the cluster, and its number of micro-batches per step."""
    job = job.on(costs.cluster.device_count)
    micro_batches = job.micro_batches_of(problem.batch)
    if job.stage not in (_WHOLE_STAGE, *STAGES):
        raise UnsuitableError(f"ZeRO has no stage {job.stage}; give 0 (whole), 1, 2 or 3")
    shards = _shards(job)
    experts = shards if shards > 1 else job.data
    if job.experts not in (1, experts):
        raise UnsuitableError(
            f"an expert-parallel degree of {job.experts} is not supported for {job.data} data-parallel "
            f"ranks in groups of {experts}; give 1 or {experts}"
        )
    if micro_batches > 1 and problem.refusal:
        raise UnsuitableError(f"{micro_batches} micro-batches are refused: {problem.refusal}; use 1")
    if job.recompute == NOTHING:
        return job, micro_batches
    if job.recompute not in RECIPES:
        known = (*RECIPES, NOTHING)
        raise UnsuitableError(
            f"no recomputation is called '{job.recompute}'; {suggest(job.recompute, known)}"
        )
    if not (regions := find_regions(problem.graph)):
        raise UnsuitableError("this model has no repeated blocks to recompute; leave recomputation out")
    for region in regions:
        if groups_run_once(problem.graph, region, job.recompute) is None:
            raise UnsuitableError(
                f"the recipe '{job.recompute}' recomputes nothing in {region.name}; use one of "
                f"{', '.join(recipes_of(problem.graph, region))}"
            )
    return job, micro_batches


_COPIES = "copies"
"""The mesh axis of tensor-parallel ranks that share a key head of attention."""


def _with_copies(mesh: Mesh, graph: GroupGraph) -> Mesh:
    """Return the mesh, with a tensor axis of more ranks than attention has key heads replaced by two axes:
    one over key heads and, inside it, one over the query heads of each key head.
    """
    if mesh.names[-1] != "tensor":
        return mesh
    tensor = mesh.shape[-1]
    for group in (group for group in graph.groups if group.anchor.target == ATTENTION):
        heads = {dim.name: dim.size for dim in graph.atoms.spaces[group.name].dims}
        # Keys have separate heads, or repeated ones, whose copies are the inner factor of the dim.
        keys = heads.get("heads", 0) if "group" in heads else heads.get("heads.0", 0)
        if 1 < keys < tensor and tensor % keys == 0:
            shape = (*mesh.shape[:-1], keys, tensor // keys)
            return Mesh(shape=shape, names=(*mesh.names, _COPIES))
    return mesh


class _Pinning:
    def __init__(self, problem: Problem, job: LaunchedJob, micro_batches: int, mesh: Mesh):
        self.problem, self.graph, self.job, self.mesh = problem, problem.graph, job, mesh
        self.sizes = (micro_batches, *real_shape(mesh))
        self.names = tuple(name for name, size in zip(mesh.names, mesh.shape, strict=True) if size > 1)
        # Micro-batches are axis 0 of layouts.
        shards = ("shard", "context") if job.stage != _WHOLE_STAGE else ()
        self.shard_axes = [i for i, name in enumerate(self.names, 1) if name in shards]
        self.stage = job.stage if self.shard_axes else _WHOLE_STAGE
        self.once: dict[str, bool] = {}
        """For each group in a repeated block, whether its forward runs only once, without recomputation."""
        blocks = find_regions(problem.graph) if job.recompute != NOTHING or job.root_once else ()
        self.regions = blocks if job.recompute != NOTHING else ()
        for number, region in enumerate(self.regions):
            once = groups_run_once(problem.graph, region, job.recompute) or frozenset()
            if not _recomputes(job, number, len(blocks)):
                once = frozenset(region.groups)
            self.once.update((name, name in once) for name in region.groups)
        self.inside_blocks = {name for region in blocks for name in region.groups}
        self.notes: list[str] = []
        if self.stage == 1 and micro_batches == 1:
            # Stage 1 needs several micro-batches (costs.parameters.unsharded_options).
            self.stage = 2
            self.notes.append("simulated as ZeRO stage 2, which is the same with one micro-batch")

    def restriction(self) -> Restriction:
        labels = self._labels()
        kept = {}
        for group in self.graph.groups:
            configurations = enumerate_configurations(
                self.graph.atoms, group, self.sizes, self.problem.micro[group.name]
            )
            allowed_labels = labels[group.name]
            kept[group.name] = tuple(
                i
                for i, configuration in enumerate(configurations)
                if all(label in w for label, w in zip(configuration.labels, allowed_labels, strict=True))
            )
            if not kept[group.name]:
                raise UnsuitableError(
                    f"{group.name} ({group.anchor.target}) cannot be split as the job asks on mesh "
                    f"{self.mesh.label} ({', '.join(self.names)}) with {self.sizes[0]} micro-batches; use "
                    "degrees that divide its sizes"
                )
        gathered = dict.fromkeys((group.name for group in self.graph.groups), self.job.gathered_inputs)
        return Restriction(kept=kept, gathered_again=gathered)

    def _labels(self) -> Mapping[str, tuple[frozenset[str], ...]]:
        batch = batch_labels(self.graph)
        inner = inner_labels(self.graph, batch) if "tensor" in self.names else {}
        attention = (group.anchor for group in self.graph.groups if group.anchor.target == ATTENTION)
        keys = (name for anchor in attention for name in anchor.inputs()[1:3])
        shared = makers_of(self.graph, keys, lambda group: bool(group.parameters or group.shared))
        along = self._along_sequence() if "context" in self.names else {}

        def on(axis: str, group: Group) -> frozenset[str]:
            if axis in ("tensor", _COPIES):
                copies = self._on_copies(group, shared) if axis == _COPIES else frozenset()
                return self._inside(group, inner[group.name], batch[group.name]) | copies
            if axis == "context":
                return along[group.name]
            return frozenset({self._of_data(group, batch[group.name], axis)})

        return {group.name: tuple(on(axis, group) for axis in self.names) for group in self.graph.groups}

    def _along_sequence(self) -> dict[str, frozenset[str]]:
        """Return each group's labels (split loop, layout of reduced sums) for its splits along the sequence.

        Raises:
            UnsuitableError: no attention of the model can be split along the sequence.
        """
        ring = self.job.ring
        labels = {name: s.label for name, s in sequence_strategies(self.graph, ring=ring).items()}
        if not any(label.loop in (QUERIES, RING) for label in labels.values()):
            raise UnsuitableError(
                f"context {self.job.context} splits the queries of attention, and this model has no "
                "scaled_dot_product_attention whose queries follow the inputs' second dim; set context=1"
            )
        if ring and not any(label.loop == RING for label in labels.values()):
            raise UnsuitableError(
                "ring attention needs as many keys and values as queries, no dropout and no trained mask; no "
                "scaled_dot_product_attention of this model is like that; set ring=False"
            )
        return {
            group.name: frozenset(
                str(s.label) for s in group.strategies if s.label.dim == labels[group.name].dim
            )
            for group in self.graph.groups
        }

    def _of_data(self, group: Group, batch: str, axis: str) -> str:
        of_experts = "shard" if "shard" in self.names else "replica"
        if self.job.experts > 1 and axis == of_experts and group.anchor.target == EXPERTS:
            return batch.replace("rows", DISPATCH, 1)
        return batch

    @staticmethod
    def _on_copies(group: Group, shared: frozenset[str]) -> frozenset[str]:
        """Return the labels of a group's splits over ranks that share a key head. On these ranks keys and
        values are replicated, and attention splits its query heads.
        """
        whole = {str(group.unsplit.label)} if group.name in shared else set()
        return frozenset(whole | {str(s.label) for s in group.strategies if s.label.loop == "group"})

    def _inside(self, group: Group, megatron: frozenset[str], batch: str) -> frozenset[str]:
        if not self.job.sequence_parallel:
            return megatron
        # Korthikanti et al., arXiv 2205.05198, section 4.2.2: between the products, activations are split
        # along the sequence, and the partial sums of row splits are reduce-scattered instead of all-reduced.
        if megatron == {"none"}:
            return frozenset(str(s.label) for s in group.strategies if str(s.label) != batch)
        stems = {label.partition("@")[0] for label in megatron}
        same = (str(s.label) for s in group.strategies if str(s.label).partition("@")[0] in stems)
        return megatron | frozenset(same)

    def restricted(self, tables: CostTables) -> CostTables:
        return tables.restricted(self._allowed)

    def _allowed(self, variable: VariableTable, index: int) -> np.ndarray | None:
        if variable.key.kind == "parameter":
            return self._stored([(layout,) for layout in variable.layouts], of_root=True)[[index]]
        if variable.key.kind != "group":
            return None
        once = self.once.get(name := str(variable.key))
        if once is not None and variable.again and variable.again[index] is once:
            return NO_OPTION
        return self._stored(variable.options[index], of_root=name not in self.inside_blocks)

    def _stored(self, ways: Sequence[Sequence[Layout]], *, of_root: bool) -> np.ndarray:
        reduce = STAGES.get(2 if self.job.root_once and of_root and self.stage == 3 else self.stage)
        unsharded = ("tensor", _COPIES)
        axes = list(enumerate(self.names, 1))
        whole = [i for i, name in axes if name not in unsharded and i not in self.shard_axes]
        shards = np.array([sum(layout[a] >= 0 for layout in way for a in self.shard_axes) for way in ways])
        sharded = np.array([sum(layout[a] >= 0 for layout in way for a in whole) for way in ways])
        # Parameters that cannot be sharded at all are stored whole in every stage.
        best: np.ndarray = (sharded == sharded.min()) & (shards == (shards[sharded == sharded.min()]).max())
        fitting = best & np.array([reduction_times(way) == ({reduce} if reduce else set()) for way in ways])
        # As in PyTorch's FSDP and DeepSpeed, parameters that are gathered for each use are prefetched.
        ahead = fitting & np.array([any(Storage.of(stored).gathered_ahead for stored in way) for way in ways])
        # A group without parameters, or whose parameters stay whole, is the same in every stage.
        return next((mask for mask in (ahead, fitting) if mask.any()), best)


_EFFORT = Thoroughness(gap=1e-3, candidates=4, in_flight=False)
"""The search effort for each stage; an assumption: a job's stage leaves few choices open."""


@dataclass(frozen=True)
class PinnedPipelinePoint:
    """A launcher's job with pipeline stages, and its simulated figures.

    Attributes:
        point: the job's step time, memory, collectives, and the sources of these figures.
        evaluation: the simulated stages, and the schedule over time.
        mesh: the mesh on which the job runs; its first axis is the pipeline.
        notes: remarks on settings that could not be simulated as requested.
    """

    point: Point
    evaluation: PipelineEvaluation
    mesh: Mesh
    notes: tuple[str, ...] = ()


def simulate_pinned_pipeline(
    problem: Problem, settings: Settings, costs: CostSource, job: LaunchedJob
) -> PinnedPipelinePoint:
    """Return the fastest pipelined strategy that a job permits, with blocks dealt evenly to stages.

    Tensors that cross cuts are split along the batch and, on the context axis, along the sequence. On the
    tensor axis they are replicated, or split along the sequence if ``sequence_parallel``. As in Megatron-LM,
    parameters are gathered from the beginning of the step on, and gradients are reduced while other
    micro-batches and earlier stages compute.

    Args:
        problem: the model captured at the global batch size, in the settings' mode and dtype.
        settings: must let blocks be recomputed (``auto``) if the job recomputes any.
        costs: the cost model of the job's cluster.

    Raises:
        JobError: the job's degrees need another device count, or its micro-batches do not divide the batch.
        UnsuitableError: the model cannot be cut or split as the job says. The message names the size that
            does not divide, or the unsupported part.
    """
    job, micro_batches = _checked(problem, costs, job)
    place, cutter = _with_copies(mesh_of(job), problem.graph), Cutter(problem.graph)
    pinning = _Pinning(problem, job, micro_batches, place)
    mesh = Mesh(shape=(job.places, *real_shape(place)), names=(STAGE_AXIS, *pinning.names))
    remade, restriction = cutter.duplicable, pinning.restriction()
    search = StageSearch(
        problem, settings, cutter, remade, mesh, micro_batches, restriction, _EFFORT, pinning.restricted
    )
    frontiers = PlaceFrontiers(search, costs)
    # Megatron-LM sends a part from each tensor-parallel rank and gathers it within the node (Narayanan et
    # al., SC 2021, section 4.1), which is searched beside sending the whole from each.
    inside = ("second",) if job.sequence_parallel else ("whole", "second")
    ways = {"context": ("second",), "tensor": inside, _COPIES: inside}
    try:
        composer = Composer(
            frontiers,
            job.schedule,
            Crossings(
                everywhere_alike=True, of_axes=tuple(ways.get(name, ("batch",)) for name in pinning.names)
            ),
            lambda offers, count: islice(compose(offers, count), 1),
            per_place=job.stages_per_place,
        )
        cuts = dealt_cuts(cutter, composer.stages)
        positions = [[0], *([cut] for cut in cuts), [len(problem.graph.groups)]]
        pipelines = list(composer.pipelines(positions))
    except PlanError as refusal:
        raise UnsuitableError(str(refusal)) from None
    if not pipelines:
        raise UnsuitableError(
            "; ".join(("no pipeline has the job's degrees and settings", *composer.notes))
            + "; use degrees that divide the model's sizes"
        )
    apart = (assemble(p.strategy, p.stages, frontiers.prices, communicating_apart=True) for p in pipelines)
    best = min(apart, key=lambda pipeline: pipeline.time_s)
    point = pipelined_point(best, mesh, space=0, planner="pinned")
    return PinnedPipelinePoint(point, best, mesh, (*pinning.notes, *composer.notes))
