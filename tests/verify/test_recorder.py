"""The recorders see what happens and nothing else: ranks of random strategies send what was predicted.

Nothing holds what a collective on copies was given, and it did what it does.
"""

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.engine.gathering import gather, wait
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.simulate.collectives import predicted_collectives
from tensoropt.verify.fake_ranks import fake_job, recorded, step_on
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tensoropt.verify.recorder import MemoryTracker, _is_collective, compare_collectives
from tests.execute import part_jobs
from tests.simulate.strategies import facts_by_group
from tests.verify import on_copies_jobs

MESHES = ((1, 2, 2), (2, 4), (2, 2, 2, 2), (4, 2))
MESHES_OF_SMALL = ((1, 2), (1, 2, 2), (2, 4), (2, 2, 2), (4, 2))
SITUATIONS = Path(__file__).parents[1] / "situations" / "readers.py"


ODD = (("batch", 12), ("features", 33), ("hidden", 47))
UNEQUAL_MESHES = ((1, 3), (2, 5), (1, 6), (1, 7))


@cache
def captured(name: str, dtype: str, settings: tuple[tuple[str, int], ...] = ()) -> CapturedModel:
    return load_model(ModelSpec(f"zoo:{name}", compute_dtype=dtype, settings=settings, device="meta"))


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize(("name", "dtype", "count", "settings"), [
    ("mlp", "float32", 8, ()),
    ("mlp", "bfloat16", 8, ODD),  # shards of which the last is smaller
    ("lstm-lm-tiny", "float32", 3, ()),  # backward of one operator asks for several parameters
    ("gpt2-tiny", "float32", 2, ()),  # a shared parameter, biases in front of what they are added to
    ("gpt-mini", "bfloat16", 1, ()),  # parameters are cast at every use
    ("lenet", "float32", 2, ()),
])  # fmt: skip
def test_ranks_issue_what_was_predicted(name, dtype, count, settings):
    loaded, rng = captured(name, dtype, settings), random.Random(5)
    for number in range(count):
        assert_as_predicted(loaded, MESHES[number % len(MESHES)], rng)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "meshes"), [("mlp", UNEQUAL_MESHES), ("gpt2-tiny", ((1, 3),))])
def test_shares_of_a_batch_are_unequal(name, meshes):
    """32 samples on 3, 5, 6 and 7 ranks."""
    loaded = captured(name, "float32", (("batch", 32),))
    for number, mesh in enumerate(meshes):
        assert_as_predicted(loaded, mesh, random.Random(number))


def assert_as_predicted(loaded: CapturedModel, mesh: tuple[int, ...], rng: random.Random) -> None:
    """Of a random strategy."""
    micro = micro_strategies(loaded.graph, mesh[0])
    strategy = random_strategy(loaded.graph, mesh, micro, rng, recompute=0.5)
    # As ``check_on_fake_ranks`` does, without its second step that tracks memory.
    with step_on(0, loaded, strategy, "sgd") as step:
        sent = recorded(step.engine, step.model).issued
    shown = [one._replace(axes=tuple(axis - 1 for axis in one.axes)) for one in sent]
    assert predicted_collectives(strategy, facts_by_group(strategy)) == Counter(shown)


@pytest.mark.slow
@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("build", [
    "build_siamese_three", "build_target_without_gradient", "build_gradient_inside_no_grad",
    "build_weight_read_twice_in_each_block", "build_fused_projections", "build_split_weights",
])  # fmt: skip
def test_parameters_with_several_readers_and_without_gradient(build, dtype):
    """Also what is gathered of parameters whose parts other groups keep, or of which some uses give no
    gradient."""
    loaded = load_model(ModelSpec(f"{SITUATIONS}:{build}", compute_dtype=dtype))
    for number in range(5):
        assert_as_predicted(loaded, MESHES_OF_SMALL[number], random.Random(number))


GATHERED = torch.ops.c10d._allgather_base_.default


@pytest.mark.parametrize("name", on_copies_jobs.COLLECTIVES)
def test_results_are_those_of_the_collective(ranks, name):
    for plain, tracked in ranks.run(on_copies_jobs.results, name):
        assert tracked == plain


def test_threads_of_gloo_hold_nothing_of_a_tracked_step(ranks):
    # Without copies some of what is freed at once is alive for a while.
    for peak, after in ranks.run(on_copies_jobs.freed_at_once):
        assert set(after) == {0}
        assert set(peak) == {on_copies_jobs.GATHERED_BYTES}


def test_messages_and_what_has_no_data_are_left_alone():
    value = torch.zeros(4)
    assert _is_collective(GATHERED, (value, value))
    assert not _is_collective(torch.ops.c10d.send.default, ([value],))
    assert not _is_collective(torch.ops._c10d_functional.wait_tensor.default, (value,))
    assert not _is_collective(torch.ops.aten.add.Tensor, (value, value))
    assert not _is_collective(GATHERED, (torch.empty(4, device="meta"), torch.empty(4, device="meta")))
    with FakeTensorMode():
        assert not _is_collective(GATHERED, (torch.zeros(4), torch.zeros(4)))


def test_forward_and_backward_are_recorded(ranks):
    for rows, now, peak in ranks.run(part_jobs.recorded):
        assert rows == [
            {"kind": "all_gather", "axes": [1], "bytes": 48, "count": 1},
            {"kind": "all_reduce", "axes": [1], "bytes": 24, "count": 1},
            {"kind": "all_to_all", "axes": [1], "bytes": 32, "count": 1},
            {"kind": "reduce_scatter", "axes": [1], "bytes": 48, "count": 1},
        ]
        assert (now, peak) == (4000, 24000)


def test_comparison_names_what_differs():
    row = {"kind": "all_reduce", "axes": [1], "bytes": 8, "count": 2}
    assert compare_collectives([row], [row]) == []
    assert compare_collectives([row], [row | {"count": 1}]) == [
        "all_reduce of 8 bytes over axes [1]: predicted 2, issued 1"
    ]
    assert len(compare_collectives([row], [row | {"axes": [2]}])) == 2


def test_what_a_fake_rank_waits_for_is_counted_once():
    with fake_job(0, 2), FakeTensorMode(), MemoryTracker() as tracker:
        group = dist.group.WORLD
        assert group is not None
        (arrived,) = map(wait, gather([torch.zeros(512)], group))
        own, whole = 512 * 4, 2 * 512 * 4
        assert arrived.nbytes == whole
        assert tracker.peak_bytes == own + whole


def test_memory_that_no_operator_made_is_not_counted():
    buffer = torch.zeros(1024)
    with MemoryTracker() as tracker:
        shares = buffer.split(512)
        own = shares[0].clone()
        assert tracker.now_bytes == own.nbytes
        del shares, own
        assert tracker.now_bytes == 0
