"""The devices that constraints leave to placed operators: they reach every method, or are refused by name."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tensoropt import Cluster, ConstraintError, InfeasibleError, load_cluster, load_model
from tensoropt.capture import capture
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import limits
from tensoropt.placement.limits import placed_limits
from tensoropt.placement.prices import PlacedPrices
from tensoropt.planners.placed import dpos, m_etf, m_topo, placer
from tensoropt.question.constraints import constraints_of
from tensoropt.sharding.groups import GroupGraph
from tests.models import Call
from tests.placement.execute.cases import costs_on
from tests.placement.test_prices import normalised, norms_of


@cache
def graph() -> GroupGraph:
    loaded = load_model("zoo:mlp", device="meta", seed=0, batch=8)
    return prepare_graph(capture(loaded.model, loaded.args, loaded.kwargs, mode="train").graph).graph


def linears() -> list[str]:
    return [g.name for g in graph().groups if g.parameters]


@cache
def cluster(*kinds: str) -> Cluster:
    devices = [{"kind": kind, "count": 1} for kind in kinds or ("H100-80GB", "V100-16GB")]
    return load_cluster({"name": "mixed", "devices": devices, "links": {"intra_node": "PCIe4"}})


def prices(where: Cluster | None = None, **given: Any) -> PlacedPrices:
    return priced_on(where or cluster(), graph(), given)


def priced_on(where: Cluster, groups: GroupGraph, given: Any = None) -> PlacedPrices:
    return PlacedPrices(groups, where, costs_on(where), constraints_of(given or None))


def placed(question: PlacedPrices, *names: str) -> dict[str, list[int]]:
    """The devices of operators, by the methods that place them."""
    problem = question.price().problem
    at = {name: i for i, name in enumerate(problem.names)}
    planners = {"placer": placer, "m_topo": m_topo, "m_etf": m_etf, "dpos": dpos}
    found = {name: planner.place(problem, None, 0).placement.device for name, planner in planners.items()}
    return {planner: [device[at[name]] for name in names] for planner, device in found.items()}


def test_without_constraints_everything_is_free():
    problem = prices().price().problem
    assert problem.together == problem.pinned == ()


def test_kinds_and_numbers_are_devices_an_operator_may_lie_on():
    first, last = linears()[0], linears()[-1]
    for wanted in ({"kinds": ["V100*"]}, {"devices": [1]}):
        entries = [{"operators": first, **wanted}, {"operators": last, "kinds": ["H100*"]}]
        question = prices(devices=entries)
        problem = question.price().problem
        at = {name: i for i, name in enumerate(problem.names)}
        assert dict(problem.pinned) == {at[first]: (1,), at[last]: (0,)}
        assert all(devices == [1, 0] for devices in placed(question, first, last).values())


def test_the_placer_takes_the_best_that_is_here_and_others_any_of_them():
    first = linears()[0]
    where = cluster("H100-80GB", "V100-16GB", "A100-80GB")
    kinds = prices(where, devices=[{"operators": first, "kinds": ["B200*", "A100*", "H100*"]}])
    assert dict(kinds.price().problem.pinned)[graph().groups.index(graph().group_of[first])] == (2, 0)
    found = placed(kinds, first)
    assert found["placer"] == [2]
    assert all(devices[0] in (0, 2) for devices in found.values())
    assert placed(prices(where, devices=[{"operators": first, "devices": [1, 2]}]), first)["placer"] == [1]


def test_a_pattern_for_all_operators_leaves_none_free():
    where = cluster("H100-80GB", "V100-16GB", "A100-80GB")
    for wanted, best in ({"kinds": ["A100*", "V100*"]}, 2), ({"devices": [1, 2]}, 1):
        question = prices(where, devices=[{"operators": "*", **wanted}])
        problem = question.price().problem
        assert len(problem.pinned) == problem.size
        assert set(placer.place(problem, None, 0).placement.device) == {best}
        for planner in (m_topo, m_etf, dpos):
            assert set(planner.place(problem, None, 0).placement.device) <= {1, 2}


def test_what_cuts_and_joins_lies_where_its_pieces_may():
    first = linears()[0]
    question = prices(devices=[{"operators": "*", "devices": [1]}])
    cut = question.price({first: question.split_choices(graph().group_of[first])[0]})
    kinds = {op.kind for op in cut.graph.operators}
    assert {"variable", "join"} <= kinds
    assert dict(cut.problem.pinned) == dict.fromkeys(range(cut.problem.size), (1,))
    # One neighbour is free.
    loose = prices(devices=[{"operators": first, "devices": [1]}]).price(cut.graph.splits)
    pinned = {loose.graph.operators[o].kind for o, _ in loose.problem.pinned}
    assert pinned == {"piece", "variable"}


def test_what_belongs_together_shares_a_device():
    first, last = linears()[0], linears()[-1]
    question = prices(together=[[first, last]], devices=[{"operators": first, "kinds": ["V100*"]}])
    problem = question.price().problem
    at = {name: i for i, name in enumerate(problem.names)}
    assert problem.together == (tuple(sorted((at[first], at[last]))),)
    assert all(devices == [1, 1] for devices in placed(question, first, last).values())


def test_pieces_of_a_group_are_limited_like_it():
    first = linears()[0]
    question = prices(devices=[{"operators": first, "kinds": ["V100*"]}])
    label, count = question.split_choices(graph().group_of[first])[0]
    cut = question.price({first: (label, count)})
    kinds = [cut.graph.operators[operator].kind for operator, _ in cut.problem.pinned]
    assert kinds.count("piece") == count
    assert set(kinds) == {"piece", "variable"}
    assert {devices for _, devices in cut.problem.pinned} == {(1,)}


def test_pins_of_mesh_axes_mean_nothing_here():
    pin = {"operators": linears()[0], "axes": {"gpu": "batch"}}
    with pytest.raises(ConstraintError, match=r"pin 1 .* a placed plan has no mesh axes"):
        prices(pin=[pin]).price()
    soft = prices(pin=[{**pin, "soft": True}])
    assert soft.price().problem.pinned == ()
    assert "given up, as it is soft: pin 1" in soft.limits.notes[0]


CONTRADICTIONS = {
    "a kind that is not here": (
        {"devices": [{"operators": "{first}", "kinds": ["B200*"]}]},
        "devices 1 .*no device of mixed is of such a kind",
    ),
    "a number that is not here": (
        {"devices": [{"operators": "{first}", "devices": [7]}]},
        "devices 1 .*mixed has devices 0 to 1",
    ),
    "two entries for one operator": (
        {"devices": [{"operators": "{first}", "kinds": ["V100*"]}, {"operators": "{first}", "devices": [0]}]},
        r"devices 2 .*given devices 1 \(.*V100.* it leaves no device for",
    ),
    "together and apart": (
        {
            "together": [["{first}", "{last}"]],
            "devices": [{"operators": "{first}", "devices": [0]}, {"operators": "{last}", "devices": [1]}],
        },
        r"together 1 .*given devices 1 .* and devices 2 .* it leaves no device for",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_leaves_no_device_is_refused_or_given_up(case):
    data, says = CONTRADICTIONS[case]
    named = json.dumps(data).replace("{first}", linears()[0]).replace("{last}", linears()[-1])
    entries = json.loads(named)
    given = constraints_of(entries)
    assert given is not None
    with pytest.raises(ConstraintError, match=says):
        placed_limits(given, graph(), cluster())
    # All soft: what came before holds, and what contradicts it is given up.
    yielding = {
        name: tuple(replace(entry, soft=True) for entry in getattr(given, name))
        for name in ("pins", "stored", "together", "devices")
    }
    soft = placed_limits(replace(given, **yielding), graph(), cluster())
    assert len(soft.notes) == 1
    assert soft.notes[0].startswith("given up, as it is soft: ")


@torch.library.custom_op("tensoropt_tests::of_cpus", mutates_args=(), device_types="cpu")
def of_cpus(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


@of_cpus.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0])


def between(m: Any, x: torch.Tensor) -> torch.Tensor:
    """An operator without a kernel for GPUs between others."""
    return (m.first(x) + m.second(of_cpus(x)[:, None])).square().mean()


BESIDE = cluster("CPU-core", "H100-80GB", "CPU-core")


@cache
def binned() -> GroupGraph:
    model = Call(between, first=torch.nn.Linear(8, 8), second=torch.nn.Linear(1, 8))
    return prepare_graph(capture(model, (torch.randn(4, 8),)).graph).graph


def test_what_has_no_kernel_for_gpus_goes_to_a_cpu_rank():
    question = priced_on(BESIDE, binned())
    problem = question.price().problem
    at = problem.names.index("of_cpus")
    assert np.isinf(problem.forward_s[at]).tolist() == [False, True, False]
    (note,) = question.limits.notes
    assert note == (
        "tensoropt_tests.of_cpus.default has no kernel for cuda devices: of_cpus can run on device 0, 2 only"
    )
    assert question.limits.against == ()
    device = placer.place(problem, None, 0).placement.device
    assert device[at] == 0
    assert {where for number, where in enumerate(device) if number != at} == {1}
    for planner in (m_topo, m_etf, dpos):
        assert planner.place(problem, None, 0).placement.device[at] in (0, 2)


def test_soft_pins_to_gpus_yield_to_kernels_and_hard_ones_are_refused():
    def left(**entry: Any) -> limits.PlacedLimits:
        given = constraints_of({"devices": [{"operators": "of_cpus", **entry}]})
        return placed_limits(given, binned(), BESIDE)

    with pytest.raises(ConstraintError, match=r"given the available kernels, it leaves no device for"):
        left(kinds=["H100*"])
    soft = left(kinds=["H100*"], soft=True)
    assert soft.devices == {}
    assert soft.notes[-1].startswith("given up, as it is soft: devices 1 (of_cpus: H100*)")
    # Other operators that it matches keep to it.
    everywhere = constraints_of({"devices": [{"operators": "*", "kinds": ["H100*"], "soft": True}]})
    found = placed_limits(everywhere, binned(), BESIDE)
    assert found.devices == {group.name: (1,) for group in binned().groups if group.name != "of_cpus"}
    assert found.notes[-1].endswith("given the available kernels, it leaves no device for of_cpus")
    # The best of those that it allows and that can run it, in its order.
    assert left(devices=[1, 2, 0]).devices == {"of_cpus": (1, 2, 0)}
    given = {"devices": [{"operators": "of_cpus", "devices": [1, 2, 0]}]}
    problem = priced_on(BESIDE, binned(), given).price().problem
    assert placer.place(problem, None, 0).placement.device[problem.names.index("of_cpus")] == 2


def test_what_no_device_can_run_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "has_kernel", lambda target, _: "of_cpus" not in target)
    with pytest.raises(InfeasibleError, match=r"no device of mixed can run of_cpus: .*no kernel for cuda"):
        placed_limits(None, binned(), BESIDE)
    monkeypatch.setattr(limits, "has_kernel", lambda target, _: None if "of_cpus" in target else True)
    found = placed_limits(None, binned(), BESIDE)
    assert found.runs_on == {}
    assert found.notes == (
        "kernels unknown on this machine, assumed for all devices: tensoropt_tests.of_cpus.default",
    )


def test_a_hard_entry_holds_whatever_the_order():
    first = linears()[0]
    entries = [{"operators": first, "devices": [0], "soft": True}, {"operators": first, "devices": [1]}]
    found = prices(devices=entries).limits
    assert found.devices == {first: (1,)}
    assert "devices 1" in found.notes[0]
    assert "given devices 2" in found.notes[0]


def test_limits_on_a_batch_norm_hold_for_its_steps():
    first, second = norms_of(normalised())
    devices = [{"operators": first, "kinds": ["V100*"]}]
    given = {"devices": devices, "together": [{"operators": [first, second]}]}
    priced = priced_on(cluster(), normalised(), given).price({first: ("batch", 2)})
    names = [op.name for op in priced.graph.operators]
    steps = [f"{first}{part}" for part in (" sums[1/2]", " sums[2/2]", " statistics", "[1/2]", "[2/2]")]
    assert dict(priced.problem.pinned).items() >= {names.index(name): (1,) for name in steps}.items()
    assert {names[i] for i in priced.problem.together[0]} == {*steps, second}
