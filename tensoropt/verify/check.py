"""Does a plan do what it should? It is run beside the unsplit model on the same data.

Checked: the loss, every gradient, the parameters after some optimizer steps, that replicas still agree;
noted: the collectives issued, the memory a step needs, the time it takes. What was predicted comes from the
cost tables of the caller, never from the executor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tensoropt.engine.models import ModelSpec
from tensoropt.errors import PlanError
from tensoropt.ranks.failures import RankError
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Progress, silent
from tensoropt.verify.rank_checks import CheckOptions, check_plan, narrow_distance
from tensoropt.verify.recorder import all_sent
from tensoropt.verify.reference import module_difference

LOSS_TOLERANCE = 1e-5
"""Relative. A mean loss sums thousands of float32 terms in another order: a few units of 6e-8 each, growing
with the square root of their number and with depth."""
GRADIENT_TOLERANCE = 1e-3
"""Relative to each parameter's largest gradient, but to no less than 1e-3 of the model's largest. Measured:
below 1e-6 for ordinary parameters, 2e-4 for a convolution's bias in front of a batch norm, whose true
gradient is zero. Wrong placements are off by per cents (10 to 164 % in those tried)."""
PARAMETER_TOLERANCE = 1e-4
"""After two optimizer steps, relative to each parameter's largest value. Measured: up to 2e-5, for biases
that start at zero."""
TOLERANCE_FACTOR = {"float64": 1e-6, "float32": 1.0, "float16": 2e3, "bfloat16": 2e4}
"""By the lowest precision that anything in the model is computed in: about the ratio of unit roundoffs, less
strict in float64, where sums of thousands of terms and eps constants weigh more."""
SHRUNK = 1e-6
"""The most that double precision may leave of a difference in single precision, for it to be rounding: of
roundoff it leaves 2e-9, of a fault all. Measured where two steps through batch norms over 4 samples amplify
rounding (MobileNetV2 on 32x32 images): parameters off by 2e-10 in float64, gradients by 7e-13."""
DISTANCE_FACTOR = 10.0
"""How many times as far from the exact gradients, in norm, a split model's may be as the unsplit model's in
the same precision are. Measured: 0.9 to 1.1 times where rounding crosses no kink (an MLP and a transformer in
bfloat16, a VGG with batch norms in float32)."""
KINKED_DISTANCE = {"float32": 5e-2, "float16": 2e-1, "bfloat16": 4e-1}
"""What crossed kinks may add to that, relative to the gradients' norm. Measured: 1.3e-2 for a ResNet with 2x2
images in float32, 0.22 for a small VGG with batch norms in bfloat16. A smaller fault that only a narrow type
has is not told from them; in a model without kinks it is."""
NARROW_FACTOR, NARROW_TOLERANCE = 3.0, 2e-3
"""Under mixed precision: how often the model's own rounding (unsplit, against unsplit in float32), beside
half a unit of bfloat16's last place. Partial sums are rounded once more than whole ones, so a split model is
off by about as much as the narrow type is at all. In a model that rounding throws far off (a batch norm over
few samples) this shows little: verify it in float32, where the same rules are held to 1e-3."""


def verify_strategies(
    model: ModelSpec,
    strategies: Sequence[Mapping[str, Any]],
    *,
    pool: RankPool | None = None,
    options: CheckOptions | None = None,
    timeout_s: float = 600.0,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Run strategies on ranks of this machine and compare them with the unsplit model.

    Args:
        model: what to build on every rank.
        strategies: as :func:`tensoropt.sharding.serialise.strategy_to_dict` writes them; a placed one is
            ``{"placed": ...}`` as :func:`tensoropt.placement.plans.placed_to_dict` writes it.
        pool: ranks to use where their number fits; others are started as needed.
        options: what to check.
        timeout_s: for one strategy.
        progress: is told after each strategy, as the stage ``run``.

    Returns:
        One dict per strategy, plain data: ``loss_difference, gradient_difference, parameter_difference,
        buffer_difference, collectives_issued, memory_tracked_bytes, memory_tracked`` (both of the fullest
        rank), ``memory_tracked_of_ranks, time_measured_s, replicas_agree, numerics_ok, worst_gradient,
        not_finite, error``. A difference is inf where a value is NaN or infinite and the unsplit model's is
        not; ``not_finite`` counts by name what is so in the unsplit model itself. ``numerics_ok`` holds the
        differences against the tolerances of this module; ``error`` is None unless the strategy could not be
        run, or is right in double precision only.
    """
    options = options or CheckOptions()
    results: list[dict[str, Any] | None] = [None] * len(strategies)
    done = 0
    by_size: dict[int, list[int]] = {}
    for index, data in enumerate(strategies):
        by_size.setdefault(_devices(data), []).append(index)
    for size, indices in sorted(by_size.items()):
        with _ranks(pool, size, timeout_s) as ranks:
            for index in indices:
                results[index] = verify_one(model, strategies[index], ranks, options, timeout_s)
                done += 1
                progress("run", done, len(strategies), "")
            for index in indices:
                found = results[index]
                assert found is not None
                if may_be_rounding(found) and model.dtype is None:
                    results[index] = _decided(model, strategies[index], ranks, options, timeout_s, found)
    return [result for result in results if result is not None]


def may_be_rounding(found: Mapping[str, Any]) -> bool:
    """Whether a result outside the tolerances is worth another look in double precision.

    A NaN that the unsplit model does not give in the same precision is no rounding.
    """
    differences = [found[key] for key in DIFFERENCES if found[key] is not None]
    return found["numerics_ok"] is False and not found["error"] and all(map(math.isfinite, differences))


def _decided(
    model: ModelSpec,
    data: Mapping[str, Any],
    pool: RankPool,
    options: CheckOptions,
    timeout_s: float,
    narrow: dict[str, Any],
) -> dict[str, Any]:
    """``narrow`` with its numbers compared once more in double precision, which tells rounding from a fault.

    A value that rounding moves across a kink (a ReLU at zero, a maximum between equals) changes gradients by
    whole elements: on a ResNet with 2x2 images, by 7 % between two right results, in bfloat16 on a small VGG
    by 55 %. In double precision such a crossing is a billion times rarer, and a wrong placement is as wrong
    as before: a difference that shrinks with the unit of rounding is rounding, however much the model
    amplifies it. What goes wrong in the narrow type alone is bounded by :func:`near_enough`.
    """
    numerics = replace(options, memory=False, timed_steps=0)
    double = verify_one(replace(model, dtype="float64"), data, pool, numerics, timeout_s)
    if double["error"]:
        return narrow
    keys = [*DIFFERENCES, "worst_gradient", "worst_parameter", "replicas_agree", "numerics_ok", "compared_in"]
    double["numerics_ok"] = double["replicas_agree"] and is_rounding(narrow, double)
    if double["numerics_ok"]:
        try:
            ranks = pool.run(narrow_distance, model, data, numerics, timeout_s=timeout_s)
        except RankError as error:
            return narrow | {"error": str(error)}
        far = [found for found in ranks if not near_enough(found, narrow["compared_in"])]
        if far:
            double["numerics_ok"] = False
            narrow = narrow | {"error": _only_narrow(far[0], narrow["compared_in"])}
    return narrow | {key: double[key] for key in keys} | {"narrow": {k: narrow[k] for k in DIFFERENCES}}


def _only_narrow(found: Mapping[str, float], precision: str) -> str:
    return (
        f"right in float64, wrong in {precision}: gradients are off by {found['split']:.1e} of their norm, "
        f"the unsplit model's in {precision} by {found['unsplit']:.1e}; look for a cast to a narrow type"
    )


def near_enough(found: Mapping[str, float], precision: str) -> bool:
    """Whether a rank's gradients in the model's own precision are as near the exact ones as they should be.

    Double precision shows that placements are right, not that what is cast or summed in a narrow type is.

    Args:
        found: what :func:`tensoropt.verify.rank_checks.narrow_distance` gives.
        precision: the model's own.
    """
    allowed = DISTANCE_FACTOR * found["unsplit"]
    if found["kinked"]:
        allowed = max(allowed, KINKED_DISTANCE.get(precision, 0.0))
    return found["split"] <= allowed


def is_rounding(single: Mapping[str, Any], double: Mapping[str, Any]) -> bool:
    """Whether differences taken in both precisions are explained by rounding."""
    shrunk = {
        key: 0.0 if math.isfinite(single[key]) and double[key] <= SHRUNK * single[key] else double[key]
        for key in DIFFERENCES
    }
    return within_tolerance(shrunk, "float64")


def verify_module(model: ModelSpec, pool: RankPool, seed: int = 0) -> dict[str, Any] | None:
    """Differences between the unsplit graph and the original module; None for models that draw at random."""
    return pool.run(module_difference, model, seed)[0]


def _devices(data: Mapping[str, Any]) -> int:
    if "placed" in data:
        return len(data["placed"]["forward"])
    mesh = data.get("mesh")
    if not isinstance(mesh, Sequence) or not mesh:
        raise PlanError("the plan has no mesh")
    return math.prod(mesh[1:])


@contextmanager
def _ranks(pool: RankPool | None, size: int, timeout_s: float) -> Iterator[RankPool]:
    if pool is not None and pool.world_size == size:
        yield pool
        return
    with RankPool(size, timeout_s=timeout_s) as own:
        yield own


def verify_one(
    model: ModelSpec, data: Mapping[str, Any], pool: RankPool, options: CheckOptions, timeout_s: float
) -> dict[str, Any]:
    """:func:`verify_strategies` for one strategy on a running pool."""
    try:
        ranks = pool.run(check_plan, model, data, options, timeout_s=timeout_s)
    except RankError as error:
        if isinstance(error.cause, PlanError):
            raise error.cause from error
        return _failed(str(error))
    return _joined(ranks, options, placed="placed" in data)


DIFFERENCES = ("loss_difference", "gradient_difference", "parameter_difference", "buffer_difference")


def _failed(error: str) -> dict[str, Any]:
    return dict.fromkeys(DIFFERENCES, math.inf) | {
        "worst_gradient": "",
        "worst_parameter": "",
        "collectives_issued": [],
        "ranks_unlike": [],
        "ranks_checked": None,
        "memory_tracked_bytes": 0,
        "memory_tracked": {},
        "memory_tracked_of_ranks": [],
        "time_measured_s": math.inf,
        "replicas_agree": False,
        "numerics_ok": False,
        "not_finite": {},
        "compared_in": None,
        "narrow": None,
        "error": error,
    }


def _joined(ranks: Sequence[Mapping[str, Any]], options: CheckOptions, *, placed: bool) -> dict[str, Any]:
    first = ranks[0]
    result = _failed("") | {"error": None, "ranks_checked": list(range(len(ranks)))}
    if placed:
        result["collectives_issued"] = all_sent([r["collectives"] for r in ranks])
    else:
        result["collectives_issued"] = first["collectives"]
        result["ranks_unlike"] = [
            f"rank {rank} issues other kinds of collectives than rank 0, or in another order"
            for rank, found in enumerate(ranks)
            if found["sequence"] != first["sequence"]
        ]
    if options.memory:
        largest = max((r["memory"] for r in ranks), key=lambda m: m["peak"])
        result["memory_tracked"] = dict(largest)
        result["memory_tracked_bytes"] = largest["peak"]
        result["memory_tracked_of_ranks"] = [r["memory"]["peak"] for r in ranks]
    steps = [max(times) for times in zip(*(r["times_s"] for r in ranks), strict=True)]
    result["time_measured_s"] = statistics.median(steps) if steps else 0.0
    if not options.numerics:
        return result | dict.fromkeys((*DIFFERENCES, "replicas_agree", "numerics_ok"))
    result["compared_in"] = first["precision"]
    result["loss_difference"] = max(r["loss_difference"] for r in ranks)
    for kind in ("gradient", "parameter", "buffer"):
        result[f"{kind}_difference"], result[f"worst_{kind}"] = max(r[f"{kind}_difference"] for r in ranks)
    result["not_finite"] = first["not_finite"]
    result["replicas_agree"] = replicas_agree([r["replicas"] for r in ranks])
    result["numerics_ok"] = result["replicas_agree"] and within_tolerance(
        result, first["precision"], first["rounding"]
    )
    return result


TOLERANCES = {
    "loss": LOSS_TOLERANCE,
    "gradient": GRADIENT_TOLERANCE,
    "parameter": PARAMETER_TOLERANCE,
    "buffer": PARAMETER_TOLERANCE,
}


def within_tolerance(
    result: Mapping[str, Any], precision: str = "float32", rounding: Mapping[str, float] | None = None
) -> bool:
    """Whether the differences are explained by rounding (NaN is not); one that was not taken is left out.

    Args:
        rounding: under mixed precision, what the narrower type alone changes in this model.
    """
    if rounding:
        allowed = {kind: NARROW_TOLERANCE + NARROW_FACTOR * rounding[kind] for kind in TOLERANCES}
    else:
        allowed = {kind: limit * TOLERANCE_FACTOR[precision] for kind, limit in TOLERANCES.items()}
    found = {kind: result.get(f"{kind}_difference") for kind in TOLERANCES}
    return all(value <= allowed[kind] for kind, value in found.items() if value is not None)


def replicas_agree(ranks: Sequence[Mapping[str, tuple[tuple[int, ...], str]]]) -> bool:
    """Whether ranks that hold the same shard hold the same bits."""
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        digests: dict[tuple[int, ...], str] = {}
        for rank in ranks:
            if name not in rank:  # of a placed plan each rank has its own
                continue
            shard, digest = rank[name]
            if digests.setdefault(tuple(shard), digest) != digest:
                return False
    return True
