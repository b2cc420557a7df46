"""What the search takes for hidden behind products of weights' gradients."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs.builder import TableBuilder
from tensoropt.costs.compute import MeasuredCompute, RooflineCompute, SlowestCompute, _weight_gradient_share
from tensoropt.costs.cost_graph import EdgeTable
from tensoropt.costs.edges import TableArrays
from tensoropt.costs.effects import Effects, additive
from tensoropt.costs.prices import Prices
from tensoropt.costs.tables import CostTables, make_templates
from tensoropt.costs.variables import Variable
from tensoropt.evaluation.evaluate import evaluate_strategy
from tensoropt.evaluation.problem import Problem
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.groups import is_one_reduction, products_beside
from tensoropt.sharding.regions import Region
from tensoropt.sharding.reshard.steps import edge_steps
from tests.costs.models import ToyCommunication, ToyCompute, facts_of, gates, problem, tables_of
from tests.simulate.test_beside_weights import columns_then_rows, three
from tests.simulate.test_simulator import BESIDE

MESH, SLOWER = (2, 2, 2), 0.25
OVERHEADS = Overheads(copy_s_per_byte=1.3e-9, call_s=1.7e-6, pass_s=3.1e-7)


def prices_of(graph, mesh: tuple[int, ...], *, beside: bool) -> Prices:
    costs = ToyCompute(), ToyCommunication()
    return Prices(graph, mesh, *costs, "sgd", OVERHEADS, beside=beside, slower_beside=SLOWER)


def built(prepared: Problem, *, beside: bool, regions: tuple[Region, ...] = ()) -> CostTables:
    templates = make_templates(prepared.graph, MESH, prepared.micro, facts_of)
    prices = prices_of(prepared.graph, MESH, beside=beside)
    return TableBuilder(prepared.graph, prepared.micro, templates, prices, regions).build()


def edge_between(tables: CostTables, first: str, second: str) -> EdgeTable:
    """The first table of two variables."""
    return next(e for e in tables.edges if {e.a, e.b} == {first, second})


def hidden_s(tables: CostTables, name: str, source: Layout, target: Layout, work: Workload) -> float:
    """Seconds of a step, by hand."""
    graph, prices = tables.graph, tables.prices
    back = edge_steps(graph.atoms.atom_sizes(name), MESH, source, target)[1]
    if not is_one_reduction(back, MESH):
        return 0.0
    _, sends = prices.steps(back, graph.atoms.graph.tensors[name].element_bytes)
    product_s = prices.compute.weight_gradient_s(work, facts_of(work))
    return MESH[0] * min(product_s, sum(send.seconds for send in sends) / (1 + SLOWER))


def saved_s(prepared: Problem, first: str, second: str, **more) -> tuple[CostTables, EdgeTable, np.ndarray]:
    """(tables with something beside, their edge, seconds that it is less than without, by cell)."""
    # Whether an input is gathered again is an option of its edge, which hides nothing.
    alone, beside = (built(prepared, beside=b, **more).without_moves for b in (False, True))
    edges = [edge_between(tables, first, second) for tables in (alone, beside)]
    whole = [edge.table[edge.rows][:, edge.cols][..., 1] for edge in edges]
    with np.errstate(invalid="ignore"):
        saved = np.where(np.isfinite(whole[0]), whole[0] - whole[1], 0.0)
    return beside, edges[1], saved


@pytest.mark.parametrize("model", [three, gates])
def test_a_pair_of_configurations_hides_what_the_simulator_does(model) -> None:
    prepared = problem(model)
    graph = prepared.graph
    direct = {n: p for n, p in products_beside(graph).items() if n not in graph.hubs}
    assert direct
    hides = 0
    for name, product in direct.items():
        maker = graph.group_of[graph.atoms.graph.producer[name].name].name
        tables, _, saved = saved_s(prepared, maker, product.group)
        makers, readers = ([tables.configuration(graph.group_of[g], i) for i in range(n)]
                           for g, n in zip((maker, product.group), saved.shape, strict=True))  # fmt: skip
        for (i, one), (j, other) in itertools.product(enumerate(makers), enumerate(readers)):
            work = workload(graph, other, MESH)
            expected = hidden_s(tables, name, one.layout(name), other.layout(name), work)
            assert saved[i, j] == pytest.approx(expected, abs=1e-15)
            hides += expected > 0
    assert hides


@pytest.mark.parametrize("offered", [False, True], ids=["plain", "recomputed"])
def test_a_hub_hides_no_more_than_any_first_reader_that_takes_it_as_it_is(offered: bool) -> None:
    """With the first reader in a region that the hub is made outside of, it may be recomputed, and then its
    gradient is reduced by itself: nothing is counted as hidden."""
    prepared = problem(gates)
    graph = prepared.graph
    (name,) = graph.hubs
    product = products_beside(graph)[name]
    maker = graph.group_of[graph.atoms.graph.producer[name].name].name
    regions = (Region("block", tuple(g.name for g in graph.groups[1:5])),) if offered else ()
    tables, edge, saved = saved_s(prepared, maker, Variable.of_hub(name), regions=regions)
    if offered:
        assert not saved.any()
        return
    hub = tables.of[edge.b]
    readers = [tables.configuration(graph.group_of[product.group], j)
               for j in range(len(tables.of[product.group].options))]  # fmt: skip
    makers = [tables.configuration(graph.group_of[maker], i) for i in range(saved.shape[0])]
    assert saved.any()
    for (i, one), (k, layout) in itertools.product(enumerate(makers), enumerate(hub.layouts)):
        finds = [
            hidden_s(tables, name, one.layout(name), layout, workload(graph, reader, MESH))
            for reader in readers
            if reader.layout(name) == layout
        ]
        assert saved[i, k] == pytest.approx(min(finds, default=0.0), abs=1e-15)


@pytest.mark.parametrize("enter", ["none", "d0"])
@pytest.mark.parametrize("micro", [1, 2])
def test_effects_add_up_to_what_the_simulator_finds(enter: str, micro: int) -> None:
    strategy = columns_then_rows((micro, 2), enter if micro == 1 else "none")
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    facts = {n: facts_of(w) for n, w in works.items()}
    prices = prices_of(strategy.graph, strategy.mesh, beside=True)
    evaluated = evaluate_strategy(strategy, works, facts, prices, replace(BESIDE, slower=SLOWER))
    costs = [additive(owner.effects.at(0), prices) for owner in evaluated.batch.owners]
    reductions = [
        additive(Effects((effect,)), prices).communication
        for owner in evaluated.batch.owners
        for effect in owner.effects.at(0).effects
        if effect.share is not None
    ]
    summed = sum(c.compute + c.communication for c in costs) - sum(reductions)
    buckets = sum(
        prices.communication.time_s(c.kind, c.axes, c.bytes) * n
        for c, n in evaluated.collectives(0).items()
        if c.kind == "all_reduce" and enter == "d0" and c.bytes == 12 * 24 * 4
    )
    assert evaluated.metrics.exposed_s[0] < evaluated.metrics.communication_s[0]
    assert evaluated.metrics.time_s[0] == pytest.approx(summed + buckets)


def test_a_kept_array_knows_what_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with shorter products are other ones."""
    keys: list[list[str]] = []

    class Asked(TableArrays):
        def once(self, depends_on, make):
            keys[-1].append(depends_on())
            return make()

    for share in (0.4, 0.2):

        def shorter_s(compute, work, facts, share=share):
            return share * compute.seconds(work, facts)[1]

        monkeypatch.setattr(ToyCompute, "weight_gradient_s", shorter_s)
        keys.append([])
        tables_of(problem(three), MESH, "sgd", arrays=Asked(), beside=True)
    assert len(set(keys[0]) - set(keys[1])) == 2  # of the two tensors before a product


def test_a_product_is_half_of_what_its_call_takes_in_backward() -> None:
    graph = problem(three).graph
    strategy = columns_then_rows()
    work = workload(graph, strategy.configurations["linear_1"], (1, 2))  # with a relu behind it
    facts = facts_of(work)
    device = load_cluster("dgx-h100").device
    roofline = RooflineCompute(device, "adam")
    alone = replace(facts, work_of_calls=facts.work_of_calls[:1])
    back_s = roofline.seconds(replace(work, calls=work.calls[:1]), alone)[1]
    assert roofline.weight_gradient_s(work, facts) == pytest.approx(back_s / 2)
    # Where calls are not told apart by the seconds of their group, by FLOP: a relu has none.
    assert _weight_gradient_share(facts) == 0.5
    record = {"forward_s": 1.0, "backward_s": 3.0}
    measured = MeasuredCompute({work.key: record}, 1e-9)
    assert measured.weight_gradient_s(work, facts) == 1.5
    slower = MeasuredCompute({work.key: record | {"backward_s": 4.0}}, 1e-9)
    assert SlowestCompute([measured, slower]).weight_gradient_s(work, facts) == 2.0
    lost = MeasuredCompute({work.key: {"error": "out of memory"}}, 1e-9)
    assert math.isinf(lost.weight_gradient_s(work, facts))
    on_cpu = RooflineCompute(load_cluster("cpu:2").device, "adam")
    assert on_cpu.weight_gradient_s(work, facts) == on_cpu.seconds(work, facts)[1] / 2
