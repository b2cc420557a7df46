"""One order for all devices: it keeps the plan's, and is refused where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensoropt.errors import PlanError
from tensoropt.placement import Placement
from tensoropt.placement.execute.transport import PlacedSchedule, Transfer, schedule_of
from tensoropt.placement.strategy import PlacedStrategy
from tests.placement.execute.cases import opened, placed


def check(strategy: PlacedStrategy, schedule: PlacedSchedule) -> None:
    placement = strategy.placement
    for instructions, orders in (
        (schedule.forward, placement.forward),
        (schedule.backward, placement.backward_orders),
    ):
        for device, order in enumerate(orders):
            found = [i for i in instructions if isinstance(i, int) and placement.device[i] == device]
            assert found == list(order)
    transfers = [i for i in (*schedule.forward, *schedule.backward) if isinstance(i, Transfer)]
    assert [t.number for t in transfers] == list(range(len(strategy.transfers)))
    makers = {v: i for i, op in enumerate(strategy.placed_graph.operators) for v in op.writes}
    done: set[object] = set()
    for instruction in schedule.forward:
        if isinstance(instruction, Transfer):
            assert makers[instruction.value] in done
            done.add((instruction.value, instruction.target))
        else:
            device = placement.device[instruction]
            for value in strategy.placed_graph.operators[instruction].reads:
                here = placement.device[makers[value]] == device
                assert (makers[value] if here else (value, device)) in done
            done.add(instruction)


@pytest.mark.parametrize("seed", range(12))
def test_every_devices_order_is_kept(seed: int) -> None:
    strategy = placed(opened("transformer"), seed)
    check(strategy, schedule_of(strategy))
    again = PlacedStrategy.from_data(strategy.to_data(), strategy.graph)
    assert schedule_of(again) == schedule_of(strategy)


def test_transfers_must_be_those_needed() -> None:
    strategy = placed(opened("mlp"), 2)
    with pytest.raises(PlanError, match="lacks transfer"):
        schedule_of(replace(strategy, transfers=strategy.transfers[1:]))
    more = ("tanh", 0, 9, False)
    with pytest.raises(PlanError, match="needless transfer"):
        schedule_of(replace(strategy, transfers=(*strategy.transfers, more)))
    with pytest.raises(PlanError, match="twice"):
        schedule_of(replace(strategy, transfers=strategy.transfers + strategy.transfers[:1]))


def test_orders_that_wait_for_each_other() -> None:
    strategy = placed(opened("mlp"), 0, devices=1, share=0.0)
    (order,) = strategy.placement.forward
    backwards = Placement(strategy.placement.device, (tuple(reversed(order)),))
    with pytest.raises(PlanError, match="wait for each other"):
        schedule_of(replace(strategy, placement=backwards))


def test_transfers_in_an_impossible_order() -> None:
    strategy = placed(opened("mlp"), 1)
    with pytest.raises(PlanError, match="wait for each other"):
        schedule_of(replace(strategy, transfers=tuple(reversed(strategy.transfers))))
