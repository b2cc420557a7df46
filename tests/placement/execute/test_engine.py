"""Any placement, in any order, in any pieces, gives what the unsplit model gives; in micro-batches, too.

Cases without a number of micro-batches run the whole batch at once.
"""

import random
import re
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from tensoropt.engine.models import CapturedModel
from tensoropt.errors import PlanError
from tensoropt.execute.executable import strategy_from_data
from tensoropt.placement import Placement
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.execute.lower import Tape
from tensoropt.placement.execute.placed_call import _placed_like
from tensoropt.placement.graph import OperatorKind, placed_graph, split_choices
from tensoropt.placement.program import schedule_of
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.sharding.configurations import batch_strategies
from tensoropt.verify.random_strategies import random_placement
from tests.execute.jobs import captured_model
from tests.pipeline.execute.test_staged_call import call_and_plan
from tests.placement.execute.cases import (
    assert_alike,
    difference,
    in_one_process,
    opened,
    placed,
    record_moves,
    step,
    unsplit,
)
from tests.placement.execute.random_placed import in_any_order, random_placed
from tests.placement.execute.transports import Meeting, on_threads

ROUNDING = 2e-5
MODELS = ["mlp", "vgg_norm", "transformer", "transformer_dropout", "odd"]
IN_MICRO_BATCHES = ["mlp", "transformer_dropout", "vgg_dropout", "odd"]


@pytest.mark.sweep(quick=12)
@pytest.mark.parametrize(("name", "count", "seed"), [
    *((name, 1, seed) for name in MODELS for seed in range(4)),
    *((name, count, seed) for name in IN_MICRO_BATCHES for count in (2, 4) for seed in range(2)),
])  # fmt: skip
def test_gradients_are_those_of_the_unsplit_model(name, count, seed):
    """Ignored targets lie unevenly among micro-batches, and each has the dropout of its samples."""
    loaded = opened(name)
    whole = unsplit(loaded, seed)
    engine = in_one_process(loaded, placed(loaded, seed, micro_batches=count), seed)
    # Biases in front of a batch norm have no gradient but rounding.
    assert_alike(engine, whole, loaded, gradients=5e-4 if name == "vgg_norm" else ROUNDING)


def test_every_way_of_cutting_every_group():
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


def over_the_batch(loaded: CapturedModel, seed: int, devices: int = 2) -> PlacedStrategy:
    """A random placement of the pieces of all groups that can be cut over the batch, batch norms included."""
    batch = batch_strategies(loaded.graph)
    splits = {
        g.name: (str(batch[g.name].label), devices)
        for g in loaded.graph.groups
        if (str(batch[g.name].label), devices) in split_choices(loaded.graph, g, devices)
    }
    graph = placed_graph(loaded.graph, splits)
    norms = sum("batch_norm" in group.anchor.target for group in loaded.graph.groups)
    assert len(graph.steps) == 2 * norms > 0
    return in_any_order(graph, random_placement(graph, devices, random.Random(seed)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["vgg_norm_plain", "shared_norm"])
def test_batch_norms_in_pieces(name, seed):
    """Each piece is normalised with the statistics of the whole batch, and these move as the model's own."""
    loaded = opened(name, dtype="float64")
    whole, engine = unsplit(loaded), in_one_process(loaded, over_the_batch(loaded, seed))
    assert_alike(engine, whole, loaded, loss=1e-12, gradients=1e-10, buffers=1e-12)
    with torch.no_grad():
        ours, theirs = (e(*loaded.inputs, evaluating=True)[0] for e in (engine, whole))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-12)
    assert difference(engine.buffers, whole.buffers) < 1e-12  # evaluation changed none


def test_batch_norms_in_pieces_in_mixed_precision():
    """As far from the unsplit model in single precision as the unsplit model in mixed precision is."""
    exact = unsplit(opened("vgg_norm_plain"))
    loss = step(exact, opened("vgg_norm_plain"))
    loaded = opened("vgg_norm_plain", compute_dtype="bfloat16")
    whole, engine = unsplit(loaded), in_one_process(loaded, over_the_batch(loaded, 2))
    for each in (whole, engine):
        assert step(each, loaded) == pytest.approx(loss, rel=5e-3)
        assert difference(each.buffers, exact.buffers) < 1e-2
    # Biases in front of a batch norm have no gradient but rounding.
    biases = {f"p_model_features_{number}_bias" for number in (0, 4)}
    wanted = {n: g for n, g in exact.shards.gradients.items() if n not in biases}
    assert len(wanted) == len(exact.shards.gradients) - 2
    far, ours = (
        difference({n: each.shards.gradients[n] for n in wanted}, wanted) for each in (whole, engine)
    )
    assert ours < max(2 * far, 3e-2)


@pytest.mark.parametrize("count", [1, 2])
def test_master_weights_stay_single_precision(count):
    loaded = opened("transformer", compute_dtype="bfloat16")
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 1, 3, 0.0, count))
    # Tied weights: bfloat16 gradients of several readers are added before they are widened.
    assert_alike(engine, whole, loaded, steps=1, loss=1e-3, gradients=3e-2)
    assert {g.dtype for g in engine.shards.gradients.values()} == {torch.float32}


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (1, 1), (0, 4)])
def test_the_plans_orders_are_enforced(monkeypatch, seed, count):
    """All forwards of a device run before all its backwards."""
    loaded = opened("transformer")
    strategy = placed(loaded, seed, micro_batches=count)
    engine = in_one_process(loaded, strategy)
    ran: list[tuple[str, int, int]] = []
    run, back = Tape.record, Tape.backward

    def forward(self: Tape, number: int, made: Any) -> None:
        ran.append(("forward", engine.runtime.micro_batch, number))
        run(self, number, made)

    def backward(self: Tape, number: int) -> None:
        ran.append(("backward", engine.runtime.micro_batch, number))
        back(self, number)

    monkeypatch.setattr(Tape, "record", forward)
    monkeypatch.setattr(Tape, "backward", backward)
    step(engine, loaded)
    place = strategy.placement
    assert place.backward != tuple(tuple(reversed(order)) for order in place.forward)
    for device in range(3):
        assert [one for one in ran if place.device[one[2]] == device] == [
            *(("forward", i, o) for i in range(count) for o in place.forward[device]),
            *(("backward", i, o) for i in range(count) for o in place.backward[device]),
        ]
    assert engine.runtime.micro_batch == 0


@pytest.mark.parametrize(("name", "count"), [("vgg_norm", 1), ("vgg_dropout", 4)])
def test_one_move_per_border_and_micro_batch(monkeypatch, name, count):
    moved = record_moves(monkeypatch)
    loaded = opened(name)
    strategy = placed(loaded, 5, micro_batches=count)
    engine = in_one_process(loaded, strategy)
    step(engine, loaded)
    sizes = {
        v.name: strategy.placed_graph.bytes(v) for op in strategy.placed_graph.operators for v in op.writes
    }
    assert sorted(moved) == sorted([sizes[name] for name, *_ in strategy.transfers] * count)
    names = Counter(re.sub(r"_\d+$", "", node.name) for node in engine.module.graph.nodes)
    sent = sum(not back for *_, back in strategy.transfers)
    assert (names["send"], names["receive"], names["wait"]) == (sent, sent, sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("mlp", 1), ("transformer_dropout", 1), ("vgg_norm", 1), ("mlp", 4), ("transformer_dropout", 4)],
)
def test_ranks_that_meet_for_every_message(name, count):
    """Sends that end only when they are received would show a wait for ever."""
    loaded = opened(name)
    whole = unsplit(loaded)
    loss = step(whole, loaded)
    strategy = placed(loaded, 7, micro_batches=count)

    def work(rank: int, transport: Meeting) -> tuple[float, dict[str, torch.Tensor], list[int]]:
        engine = PlacedEngine(strategy, loaded.values, transport=transport, rank=rank)
        found = step(engine, loaded)
        engine.sync_buffers()
        assert difference(engine.buffers, whole.buffers) < ROUNDING
        return found, dict(engine.shards.gradients), transport.sent

    results = on_threads(3, work)
    gradients = {n: g for _, own, _ in results for n, g in own.items()}
    assert gradients.keys() == whole.shards.gradients.keys()
    assert sum(len(own) for _, own, _ in results) == len(gradients)  # each on one device
    assert difference(gradients, whole.shards.gradients) < (ROUNDING if count > 1 else 5e-4)
    assert all(found == pytest.approx(loss, rel=1e-6) for found, _, _ in results)
    numbers = [sent for _, _, sent in results]
    assert sorted(number for row in numbers for number in row) == list(range(count * len(strategy.transfers)))
    assert count > 1 or all(row == sorted(row) for row in numbers)


@pytest.mark.parametrize(("name", "count", "near"), [("vgg_norm", 1, 1e-5), ("transformer_dropout", 2, 1e-6)])
def test_evaluation_and_no_gradients(name, count, near):
    loaded = opened(name)
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 4, micro_batches=count))
    for one in (whole, engine) if count == 1 else ():
        step(one, loaded)
    with torch.no_grad():
        ours, theirs = (e(*loaded.inputs, evaluating=True)[0] for e in (engine, whole))
    assert float(ours) == pytest.approx(float(theirs), rel=near)
    assert difference(engine.buffers, whole.buffers) < 1e-5  # evaluation changed none


@pytest.mark.parametrize("count", [1, 4])
def test_inference_returns_every_output_of_the_whole_batch(count):
    loaded = opened("perceptron_outputs", mode="inference")
    strategy = placed(loaded, 6, micro_batches=count)
    with torch.no_grad():
        wanted = unsplit(loaded)(*loaded.inputs)
    for outputs in on_threads(
        3, lambda rank, t: PlacedEngine(strategy, loaded.values, transport=t, rank=rank)(*loaded.inputs)
    ):
        assert len(outputs) == len(wanted) == 2
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 4])
def test_gradients_scale_and_add_up_as_usual(count):
    loaded = opened("mlp")
    whole, engine = unsplit(loaded), in_one_process(loaded, placed(loaded, 8, micro_batches=count))
    for one in (whole, engine):
        one.shards.clear()
        first, second = one(*loaded.inputs)[0], one(*loaded.inputs)[0]
        (3 * second).backward()
        (0.5 * first).backward()
    assert difference(engine.shards.gradients, whole.shards.gradients) < ROUNDING


def test_a_loss_is_used_once():
    loaded = opened("mlp")
    loss = in_one_process(loaded, placed(loaded, 8))(*loaded.inputs)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used"):
        loss.backward()


@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_that_is_dropped_leaves_nothing(count):
    loaded = opened("mlp")
    engine = in_one_process(loaded, placed(loaded, 8, micro_batches=count))
    tapes: list[weakref.ref[Tape]] = []
    begun = Tape.__init__

    def noted(self: Tape, *given: Any) -> None:
        begun(self, *given)
        tapes.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", noted)
        loss = engine(*loaded.inputs)[0]
    assert [tape() is not None for tape in tapes] == [True] * count
    del loss
    assert [tape() is not None for tape in tapes] == [False] * count


def test_a_buffer_that_changes_elsewhere_is_sent_to_its_readers():
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
    assert_alike(engine, whole, loaded, steps=3)


def test_as_plain_data_and_back():
    strategy = placed(opened("mlp"), 2, micro_batches=4)
    again = strategy_from_data(strategy.to_data(), opened("mlp").graph)
    assert (again.micro_batches, again.devices) == (4, 3)
    assert again == strategy


# -- refusals ----------------------------------------------------------------------------------------


def test_operators_in_pieces_are_refused():
    graph = opened("mlp").graph
    name, choices = next((g.name, found) for g in graph.groups if (found := split_choices(graph, g, 2)))
    with pytest.raises(PlanError, match=f"2 micro-batches cannot cut operators into pieces .* {name}"):
        placed_graph(graph, {name: choices[0]}, 2)


@pytest.mark.parametrize(("name", "count", "says"), [
    ("vgg_norm", 2, r"2 micro-batches are refused: .* over the whole batch.*; use 1"),
    ("mlp", 3, r"3 micro-batches do not divide the 16 samples of .*; use a divisor"),
])  # fmt: skip
def test_counts_that_a_model_cannot_have_are_refused(name, count, says):
    with pytest.raises(PlanError, match=says):
        placed_graph(opened(name).graph, None, count)


def test_parameters_stay_on_their_devices_in_the_graph_of_a_call():
    """Also those of cut operators, whose pieces got them from devices of their own."""
    call, _ = call_and_plan("looking_back")
    graph, apart = captured_model("looking_back").graph, 0
    for seed in range(8):
        plan = random_placed(graph, 3, random.Random(seed), 0.6)
        placed = _placed_like(plan, call)
        schedule_of(placed)  # refuses what is in no order
        for name, planned in call.planned.items():
            assert placed.holders(name) == plan.holders(planned)[:1]
        users = dict.fromkeys(call.planned, 0)
        for group in call.groups.groups:
            for name in {*group.parameters, *group.shared} & users.keys():
                users[name] += 1
        variables = {
            op.parameters[0] for op in placed.placed_graph.operators if op.kind is OperatorKind.VARIABLE
        }
        apart += len([name for name in variables if users.get(name) == 1])
    assert apart
