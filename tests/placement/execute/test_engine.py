"""Any placement, in any order, in any pieces, gives what the unsplit model gives."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch

from tensoropt.errors import PlanError
from tensoropt.placement import Placement
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.execute.lower import OperatorCall, Tape
from tensoropt.placement.execute.transport import Transfer
from tensoropt.placement.graph import placed_graph, split_choices
from tensoropt.verify.random_strategies import random_placement
from tests.placement.execute.cases import (
    difference,
    in_one_process,
    opened,
    placed,
    record_moves,
    step,
    unsplit,
)
from tests.placement.execute.random_placed import in_any_order
from tests.placement.execute.transports import Meeting, on_threads

ROUNDING = {"float32": 2e-5, "float64": 1e-12}
MODELS = ["mlp", "vgg_norm", "transformer", "transformer_dropout", "odd"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_the_unsplit_model(name: str, seed: int) -> None:
    loaded = opened(name)
    whole, engine = unsplit(loaded, seed), in_one_process(loaded, placed(loaded, seed), seed)
    for _ in range(2):  # the second step has other dropout, and statistics that have moved
        loss, found = step(whole, loaded), step(engine, loaded)
        assert found == pytest.approx(loss, rel=1e-6)
        assert engine.shards.gradients.keys() == whole.shards.gradients.keys()
        # Biases in front of a batch norm have no gradient but rounding.
        rounding = 5e-4 if name == "vgg_norm" else ROUNDING["float32"]
        assert difference(engine.shards.gradients, whole.shards.gradients) < rounding
        assert difference(engine.buffers, whole.buffers) < ROUNDING["float32"]


@pytest.mark.parametrize("name", ["mlp", "vgg_norm_plain"])
def test_in_double_precision_to_its_rounding(name: str) -> None:
    loaded = opened(name, dtype="float64")
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 3))
    assert step(engine, loaded) == pytest.approx(step(whole, loaded), rel=1e-12)
    assert difference(engine.shards.gradients, whole.shards.gradients) < 1e-10


def test_every_way_of_cutting_every_group() -> None:
    loaded = opened("transformer_dropout", dtype="float64")
    whole = unsplit(loaded)
    loss = step(whole, loaded)
    ways = {g.name: split_choices(loaded.graph, g, 3) for g in loaded.graph.groups}
    rng = random.Random(0)
    for number in range(max(map(len, ways.values()))):
        splits = {name: choices[number % len(choices)] for name, choices in ways.items() if choices}
        graph = placed_graph(loaded.graph, splits)
        engine = in_one_process(loaded, in_any_order(graph, random_placement(graph, 3, rng)))
        assert step(engine, loaded) == pytest.approx(loss, rel=1e-11)
        assert difference(engine.shards.gradients, whole.shards.gradients) < 1e-10


def test_master_weights_stay_single_precision() -> None:
    loaded = opened("transformer", compute_dtype="bfloat16")
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 1, share=0.0))
    assert step(engine, loaded) == pytest.approx(step(whole, loaded), rel=1e-3)
    # Tied weights: bfloat16 gradients of several readers are added before they are widened.
    assert difference(engine.shards.gradients, whole.shards.gradients) < 3e-2
    assert {g.dtype for g in engine.shards.gradients.values()} == {torch.float32}


def orders_run(monkeypatch: pytest.MonkeyPatch, engine: PlacedEngine, loaded: Any) -> tuple[list, list]:
    forward: list[int] = []
    backward: list[int] = []
    run, back = OperatorCall.forward, Tape.backward
    monkeypatch.setattr(
        OperatorCall, "forward", lambda self, *given: (forward.append(self.number), run(self, *given))[1]
    )
    monkeypatch.setattr(
        Tape, "backward", lambda self, number: (backward.append(number), back(self, number))[1]
    )
    step(engine, loaded)
    return forward, backward


@pytest.mark.parametrize("seed", [0, 1])
def test_the_plans_orders_are_enforced(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    loaded = opened("transformer")
    strategy = placed(loaded, seed)
    forward, backward = orders_run(monkeypatch, in_one_process(loaded, strategy), loaded)
    place = strategy.placement
    assert place.backward_orders != tuple(tuple(reversed(order)) for order in place.forward)
    for device in range(3):
        assert [o for o in forward if place.device[o] == device] == list(place.forward[device])
        assert [o for o in backward if place.device[o] == device] == list(place.backward_orders[device])


def test_one_move_per_border(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = record_moves(monkeypatch)
    loaded = opened("vgg_norm")
    strategy = placed(loaded, 5)
    engine = in_one_process(loaded, strategy)
    step(engine, loaded)
    sizes = {
        v.name: strategy.placed_graph.bytes(v) for op in strategy.placed_graph.operators for v in op.writes
    }
    assert sorted(moved) == sorted(sizes[name] for name, *_ in strategy.transfers)
    nodes = [n for n in engine.module.graph.nodes if n.meta.get("transfer")]
    assert len(nodes) == sum(not back for *_, back in strategy.transfers)
    assert all(n.name.startswith("move") for n in nodes)


@pytest.mark.parametrize("name", ["mlp", "transformer_dropout", "vgg_norm"])
def test_ranks_that_meet_for_every_message(name: str) -> None:
    """Sends that end only when they are received would show a wait for ever."""
    loaded = opened(name)
    whole = unsplit(loaded)
    loss = step(whole, loaded)
    strategy = placed(loaded, 7)

    def work(rank: int, transport: Meeting) -> tuple[float, dict[str, torch.Tensor], list[Transfer]]:
        engine = PlacedEngine(strategy, loaded.values, transport=transport, rank=rank)
        found = step(engine, loaded)
        engine.sync_buffers()
        assert difference(engine.buffers, whole.buffers) < ROUNDING["float32"]
        return found, dict(engine.shards.gradients), transport.sent

    results = on_threads(3, work)
    gradients = {n: g for _, own, _ in results for n, g in own.items()}
    assert gradients.keys() == whole.shards.gradients.keys()
    assert sum(len(own) for _, own, _ in results) == len(gradients)  # each on one device
    assert difference(gradients, whole.shards.gradients) < 5e-4
    assert all(found == pytest.approx(loss, rel=1e-6) for found, _, _ in results)
    numbers = [[t.number for t in sent] for _, _, sent in results]
    assert sorted(number for row in numbers for number in row) == list(range(len(strategy.transfers)))
    assert all(row == sorted(row) for row in numbers)


def test_evaluation_and_no_gradients() -> None:
    loaded = opened("vgg_norm")
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 4))
    for one in (whole, engine):
        step(one, loaded)
    with torch.no_grad():
        ours, theirs = (e(*loaded.inputs, evaluating=True)[0] for e in (engine, whole))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert difference(engine.buffers, whole.buffers) < 1e-5  # evaluation changed none


def test_inference_returns_every_output() -> None:
    loaded = opened("perceptron_outputs", mode="inference")
    strategy = placed(loaded, 6)
    with torch.no_grad():
        wanted = unsplit(loaded)(*loaded.inputs)
    for outputs in on_threads(
        3, lambda rank, t: PlacedEngine(strategy, loaded.values, transport=t, rank=rank)(*loaded.inputs)
    ):
        assert len(outputs) == len(wanted) == 2
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(outputs, wanted, strict=True))


def test_gradients_scale_and_add_up_as_usual() -> None:
    loaded = opened("mlp")
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 8))
    for one in (whole, engine):
        one.shards.clear()
        first, second = one(*loaded.inputs)[0], one(*loaded.inputs)[0]
        (3 * second).backward()
        (0.5 * first).backward()
    assert difference(engine.shards.gradients, whole.shards.gradients) < ROUNDING["float32"]


def test_a_loss_is_used_once() -> None:
    loaded = opened("mlp")
    loss = in_one_process(loaded, placed(loaded, 8))(*loaded.inputs)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used"):
        loss.backward()


def test_a_loss_that_is_dropped_leaves_nothing() -> None:
    loaded = opened("mlp")
    engine = in_one_process(loaded, placed(loaded, 8))
    tapes = []
    begun = Tape.__init__

    def noted(self: Tape, *given: Any) -> None:
        begun(self, *given)
        tapes.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", noted)
        loss = engine(*loaded.inputs)[0]
    assert tapes[0]() is not None
    del loss
    assert tapes[0]() is None


def test_a_buffer_that_changes_elsewhere_is_sent_to_its_readers() -> None:
    loaded = opened("moving_average")
    graph = placed_graph(loaded.graph, {})
    tensors = loaded.graph.atoms.graph.tensors
    readers = [
        i
        for i, op in enumerate(graph.operators)
        if op.group and any(tensors[n].kind == "buffer" for n in op.group.free)
    ]
    assert len(readers) > 1
    device = [0] * len(graph.operators)
    device[readers[0]] = 1
    strategy = in_any_order(graph, Placement.in_order(device, 2))
    assert set(strategy.sent_buffers) == set(loaded.graph.atoms.graph.mutations)
    whole, engine = unsplit(loaded), in_one_process(loaded, strategy)
    for _ in range(3):
        assert step(engine, loaded) == pytest.approx(step(whole, loaded), rel=1e-6)
        assert difference(engine.buffers, whole.buffers) < ROUNDING["float32"]


def test_one_device_for_each_of_the_plans() -> None:
    loaded = opened("mlp")
    with pytest.raises(PlanError, match="3 devices, but 1 are given"):
        PlacedEngine(placed(loaded, 0), loaded.values, devices=["cpu"])
    # Without a job, a process runs all of them.
    assert PlacedEngine(placed(loaded, 0), loaded.values).local.own == (0, 1, 2)


@pytest.mark.parametrize("name", ["transformer_dropout", "vgg_norm"])
def test_training_converges_as_unsplit(name: str) -> None:
    """NetSplit's check: the losses of split and unsplit training stay together."""
    loaded = opened(name)
    engines = (unsplit(loaded), in_one_process(loaded, placed(loaded, 11)))
    optimizers = [torch.optim.AdamW(list(e.shards.leaves.values()), lr=3e-3, eps=1e-4) for e in engines]
    losses: list[list[float]] = [[], []]
    for _ in range(40):
        for engine, optimizer, row in zip(engines, optimizers, losses, strict=True):
            row.append(step(engine, loaded))
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    assert losses[0][-1] < 0.8 * losses[0][0]
