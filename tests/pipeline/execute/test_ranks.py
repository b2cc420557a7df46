"""Random pipelines on real ranks, beside the whole model: what they compute, and what every rank has alive.

Of models with skips and layers used several times, of which a part is not trained, and whose parameters have
several readers, or parts no gradient.
"""

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.pipeline.strategy import SCHEDULES, PipelinedStrategy
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.random_strategies import random_pipeline
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.pipeline.test_evaluate import evaluated

EQUAL = 1e-6
"""By how much a result may differ, relative to its largest value."""
READERS = str(Path(__file__).parents[2] / "situations" / "readers.py")


def spec_of(name: str) -> ModelSpec:
    return ModelSpec(f"{READERS if name.startswith('build_') else 'tests.pipeline.models'}:{name}")


def check(pool: RankPool, name: str, drawn: list[PipelinedStrategy], near: float | None, **how: bool) -> None:
    """Compare with the whole model, and peaks with what is predicted; None: peaks are not looked at."""
    options = CheckOptions(timed_steps=0, memory=near is not None, **how)
    plans = [strategy.to_data() for strategy in drawn]
    found_of_plans = verify_strategies(spec_of(name), plans, pool=pool, options=options)
    for strategy, found in zip(drawn, found_of_plans, strict=True):
        shape = strategy.schedule, strategy.cuts
        assert not found.error, shape
        if options.numerics:
            assert found.numerics_ok, (shape, found.differences, found.worst_gradient)
        if near is None:
            continue
        if options.numerics:
            assert found.differences.loss < EQUAL, shape
            assert found.differences.gradient < EQUAL, (shape, found.worst_gradient)
        predicted = evaluated(strategy).memory.sum(axis=1)
        # The first rank of a place has the largest shards.
        firsts = found.memory_tracked_of_ranks[:: strategy.devices_per_place]
        assert firsts == pytest.approx(predicted.tolist(), rel=near), shape


# -- memory ---------------------------------------------------------------------------------------

NEAR, APART = 0.03, 0.06
"""By how much a peak may differ from what is predicted; of a backward that is taken apart, in models of
200 KB, of which a message is some per cent."""


def some(name: str, mesh: tuple[int, ...], schedule: str) -> list[PipelinedStrategy]:
    graph, rng = load_model(spec_of(name)).graph, random.Random(7)
    return [random_pipeline(graph, mesh, schedule, rng, 0.3) for _ in range(2)]


# A layer that is used three times may not be twice at one place.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "near"), [
    ("encoder_decoder_dropout", "gpipe", NEAR), ("encoder_decoder_dropout", "1f1b", NEAR),
    ("thrice", "1f1b", NEAR), ("thrice", "gpipe", NEAR), ("deep", "interleaved_1f1b", NEAR),
    *(("encoder_decoder", schedule, NEAR) for schedule in ("gpipe", "1f1b", "interleaved_1f1b")),
    ("deep", "zero_bubble", APART), ("deep", "zbv", APART),
])  # fmt: skip
def test_what_ranks_have_alive(ranks, name, schedule, near):
    check(ranks, name, some(name, (4, 2), schedule), near, numerics=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_ranks_of_stages_on_two_ranks_have_alive(four_ranks, schedule):
    name = "encoder_decoder"
    check(four_ranks, name, some(name, (4, 2, 2), schedule), NEAR, numerics=False)


# -- parts that are not trained -------------------------------------------------------------------

FROZEN_NEAR = 0.05


def frozen(
    name: str, mesh: tuple[int, ...], schedule: str, count: int, *, behind: bool = False
) -> list[PipelinedStrategy]:
    """Some whose first stages have nothing to train; ``behind``: and one behind trained ones has not."""
    graph, rng = load_model(spec_of(name)).graph, random.Random(1)
    found: list[PipelinedStrategy] = []
    while len(found) < count:
        drawn = random_pipeline(graph, mesh, schedule, rng, 0.3)
        trains = [any(t.requires_grad for t in s.graph.atoms.graph.parameters) for s in drawn.parts]
        wanted = not behind or not all(trains[drawn.forward_only :])
        found += [drawn] if drawn.forward_only and wanted else []
    return found


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("name", "schedule", "count"), [
    *(("frozen", schedule, 2) for schedule in sorted(SCHEDULES)),
    *((name, schedule, 1) for name in ("adapted", "frozen_but_the_last", "frozen_encoder")
      for schedule in ("1f1b", "zero_bubble")),
])  # fmt: skip
def test_frozen_stages_on_two_ranks(ranks, name, schedule, count):
    check(ranks, name, frozen(name, (4, 2), schedule, count), FROZEN_NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "behind", "schedules"),
    [((4, 4), True, ("gpipe", "1f1b", "zero_bubble")), ((4, 2, 2), False, ("gpipe", "1f1b"))],
)
def test_frozen_stages_on_four_ranks(four_ranks, mesh, behind, schedules):
    """Four places, a frozen stage behind trained ones among them; two of two ranks."""
    drawn = [frozen("frozen", mesh, schedule, 1, behind=behind)[0] for schedule in schedules]
    check(four_ranks, "frozen", drawn, FROZEN_NEAR)


@pytest.mark.slow
def test_collectives_in_forward_where_backward_is_taken_apart(four_ranks):
    """A stage without a backward may pass them."""
    name, rng, found = "frozen_but_the_last", random.Random(0), list[PipelinedStrategy]()
    graph = load_model(spec_of(name)).graph
    while not found:
        drawn = random_pipeline(graph, (4, 2, 2), "1f1b", rng)
        moves = any(any(drawn.stages[0].steps(edge)) for edge in drawn.stages[0].edges())
        with contextlib.suppress(PlanError):
            apart = replace(drawn, schedule="zero_bubble")
            found += [apart] if moves and apart.forward_only == 1 else []
    check(four_ranks, name, found, FROZEN_NEAR)


# -- parameters with several readers --------------------------------------------------------------


def checked(pool: RankPool, build: str, count: int, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> int:
    """Compare random pipelines of each schedule that the model can have; how many there were."""
    graph, drawn = load_model(spec_of(build)).graph, list[PipelinedStrategy]()
    for schedule in schedules:
        rng, found = random.Random(schedule), list[PipelinedStrategy]()
        for _ in range(4 * count):
            with contextlib.suppress(TensorOptError):
                found.append(random_pipeline(graph, (4, 2), schedule, rng))
        drawn += found[:count]
    check(pool, build, drawn, None)
    return len(drawn)


@pytest.mark.sweep
@pytest.mark.parametrize("build", ["build_momentum_target", "build_detached_later"])
def test_branches_without_gradient_are_cut(ranks, build):
    assert checked(ranks, build, 1) == len(SCHEDULES)


@pytest.mark.slow
def test_what_takes_backward_apart_is_right_or_refused(ranks):
    apart = tuple(name for name, one in SCHEDULES.items() if one.apart)
    assert checked(ranks, "build_weight_read_twice_in_each_block", 1, apart)
    assert not checked(ranks, "build_bounded_early", 1, apart)


@pytest.mark.slow
@pytest.mark.parametrize("build", [
    "build_momentum_target", "build_detached_later", "build_target_without_gradient",
    "build_siamese_three", "build_gradient_inside_no_grad", "build_split_weights",
    "build_merged_adapters", "build_normed_weights", "build_fused_projections",
    "build_weight_read_twice_in_each_block",
])  # fmt: skip
def test_all_schedules_are_right_or_refused(ranks, build):
    assert checked(ranks, build, 3)
