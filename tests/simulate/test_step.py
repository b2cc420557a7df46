"""A step's allocations: each begins and ends once, and together they are what the simulator adds up.

What moments of a step are called, and where a group is cut: where its inputs are read first and last.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from tensoropt.costs.group_effects import parts_of
from tensoropt.costs.prices import free_prices
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates, TableCandidates
from tensoropt.simulate.simulator import StepColumns
from tensoropt.simulate.step import lifetimes
from tensoropt.simulate.step_schedule import Moment
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import four, gates, gpt2, llama_two, problem, tables_of, three, unrolled
from tests.simulate.strategies import facts_by_group

MESHES = ((1, 2), (2, 2), (2, 2, 2))


def batches(build, mode: str = "train", dtype: str = "float32", packs: bool = False):
    prepared = problem(build, mode, dtype)
    for mesh in MESHES:
        micro, rng = micro_strategies(prepared.graph, mesh[0]), random.Random(0)
        for _ in range(3):
            strategy = random_strategy(prepared.graph, mesh, micro, rng, recompute=0.5)
            prices = free_prices(strategy.graph, mesh, "adam")
            prices.packs = packs
            candidates = StrategyCandidates(strategy, facts_by_group(strategy, mode == "train"))
            yield Batch(candidates, *candidates.row(), prices)


def alive(batch: Batch, kind: str) -> np.ndarray:
    """The bytes of a kind that are alive at each position."""
    changes = np.zeros(len(batch.schedule.moments) + 1)
    for named, first, end, *_ in lifetimes(batch):
        if named.kind == kind:
            changes[first] += named.bytes
            changes[end] -= named.bytes
    return np.cumsum(changes)[:-1]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "mode", "dtype"), [
    (gates, "train", "float32"), (unrolled, "train", "bfloat16"), (four, "train", "bfloat16"),
    (three, "train", "float32"), (gpt2, "train", "bfloat16"), (llama_two, "inference", "float32"),
], ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
@pytest.mark.parametrize("packs", [False, True])
def test_a_steps_allocations_are_what_the_simulator_adds_up(build, mode, dtype, packs):
    for batch in batches(build, mode, dtype, packs):
        columns = StepColumns(batch)
        for kind in ("kept", "transient"):
            summed = np.cumsum(getattr(columns, kind)[:, 0])[:-1]
            assert alive(batch, kind).tolist() == summed.tolist()
        assert alive(batch, "workspace").tolist() == columns.workspace[:-1, 0].tolist()


@pytest.mark.parametrize("build", [gates, unrolled, gpt2], ids=lambda b: b.__name__)
def test_every_allocation_of_a_micro_batch_ends_in_it(build):
    """Nothing is left for the next one, and nothing ends that has not begun."""
    for batch in batches(build, dtype="bfloat16"):
        for named, first, end, _, until in lifetimes(batch):
            assert named.bytes > 0
            assert until != "the end of the step"
            assert first >= batch.schedule.last or end <= batch.schedule.last


def test_a_part_of_many_strategies_has_their_steps():
    """As pipelines are composed of single strategies of a stage's many."""
    prepared = problem(gates)
    tables = tables_of(prepared, (1, 2))
    candidates = TableCandidates(tables)
    rng = random.Random(0)
    chosen = [({v.key: rng.randrange(len(v.memory)) for v in tables.variables}, {}) for _ in range(8)]
    many = Batch(candidates, *candidates.rows(chosen), tables.prices)
    _ = many.owners
    for row in range(1, 8):
        alone = Batch(candidates, *candidates.rows(chosen[row : row + 1]), tables.prices)
        assert list(lifetimes(many.part(slice(row, row + 1)))) == list(lifetimes(alone))


def group(*reads: str) -> SimpleNamespace:
    """A group whose operators read so: ``"xy"`` two tensors of others, ``"."`` none."""
    operators = tuple(SimpleNamespace(inputs=lambda names=names: tuple(names)) for names in reads)
    return SimpleNamespace(operators=operators, reads=("x", "y"))


@pytest.mark.parametrize(("reads", "starts", "first", "last"), [
    (("x",), (0,), {"x": 0}, {"x": 0}),
    (("x", "."), (0, 1), {"x": 0}, {"x": 0}),
    ((".", "x"), (0, 1), {"x": 1}, {"x": 1}),
    (("x", ".", "x"), (0,), {"x": 0}, {"x": 0}),
    (("x", ".", "x", "."), (0, 3), {"x": 0}, {"x": 0}),
    (("x", ".", "y", "."), (0, 1, 2, 3), {"x": 0, "y": 2}, {"x": 0, "y": 2}),
    (("x", "y", "x"), (0, 1, 2), {"x": 0, "y": 1}, {"x": 2, "y": 1}),
    ((".", "z"), (0,), {}, {}),
])  # fmt: skip
def test_parts_begin_where_a_tensor_is_needed_first_and_end_where_it_is_needed_last(
    reads, starts, first, last
):
    found = parts_of(group(*reads))
    assert (found.starts, dict(found.first), dict(found.last)) == (starts, first, last)
    assert [found.of(position) for position in range(len(reads))] == sorted(
        found.of(position) for position in range(len(reads))
    )


@pytest.mark.parametrize(("phase", "kind", "words"), [
    ("again", "read", "again: resharding x for g"), ("again", "gather", "again: parameters for forward g"),
    ("backward", "read", "resharding the gradient of x from g"), ("backward", "inner", "inside backward g"),
    ("forward", "hub", "materialising x"), ("backward", "hub", "gradient of materialised x"),
    ("forward", "output", "result x"), ("backward", "output", "gradient of result x"),
    ("backward", "parameters", "gradients of the parameters of g"),
    ("reduction", "reduce", "reducing the gradients of g once"), ("optimizer", "step", "optimizer"),
    ("optimizer", "unshard", "unsharding the parameters of g"),
])  # fmt: skip
def test_a_moment_is_named_by_what_happens_in_it(phase, kind, words):
    assert Moment(phase, kind, "g", "x").words == words
