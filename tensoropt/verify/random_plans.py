"""Verification of random legal strategies of a model, to find mistakes in sharding, lowering and costs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.console import shows_progress
from tensoropt.costs.source import CostSource, real_shape
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import Problem, micro_batch_counts
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.placement.prices import PlacedPrices
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.model_source import OnnxOptions
from tensoropt.question.settings import Settings
from tensoropt.session.refining import MAX_AXES
from tensoropt.sharding.configurations import MicroBatchRefused, micro_batch_strategies
from tensoropt.sharding.strategy import Strategy
from tensoropt.types import ProgressChoice, heard
from tensoropt.verify import random_strategies
from tensoropt.verify.predict import Wanted, place_for, predict, predict_placed
from tensoropt.verify.run import Predicted, predict_and_run, ranks_with

_RECOMPUTE = 0.3
"""The probability that a repeated block is recomputed; an assumption."""
_FOLLOWING = 0.5
"""The probability that most groups split the batch or the sequence on the same axes; an assumption."""
_PIPELINED = 3
"""One in this many random strategies is a pipeline by default; an assumption."""


@shows_progress
def verify_random(
    source: str,
    cluster: str | Cluster,
    count: int,
    *,
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "float32",
    onnx: OnnxOptions | None = None,
    where: Wanted = "auto",
    placed: bool = False,
    pipeline: int | None = None,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
) -> dict[str, Any]:
    """Verify random legal strategies; return a report like that of :func:`tensoropt.verify.verify_plan`.

    Such strategies combine choices that no frontier has, to find mistakes in sharding, lowering and costs.

    Args:
        cluster: the cluster whose meshes are drawn.
        count: the number of strategies.
        seed: the seed of weights and strategies.
        dtype: ``float32``, or ``bfloat16`` for mixed precision.
        onnx: options for the import of an ONNX file.
        where: the ranks to run on; the values are those of :func:`tensoropt.verify.verify_plan`.
        placed: whether to draw placed plans instead, with splits or micro-batches.
        pipeline: the pipeline degree if only pipelines are drawn; by default a third are, of any degree.
        progress: True for a bar, False for none, or a function; by default a bar if a person is watching.

    Raises:
        TensorOptError: no strategies are requested, or the ranks are not available.
    """
    if count < 1:
        raise TensorOptError(f"{count} random strategies prove nothing; give at least 1")
    target = load_cluster(cluster)
    place = place_for(target.device_count, target.device_type, target.name, where)
    sizes = () if batch is None else (("batch", batch),)
    spec = ModelSpec(source, seed, settings=sizes, compute_dtype=dtype, onnx=onnx, device=place.device)
    report = heard(progress)
    with ranks_with(spec, place, target.device_count) as pool:
        report("capture", 0, 1, source)
        loaded = load_model(spec)
        problem = _problem_of(loaded)
        report("capture", 1, 1, source)
        draw: Callable[..., list[Predicted]] = (
            _placements if placed else functools.partial(_strategies, pipeline)
        )
        drawn = functools.partial(draw, loaded, problem, target, count, seed)
        return predict_and_run(spec, drawn, target, place, pool, Settings(dtype=dtype), store, report)


def _problem_of(loaded: CapturedModel) -> Problem:
    try:
        return Problem(loaded.captured, loaded.graph, micro_batch_strategies(loaded.graph))
    except MicroBatchRefused as refusal:
        # The refusal is passed on: the problem then offers one micro-batch only.
        return Problem(
            loaded.captured, loaded.graph, random_strategies.micro_strategies(loaded.graph, 1), str(refusal)
        )


def _strategies(
    pipeline: int | None,
    loaded: CapturedModel,
    problem: Problem,
    cluster: Cluster,
    count: int,
    seed: int,
    costs: CostSource,
) -> list[Predicted]:
    counts = micro_batch_counts(problem, Settings())
    degrees = random_strategies.pipeline_degrees(loaded.graph, cluster) if pipeline is None else (pipeline,)
    piped = count if pipeline is not None else (count // _PIPELINED if degrees else 0)
    # A generator of its own: the same seed gives the same strategies whatever else drew numbers before.
    rng, meshes = random.Random(seed), cluster.meshes(MAX_AXES)
    drawn: list[tuple[Strategy | PipelinedStrategy, Mesh]] = []
    for _ in range(count - piped):
        mesh, micro = rng.choice(meshes), rng.choice(counts)
        per_group = random_strategies.micro_strategies(loaded.graph, micro)
        shape = micro, *real_shape(mesh)
        follows = rng.random() < _FOLLOWING
        given = random_strategies.random_following(loaded.graph, shape, per_group, rng) if follows else None
        strategy = random_strategies.random_strategy(loaded.graph, shape, per_group, rng, _RECOMPUTE, given)
        drawn.append((strategy, mesh))
    drawn += random_strategies.draw_pipelines(loaded, cluster, degrees, counts, piped, seed, _RECOMPUTE)
    return predict(drawn, costs)


def _placements(
    loaded: CapturedModel, problem: Problem, cluster: Cluster, count: int, seed: int, costs: CostSource
) -> list[Predicted]:
    rng, devices = random.Random(seed), cluster.device_count
    counts = micro_batch_counts(problem, Settings())
    prices = PlacedPrices(loaded.graph, cluster, costs)
    drawn: list[Predicted] = []
    for _ in range(count):
        micro = rng.choice(counts)
        splits = random_strategies.random_splits(loaded.graph, devices, rng) if micro == 1 else None
        graph = prices.price(splits, micro)
        drawn.append(predict_placed(graph, random_strategies.random_placement(graph.graph, devices, rng)))
    return drawn
