"""One order for all devices keeps the plan's, and is refused where there is none; a process's program is its
part of that order, with a message for every value that crosses a border.

A placed strategy as a stage for each device.
"""

import itertools
from dataclasses import replace

import pytest

from tensoropt.errors import PlanError
from tensoropt.placement import Placement
from tensoropt.placement.program import (
    BeginOperator,
    EndOperator,
    Enter,
    OnDevice,
    PlacedLowering,
    PlacedSchedule,
    ReceiveValue,
    SendValue,
    WaitForValue,
    schedule_of,
)
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.sharding.program import Argument, Compute, ForwardProgram, Move
from tests.placement.execute.cases import opened, placed


def check(strategy: PlacedStrategy, schedule: PlacedSchedule) -> None:
    placement = strategy.placement
    for instructions, orders in (
        (schedule.forward, placement.forward),
        (schedule.backward, placement.backward),
    ):
        for device, order in enumerate(orders):
            found = [n for is_operator, n in instructions if is_operator and placement.device[n] == device]
            assert found == list(order)
    transfers = [n for is_operator, n in (*schedule.forward, *schedule.backward) if not is_operator]
    assert transfers == list(range(len(strategy.transfers)))
    makers = {v.name: i for i, op in enumerate(strategy.placed_graph.operators) for v in op.writes}
    done: set[object] = set()
    for is_operator, number in schedule.forward:
        if is_operator:
            device = placement.device[number]
            for value in strategy.placed_graph.operators[number].reads:
                maker = makers[value.name]
                assert (maker if placement.device[maker] == device else (value.name, device)) in done
            done.add(number)
        else:
            transfer = strategy.transfers[number]
            assert makers[transfer.value] in done
            done.add((transfer.value, transfer.target))


@pytest.mark.parametrize("seed", range(12))
def test_every_devices_order_is_kept(seed):
    strategy = placed(opened("transformer"), seed)
    check(strategy, schedule_of(strategy))
    again = PlacedStrategy.from_data(strategy.to_data(), strategy.graph)
    assert schedule_of(again) == schedule_of(strategy)


def test_transfers_must_be_those_needed():
    strategy = placed(opened("mlp"), 2)
    with pytest.raises(PlanError, match="lacks the transfer"):
        schedule_of(replace(strategy, transfers=strategy.transfers[1:]))
    more = ("tanh", 0, 9, False)
    with pytest.raises(PlanError, match="needless transfer"):
        schedule_of(replace(strategy, transfers=(*strategy.transfers, more)))
    with pytest.raises(PlanError, match="twice"):
        schedule_of(replace(strategy, transfers=strategy.transfers + strategy.transfers[:1]))


def test_orders_that_wait_for_each_other():
    strategy = placed(opened("mlp"), 0, devices=1, share=0.0)
    (order,) = strategy.placement.forward
    backwards = Placement(strategy.placement.device, (tuple(reversed(order)),))
    with pytest.raises(PlanError, match="wait for each other"):
        schedule_of(replace(strategy, placement=backwards))


def test_transfers_in_an_impossible_order():
    strategy = placed(opened("mlp"), 1)
    with pytest.raises(PlanError, match="wait for each other"):
        schedule_of(replace(strategy, transfers=tuple(reversed(strategy.transfers))))


def program_of(strategy: PlacedStrategy, own: tuple[int, ...], evaluating: bool = False) -> ForwardProgram:
    return PlacedLowering(strategy, schedule_of(strategy).forward, own, evaluating).program()


@pytest.mark.parametrize(("name", "count", "seed"), [
    ("transformer", 1, 0), ("transformer", 2, 1), ("vgg_norm", 1, 2), ("moving_average", 1, 3),
    ("odd", 2, 4),
])  # fmt: skip
@pytest.mark.parametrize("own", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_program_is_the_part_of_its_process(name, count, seed, own):
    strategy = placed(opened(name), seed, micro_batches=count)
    order, operators = schedule_of(strategy).forward, strategy.placed_graph.operators
    device, transfers = strategy.placement.device, strategy.transfers
    program = program_of(strategy, own)
    expected: list[tuple[type, int]] = []
    for is_operator, number in order:
        if is_operator:
            expected += [(BeginOperator, number), (EndOperator, number)] * (device[number] in own)
        else:
            expected += [(SendValue, number)] * (transfers[number].source in own)
            expected += [(ReceiveValue, number)] * (transfers[number].target in own)
    steps = [
        n for n in program.nodes if isinstance(n, BeginOperator | EndOperator | SendValue | ReceiveValue)
    ]
    assert [(type(node), node.number) for node in steps] == expected
    assert set(program.parameters) == {
        name for op, d in zip(operators, device, strict=True) if d in own for name in op.parameters
    }
    assert len(program.outputs) == len(set(program.outputs))

    number, entered, computed = -1, [], []
    received, arrived = {}, {}
    for index, node in enumerate(program.nodes):
        assert all(provider in program.nodes[:index] for provider in node.reads.values())
        match node:
            case SendValue():
                assert list(node.reads) == [transfers[node.number].value]
            case ReceiveValue():
                received[node] = node.number
            case WaitForValue():
                ((value, provider),) = node.reads.items()
                # Once, and only before the first operator that reads it.
                route = transfers[received.pop(provider)]
                assert route.value == value
                arrived[value, route.target] = node
                rest = itertools.dropwhile(
                    lambda n: isinstance(n, WaitForValue | OnDevice), program.nodes[index:]
                )
                first = next(rest)
                assert isinstance(first, BeginOperator)
                assert value in {read.name for read in operators[first.number].reads}
                assert device[first.number] == route.target
            case BeginOperator():
                number, entered, computed = node.number, [], []
            case Enter():
                ((value, provider),) = node.reads.items()
                assert node.place == (value, device[number])
                made = strategy.placed_graph.values[value].tensor
                assert node.learns is strategy.graph.atoms.graph.tensors[made].requires_grad
                entered.append(value)
                assert arrived.get(node.place, provider) is provider
            case Compute():
                computed.append(node.op)
            case EndOperator():
                op = operators[number]
                assert entered == [value.name for value in op.reads]
                assert computed == list(op.group.operators if op.group is not None else ())
                assert list(node.places) == [(value.name, device[number]) for value in op.writes]
    assert not received


def test_only_casts_read_master_weights():
    strategy = placed(opened("transformer", compute_dtype="bfloat16"), 1)
    tensors = strategy.graph.atoms.graph.tensors
    program = program_of(strategy, (0, 1, 2))
    assert program.gathers  # backward casts them again, instead of keeping them
    masters = {name for name in program.parameters if tensors[name].master_dtype is not None}
    reads = [
        (name, isinstance(node, Move))
        for node in program.nodes
        for name, provider in node.reads.items()
        if isinstance(provider, Argument) and name in masters
    ]
    assert sorted(reads) == [(name, True) for name in sorted(masters)]


@pytest.mark.parametrize("name", ["moving_average", "transformer", "vgg_norm"])
def test_programs_return_every_output_and_new_buffer(name):
    strategy = placed(opened(name), 1)
    programs = [program_of(strategy, (device,)) for device in range(strategy.devices)]
    names = [name for program in programs for name in program.outputs]
    source, values = strategy.graph.atoms.graph, strategy.placed_graph.values
    changed = set(source.mutations.values())
    expected = [
        name
        for name, value in values.items()
        if value.tensor in changed or (value.code is None and name in source.outputs)
    ]
    assert sorted(names) == sorted(expected)
    assert changed <= {values[name].tensor for name in names}


def test_a_stage_has_the_operators_of_a_device():
    strategy = placed(opened("transformer"), 3)
    assert len(strategy.stages) == strategy.places == strategy.devices == 3
    for device, stage in enumerate(strategy.stages):
        own = [o for o, where in enumerate(strategy.placement.device) if where == device]
        assert sorted(stage) == sorted(strategy.placement.backward[device]) == own
        assert strategy.place_of(device) == device


def test_makers_and_holders_are_devices():
    strategy = placed(opened("odd"), 5)
    graph, device = strategy.placed_graph, strategy.placement.device
    where = {op.name: device[i] for i, op in enumerate(graph.operators)}
    unread = [t.name for t in strategy.graph.atoms.graph.parameters if t.name not in graph.holder]
    for name, operator in graph.holder.items():
        assert strategy.holders(name) == (where[operator],)
    for name in unread:
        assert strategy.holders(name) == (0, 1, 2)
    (loss, *_) = strategy.graph.atoms.graph.outputs
    assert strategy.maker(loss) == next(
        device[i] for i, op in enumerate(graph.operators) if loss in {v.name for v in op.writes}
    )
    assert strategy.maker("nothing") is None
