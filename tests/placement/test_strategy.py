"""A placed strategy as a stage for each device."""

from __future__ import annotations

import json

from tensoropt.placement.strategy import PlacedStrategy
from tests.placement.execute.cases import opened, placed


def test_a_stage_has_the_operators_of_a_device_in_both_orders() -> None:
    strategy = placed(opened("transformer"), 3)
    assert len(strategy.stages) == strategy.places == strategy.devices == 3
    for device, stage in enumerate(strategy.stages):
        own = [o for o, where in enumerate(strategy.placement.device) if where == device]
        assert sorted(stage.forward) == sorted(stage.backward) == own
        assert strategy.place_of(device) == device


def test_makers_and_holders_are_devices() -> None:
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


def test_data_give_the_strategy_back() -> None:
    for seed in range(5):
        strategy = placed(opened("mlp"), seed)
        data = json.loads(json.dumps(strategy.to_data()))
        assert PlacedStrategy.from_data(data, strategy.graph) == strategy
        assert PlacedStrategy.devices_in(data) == strategy.devices
