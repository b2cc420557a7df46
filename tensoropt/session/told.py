"""Functions that find the launcher's job (its degrees and other options) that comes nearest to a point."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tensoropt.errors import TensorOptError
from tensoropt.exploration.rates import StepWork
from tensoropt.launchers.job import NOTHING, JobError, LaunchedJob
from tensoropt.launchers.registry import launcher_named, write_job
from tensoropt.ops.calls import CostClass
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.registry import cost_class_of
from tensoropt.plan.kinds import PLACED
from tensoropt.plan.plan import Plan, StagePlan
from tensoropt.plan.plan_names import DATA, SEQUENCE, TENSOR, UNSPLIT, splits_experts, stage_of, what_it_does
from tensoropt.plan.point import Point
from tensoropt.plan.point_records import IN_PART
from tensoropt.profiling.optimizers import OPTIMIZERS, short_optimizer
from tensoropt.question.model_source import load_model
from tensoropt.session.launched import JobPrices, PricedJob
from tensoropt.sharding.recipes import recipe_name
from tensoropt.sharding.regions import find_regions
from tensoropt.units import format_bytes, format_seconds, share_words

_ALIKE = 0.01
"""The relative difference up to which a job's costs count as the same as a point's; an assumption."""

_PRODUCTS = (CostClass.MATRIX, CostClass.CONVOLUTION, CostClass.RECURRENT)


class ToldJob(NamedTuple):
    """The launcher's job that comes nearest to a point.

    Attributes:
        point, name: the requested point, and the name of its plan.
        priced, title: the job with its own simulated figures, and the name of its plan.
        why: the part of the point that the launcher cannot express; "" if there is none.
        text: the content of the launcher's config.
    """

    point: Point
    name: str
    priced: PricedJob
    title: str
    why: str
    text: str

    @property
    def is_the_point(self) -> bool:
        """Whether the job expresses all of the point's plan, with memory and time within 1 %."""
        figures = ((self.priced.point.memory_bytes, self.point.memory_bytes),
                   (self.priced.point.time_s, self.point.time_s))  # fmt: skip
        return not self.why and all(abs(job / own - 1) <= _ALIKE for job, own in figures)

    @property
    def reason(self) -> str:
        """Why the launcher cannot express the point, in words."""
        return self.why or "its operators and parameters are not all split alike"

    def sentence(self) -> str:
        """Return the job's name, step time and memory, compared with the point's, as text."""
        memory, time_s = self.priced.point.memory_bytes, self.priced.point.time_s
        return (
            f"{self.title}: {format_seconds(time_s)} a step ({_beside(time_s, self.point.time_s)}), "
            f"{format_bytes(memory)} ({_beside(memory, self.point.memory_bytes)})"
        )


def _beside(figure: float, own: float) -> str:
    share = figure / own - 1
    sign = "+" if share > 0 else "−"
    return "as the point" if abs(share) <= _ALIKE else f"{sign}{share_words(abs(share))}"


def nearest(prices: JobPrices, index: int, launcher: str) -> ToldJob:
    """Return the launcher's job whose simulated memory and time come nearest to a point's.

    Args:
        index: the index of the point in ``all_points``.

    Raises:
        JobError: there is no such launcher, or it can express no plan near the point; the message says why.
    """
    exploration, entry = prices.exploration, launcher_named(launcher)
    plan, name = exploration.plan(index), exploration.names[index]
    if plan.optimizer not in OPTIMIZERS:
        raise JobError(
            f"{launcher} cannot express {short_optimizer(plan.optimizer)}; explore with --optimizer adam, or "
            "call tensoropt.parallelize(model, plan) in your own script"
        )
    if adapters := exploration.model.adapters:
        raise JobError(
            f"{launcher} cannot express adapters ({adapters}), nor frozen parameters that are stored in the "
            "compute dtype; call tensoropt.parallelize(model, plan) in your own script"
        )
    job = degrees(prices, plan)
    told: list[PricedJob] = []
    refusals: dict[str, None] = {}
    for variant in entry.variants(job):
        try:
            if not (reason := entry.refusal(variant)):
                told.append(prices.of(variant))
                continue
        except TensorOptError as error:
            reason = str(error)
        refusals[reason] = None
    if not told:
        raise JobError(
            f"{launcher} can express no plan near {name}: {'; '.join(refusals)}; choose another point"
        )
    point = exploration.all_points[index]

    def distance(one: PricedJob) -> float:
        sides = (one.point.memory_bytes / point.memory_bytes, one.point.time_s / point.time_s)
        return sum(abs(math.log(side)) for side in sides)

    best = min(told, key=distance)
    why = "" if distance(best) <= _ALIKE else entry.refusal(job) or next(iter(refusals), "")
    classes = _block_classes(prices, launcher) if entry.names_blocks and best.job.stage else ()
    nodes = math.prod(level.size for level in prices.costs.cluster.levels[:-1])
    text = write_job(replace(best.job, nodes=nodes, block_classes=classes))
    return ToldJob(point, name, best, prices.name_of(best), why, text)


def _block_classes(prices: JobPrices, launcher: str) -> tuple[str, ...]:
    blocks, model = [region.name for region in find_regions(prices.problem.graph)], prices.exploration.model
    if not blocks:
        return ()
    try:
        built = load_model(model.source, device="meta", seed=model.seed, batch=model.batch).model
        return tuple(dict.fromkeys(type(built.get_submodule(block)).__name__ for block in blocks))
    except (TensorOptError, AttributeError) as error:
        raise JobError(
            f"a config of {launcher} needs the name of the class of the model's blocks ({blocks[0]} ...), "
            f"but building the model to find that name failed: {error}; export where it can be built, from a "
            "file, the zoo or Hugging Face"
        ) from None


def degrees(prices: JobPrices, plan: Plan) -> LaunchedJob:
    """Return a plan as a job with one degree per kind of parallelism.

    Where operators differ, the majority decides: over the split of matrix products and attentions on each
    mesh axis, the storage of parameters, and the recomputation of blocks.

    Raises:
        JobError: the plan is a placed one, with every operator on one device.
    """
    if plan.kind is PLACED:
        raise JobError(
            "a placed plan puts every operator on one device, which no launcher can express; choose another "
            "point"
        )
    problem = prices.problem
    axes = dict(zip(plan.mesh.names, plan.mesh.shape, strict=True))
    labels = _heavy_labels(prices, plan)
    roles: dict[str, int | None] = {}
    for axis in axes:
        kinds = Counter(
            what_it_does(own[axis].replace("ring", "queries"), micro, problem.sequence.get(name, ""))
            for name, (micro, own) in labels.items()
            if axis in own and own[axis] not in UNSPLIT
        )
        roles[axis] = kinds.most_common(1)[0][0] if kinds else None
    every = [(axis, label) for _, own in labels.values() for axis, label in own.items()]
    stage, replicated = _stored(prices, plan, roles)
    work, graph = StepWork.of(prices.exploration), problem.graph.atoms.graph
    size = {
        kind: math.prod(axes[a] for a, role in roles.items() if role == kind)
        for kind in (DATA, TENSOR, SEQUENCE)
    }
    recipe, every_so_many = _recomputed(prices, plan)
    places, stages = plan.mesh.places, max(len(plan.info.stages), 1)
    sends_rows = any(splits_experts(label) for axis, label in every if roles[axis] == DATA)
    return LaunchedJob(
        launcher="",
        data=size[DATA],
        replicas=math.prod(axes[a] for a in replicated if roles[a] == DATA) if stage else 1,
        tensor=size[TENSOR],
        context=size[SEQUENCE],
        ring=any(label == "ring" for _, label in every),
        experts=size[DATA] if sends_rows else 1,
        stage=stage,
        sequence_parallel=size[TENSOR] > 1 and _splits_sequence(prices, plan, roles),
        gathered_inputs=0 < len(find_regions(problem.graph)) <= len(plan.gathered_again),
        recompute=recipe,
        every=every_so_many,
        places=places,
        stages_per_place=stages // places,
        schedule=plan.info.schedule or "1f1b",
        batch=problem.batch,
        micro_batches=plan.micro_batches,
        sequence=work.tokens // work.samples if work.tokens and work.samples else None,
        dtype=graph.compute_dtype,
        optimizer=plan.optimizer,
    )


def _heavy_labels(prices: JobPrices, plan: Plan) -> dict[str, tuple[str, Mapping[str, str]]]:
    heavy = {
        group.name
        for group in prices.problem.graph.groups
        if group.anchor.target == ATTENTION
        or (group.parameters and cost_class_of(group.anchor.target) in _PRODUCTS)
    }
    return {name: (own.micro, own.axes) for name, own in plan.operators.items() if name in heavy}


def _splits_sequence(prices: JobPrices, plan: Plan, roles: Mapping[str, int | None]) -> bool:
    sequence = prices.problem.sequence
    return any(
        what_it_does(label, own.micro, sequence.get(name, "")) == SEQUENCE
        for name, own in plan.operators.items()
        for axis, label in own.axes.items()
        if roles[axis] == TENSOR
    )


def _stored(prices: JobPrices, plan: Plan, roles: Mapping[str, int | None]) -> tuple[int, list[str]]:
    tensors = prices.problem.graph.atoms.graph.tensors
    stages, split = Counter[int](), Counter[str]()
    # A pipeline's first axis has no part in how parameters are stored.
    named = {axis for own in plan.operators.values() for axis in own.axes}
    names = [name for name in plan.mesh.names if roles.get(name) is not None or name in named]
    whole = 0
    for name, parameter in plan.parameters.items():
        elements = tensors[name].elements
        whole += elements
        along = [
            axis
            for axis, placement in zip(names, parameter.stored[1:], strict=True)
            if placement.startswith("S(") and roles[axis] in (DATA, SEQUENCE)
        ]
        stages[stage_of(parameter.stored[0]) if along else 0] += elements
        split.update(dict.fromkeys(along, elements))
    stage = stages.most_common(1)[0][0] if stages else 0
    return stage, [axis for axis in names if 2 * split[axis] < whole]


def _recomputed(prices: JobPrices, plan: Plan) -> tuple[str, int]:
    parts: list[Plan | StagePlan] = [plan, *plan.info.stages]
    again = {block for part in parts for block in part.recomputed}
    once = {group for part in parts for group in part.once}
    regions = find_regions(prices.problem.graph)
    recipes = Counter(
        recipe_name(prices.problem.graph, region, once.intersection(region.groups)) or IN_PART
        for region in regions
        if region.name in again
    )
    # Fewer than half as many as every second one would be: none.
    if not recipes or 4 * recipes.total() < len(regions):
        return NOTHING, 1
    return recipes.most_common(1)[0][0], max(round(len(regions) / recipes.total()), 1)
