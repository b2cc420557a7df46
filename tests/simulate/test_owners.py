"""Whose the bytes of a step are: at every point of the memory curve the owners add up to its height."""

from __future__ import annotations

import random

import pytest

from tensoropt.costs.prices import free_prices
from tensoropt.engine.models import load_model
from tensoropt.profiling.workload import workload
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import Overlap, StrategyCandidates
from tensoropt.simulate.owners import StepOwners
from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.recording import MEMORY_KINDS, OwnerRow
from tensoropt.simulate.simulator import simulate
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import facts_of
from tests.execute import jobs
from tests.simulate.test_readings import tied


def recorded(
    strategy, optimizer: str, *, packs: bool, facts=None
) -> tuple[StepOwners, list[dict[str, float]]]:
    """The owners of a strategy's step, and its memory curve."""
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    candidates = StrategyCandidates(strategy, facts or {n: facts_of(work) for n, work in works.items()})
    prices = free_prices(strategy.graph, strategy.mesh, optimizer)
    prices.packs = packs
    batch = Batch(candidates, *candidates.row(), prices, Overlap(not packs, ""))
    recorder = StepRecorder()
    metrics = simulate(batch, recorder)
    lasting = dict(zip(MEMORY_KINDS, map(float, metrics.memory[0, :3]), strict=False))
    return StepOwners(batch, recorder), [kinds for _, kinds in recorder.memory_at(lasting)]


def strategies(name: str, mesh: tuple[int, ...], count: int, seed: int = 0):
    loaded = load_model(jobs.spec(name))
    micro, rng = micro_strategies(loaded.graph, mesh[0]), random.Random(seed)
    return [random_strategy(loaded.graph, mesh, micro, rng, recompute=0.5) for _ in range(count)]


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2, 2), (4, 2)])
@pytest.mark.parametrize("packs", [False, True])
def test_at_every_point_the_owners_add_up_to_the_curve_by_kind(name, mesh, packs):
    for strategy in strategies(name, mesh, 2 if name == "mlp" else 1):
        assert_adds_up(*recorded(strategy, "adam", packs=packs))


def assert_adds_up(owners: StepOwners, curve: list[dict[str, float]]) -> None:
    for number, kinds in enumerate(curve):
        found = dict.fromkeys(MEMORY_KINDS, 0.0)
        for row in owners.at(number):
            assert row.bytes > 0
            found[row.kind] += row.bytes
        assert found == kinds


@pytest.mark.parametrize("stored", ["ahead", "held", "held/P"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("packs", [False, True])
def test_what_one_user_of_a_tied_parameter_takes_another_gives_back(stored, micro, packs):
    strategy, facts = tied(stored, micro)
    assert_adds_up(*recorded(strategy, "adam", packs=packs, facts=facts))


def rows_at_peak(strategy) -> tuple[OwnerRow, ...]:
    owners, curve = recorded(strategy, "sgd", packs=False)
    return owners.at(max(range(len(curve)), key=lambda number: sum(curve[number].values())))


def test_rows_come_by_bytes_and_say_what_they_are():
    rows = rows_at_peak(strategies("mlp", (1, 2), 1)[0])
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    assert {row.what for row in rows} <= {
        "parameter", "gradient", "optimizer state", "activation", "workspace", "gathered parameters",
        "saved inside for backward", "gradients on their way", "gradient on its way", "gathered copy",
        "optimizer's temporaries", "parameter (unsharded copy)", "gradient (unsharded copy)",
    }  # fmt: skip
    assert {"parameter", "gradient"} <= {row.what for row in rows}
    for row in rows:
        assert row.operator
        assert (row.until_s is None) == (row.kind in MEMORY_KINDS[:3]) == (row.until == "")


def test_what_is_alive_began_before_and_ends_later_in_its_own_micro_batch():
    (strategy,) = strategies("transformer", (4, 2), 1)
    owners, curve = recorded(strategy, "sgd", packs=False)
    times = [0.0, *(time_s for time_s, *_ in owners.recorder.curve)]
    assert len(times) == len(curve)
    for number in range(0, len(curve), 7):
        for row in owners.at(number):
            assert row.since_s <= times[number]
            assert row.until_s is None or times[number] <= row.until_s <= owners.recorder.end_s


def test_a_point_that_is_not_there_is_refused():
    owners, curve = recorded(strategies("mlp", (1, 2), 1)[0], "sgd", packs=False)
    for number in (-1, len(curve)):
        with pytest.raises(IndexError, match="there is no point"):
            owners.at(number)
