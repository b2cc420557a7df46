"""Cost tables against a slow, obvious price of the strategy itself."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import inf, prod

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.costs.cost_graph import edge_keys
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable
from tensoropt.evaluation.problem import prepare
from tensoropt.ops.layouts import PARTIAL_GRAD, REDUCED_LAST
from tensoropt.ops.localise import localise
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import workload
from tensoropt.sharding.buckets import BUCKET_BYTES
from tensoropt.sharding.regions import find_regions, fitting_once, left_as_views
from tensoropt.sharding.reshard.steps import COLLECTIVES
from tensoropt.sharding.strategy import Edge, Strategy
from tests.costs.models import (
    AGAIN_S,
    ToyCommunication,
    ToyCompute,
    gates,
    gpt2,
    llama,
    problem,
    tables_of,
    two_layers,
)
from tests.models import Call

STATE = {"sgd": 0, "momentum": 1, "adam": 2}
COPY = 1e9
MODELS = {"two layers": two_layers, "gates": gates, "gpt2": gpt2, "llama": llama}
MESHES = [(1, 2), (2, 2), (1, 2, 2)]


# -- the naive twin -------------------------------------------------------------------------------


def runs(strategy: Strategy, group: str) -> int:
    """How often a group's forward runs."""
    return 1 + any(group in region.groups and group not in strategy.once for region in strategy.recomputed)


def made_again(strategy: Strategy, name: str, reader: str) -> bool:
    """Whether the second forward of a reader's region makes a tensor."""
    producer = strategy.graph.group_of[strategy.graph.atoms.graph.producer[name].name].name
    together = any({producer, reader} <= {*region.groups} for region in strategy.recomputed)
    return together and runs(strategy, producer) == 2


def gathered_again(strategy: Strategy, edge: Edge) -> bool:
    """Whether what comes along an edge from its maker is gathered again in backward."""
    first = not edge.reader or edge.tensor not in strategy.hubs
    return edge.kind == "activation" and first and edge.tensor in strategy.gathered_again


def home_of(strategy: Strategy, edge: Edge) -> str:
    """The group an edge runs in."""
    producer = strategy.graph.atoms.graph.producer.get(edge.tensor)
    return edge.reader or strategy.graph.group_of[producer.name].name


def steps_s(strategy: Strategy, steps, element_bytes: int) -> float:
    total = 0.0
    for step in steps:
        payload = step.payload(strategy.mesh) * element_bytes
        axes = [a - 1 for a in step.axes if a > 0 and strategy.mesh[a] > 1]
        if step.kind in COLLECTIVES and axes:
            total += ToyCommunication().time_s(step.kind, axes, payload)
        total += payload / COPY
    return total


def naive_communication(strategy: Strategy, facts: Mapping[str, Facts]) -> float:
    """Edges, forward and backward; gathers of parameters again in backward; kernels' own; buckets."""
    graph, mesh = strategy.graph, strategy.mesh
    training = graph.atoms.graph.training
    total = 0.0
    for edge in set(strategy.edges()):
        forward, backward = strategy.steps(edge)
        size = strategy.tensor(edge.tensor).element_bytes
        once = edge.kind in ("output", "unsharded")
        times = 1 if once else runs(strategy, home_of(strategy, edge))
        if edge.kind == "activation" and edge.reader and times == 1:
            # A group that runs once takes what it needs, and what was not kept for it, in backward.
            kept = graph.group_of[edge.reader].short_names[edge.tensor] in facts[edge.reader].reads_kept
            times += kept and made_again(strategy, edge.tensor, edge.reader)
        if (
            times == 1
            and edge.kind == "parameter"
            and training
            and any(s.kind == "all_gather" for s in forward)
        ):
            group = next(g for g in graph.groups if g.name == edge.reader)
            times += facts[edge.reader].parameters_kept.get(group.short_names[edge.tensor], 0)
        times += gathered_again(strategy, edge)
        micro = 1 if edge.kind == "unsharded" else mesh[0]  # a held copy serves all micro-batches
        total += micro * (times * steps_s(strategy, forward, size) + steps_s(strategy, backward, size))
    for group in graph.groups:
        for op in group.operators:
            call = localise(strategy.configurations[group.name].placed(op.name, graph.atoms, mesh, None))
            for c in call.collectives:
                axes = [a - 1 for a in c.axes if a > 0 and mesh[a] > 1]
                if axes and (training or not c.backward):
                    times = 1 if c.backward else runs(strategy, group.name)
                    total += ToyCommunication().time_s(c.kind, axes, c.bytes) * mesh[0] * times
    for name, layout in strategy.stored.items():
        axes = [a - 1 for a, code in enumerate(layout) if a > 0 and code == PARTIAL_GRAD and mesh[a] > 1]
        tensor = strategy.tensor(name)
        if axes and tensor.requires_grad:
            share = prod(strategy.local_shape(name, layout)) * tensor.element_bytes / BUCKET_BYTES
            total += share * ToyCommunication().time_s("all_reduce", axes, BUCKET_BYTES)
    return total


def naive_compute(strategy: Strategy, facts: Mapping[str, Facts]) -> float:
    total = 0.0
    for group in strategy.graph.groups:
        work = workload(strategy.graph, strategy.configurations[group.name], strategy.mesh)
        forward, backward = ToyCompute().seconds(work, facts[group.name])
        backward = backward if strategy.graph.atoms.graph.training else 0.0
        again = runs(strategy, group.name) - 1
        total += (forward + again * (forward + len(work.calls) * AGAIN_S) + backward) * strategy.mesh[0]
    for name, layout in strategy.stored.items():
        if strategy.tensor(name).requires_grad:
            elements = prod(strategy.local_shape(name, layout))
            total += elements * ToyCompute().optimizer_s_per_element
            reduced = any(a and n > 1 and layout[a] == PARTIAL_GRAD for a, n in enumerate(strategy.mesh))
            behind = any(
                strategy.use(name, group).block is not None
                for group in strategy.graph.groups
                if name in group.parameters
            )
            waits = name in strategy.unsharded and layout[0] == REDUCED_LAST
            # Into its bucket, once, or from where it was scattered; any other stays where it was made.
            if reduced or behind or waits:
                total += elements * strategy.tensor(name).stored_element_bytes / COPY
    return total


def naive_memory(
    strategy: Strategy, facts: Mapping[str, Facts], kept_homes: set[str], optimizer: str
) -> float:
    """Stored parameters with gradient and state; what groups keep; every other kept storage once.

    An edge whose forward does nothing gives its reader the very storage of its source. What a group reads
    when it runs again is kept as its source has it, unless that is made again: then it is kept for nobody. A
    parameter that is brought to its use by
    other steps than a gather leaves a copy. inf when a reader keeps a home that is not
    to be kept.
    """
    graph = strategy.graph
    training = graph.atoms.graph.training

    def size(name: str, layout) -> int:
        return prod(strategy.local_shape(name, layout)) * strategy.tensor(name).element_bytes

    def moves(name: str, source, target) -> bool:
        return bool(strategy.steps(Edge(name, source, target, "", "activation"))[0])

    total = 0
    for name, layout in strategy.stored.items():
        learns = training and strategy.tensor(name).requires_grad
        total += size(name, layout) * (2 + STATE[optimizer] if learns else 1)
    for edge in strategy.edges():
        if edge.kind == "unsharded":
            waits = strategy.stored[edge.tensor][0] == REDUCED_LAST
            total += size(edge.tensor, edge.target) * (2 if waits else 1)
            (step, *_) = strategy.steps(edge)[0]
            rows = step.after[: step.atom]
            if edge.block is not None and all(n == 1 for n in rows):  # it stays as it arrives, padded
                padding = step.payload(strategy.mesh) - prod(step.after)
                total += padding * strategy.tensor(edge.tensor).element_bytes
    counted: dict[tuple[str, str], int] = {}
    for group in graph.groups:
        if runs(strategy, group.name) == 2:
            continue
        total += facts[group.name].kept_bytes
        names = group.short_names
        for name in group.writes:
            if names[name] in facts[group.name].writes_kept:
                counted[name, "made"] = 0
        for name in (*group.parameters, *group.shared):
            use = strategy.configurations[group.name].layout(name)
            steps = strategy.steps(strategy.use(name, group))[0]
            gathered = any(s.kind == "all_gather" for s in steps)
            if training and steps and not gathered and names[name] in facts[group.name].parameters_kept:
                total += size(name, use)
    again = strategy.gathered_again
    homes = {
        name: (name, "home" if name not in again and moves(name, strategy.made[name], home) else "made")
        for name, home in strategy.hubs.items()
    }
    for name in kept_homes:
        layout = strategy.made[name] if name in again else strategy.hubs[name]
        counted.setdefault(homes[name], size(name, layout))
    for group in graph.groups:
        names = group.short_names
        for name in group.reads:
            if made_again(strategy, name, group.name):
                continue
            if runs(strategy, group.name) == 2:
                if name in strategy.hubs and name not in kept_homes:
                    return inf
                if name not in strategy.hubs:
                    counted.setdefault((name, "made"), size(name, strategy.made[name]))
                continue
            if names[name] not in facts[group.name].reads_kept:
                continue
            layout = strategy.configurations[group.name].layout(name)
            if name not in strategy.hubs and name in again:
                counted.setdefault((name, "made"), size(name, strategy.made[name]))
            elif moves(name, strategy.source_layout(name), layout):
                counted[name, group.name] = size(name, layout)
            elif name in strategy.hubs:
                if name not in kept_homes:
                    return inf
            else:
                counted.setdefault((name, "made"), size(name, layout))
    return float(total + sum(counted.values()))


def draw(tables: CostTables, rng: random.Random, keep: bool):
    """A random configuration of every variable and a random option of every group.

    Of each region all, some or no groups are recomputed, and hubs with their producers.
    """
    choice, options = {}, {}
    again = {name: False for v in tables.variables for name in [v.key]}
    for region in tables.regions:
        share = rng.choice((0, 0.5, 1))
        again.update({name: rng.random() < share for name in region.groups})
    for hub in tables.graph.hubs:
        producer = tables.graph.group_of[tables.graph.atoms.graph.producer[hub].name].name
        again[f"hub:{hub}"] = again[producer] and any(tables.of[f"hub:{hub}"].again)
    for v in tables.variables:
        fitting = [i for i in range(len(v.memory)) if not v.again or v.again[i] == again[v.key]]
        choice[v.key] = rng.choice([i for i in fitting if not (keep and v.kept) or v.kept[i]])
        options[v.key] = rng.randrange(len(v.memory[choice[v.key]]))
    edges = dict(zip(edge_keys(tables.edges), tables.edges, strict=True))
    for name, key in tables.moves.items():
        edge = edges[key]
        cells = edge.table[edge.rows[choice[edge.a]], edge.cols[choice[edge.b]]]
        options[Variable.of_move(name)] = int(cells[1, 0] < inf and rng.random() < 0.5)
    return choice, options


def naive_breakdown(tables: CostTables, choice, options, optimizer: str) -> tuple[float, float, float]:
    strategy, facts = tables.strategy(choice, options), tables.facts(choice)
    kept = {n for n in tables.graph.hubs if tables.of[f"hub:{n}"].kept[choice[f"hub:{n}"]]}
    return (
        naive_memory(strategy, facts, kept, optimizer),
        naive_compute(strategy, facts),
        naive_communication(strategy, facts),
    )


def check_prices(tables: CostTables, rng: random.Random, optimizer: str, kept_of: int, trials: int):
    """Compare random choices with their naive price; return the strategies of those that can be."""
    fitting = []
    for trial in range(trials):
        choice, options = draw(tables, rng, keep=trial % kept_of > 0)
        memory, compute, communication = tables.breakdown(choice, options)
        expected = naive_breakdown(tables, choice, options, optimizer)
        assert memory == expected[0]
        if memory < inf:
            fitting.append(tables.strategy(choice, options))
            assert (compute, communication) == pytest.approx(expected[1:], rel=1e-12)
    return fitting


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_tables_add_up_to_the_naive_price(name, mesh):
    rng = random.Random(f"{name}{mesh}")
    optimizer = rng.choice(["sgd", "momentum", "adam"])
    tables = tables_of(problem(MODELS[name]), mesh, optimizer, COPY)
    assert len(check_prices(tables, rng, optimizer, 3, 30)) >= 20


@pytest.mark.parametrize("mesh", [(1,), (1, 2), (2, 2)], ids=str)
def test_tables_of_recomputed_regions_add_up_to_the_naive_price(mesh):
    prepared = problem(gpt2)
    regions = find_regions(prepared.graph)
    assert len(regions) == 2
    tables = tables_of(prepared, mesh, "adam", COPY, regions)
    found = check_prices(tables, random.Random(str(mesh)), "adam", 4, 40)
    assert {len(strategy.recomputed) for strategy in found} == {0, 1, 2}


def viewing(m, x):
    """A block in which one group leaves a view of what another one makes."""
    made = m.first(x)
    return m.second(made.relu()) + m.third(made[:, :4]).mean(1, keepdim=True)


def test_a_view_of_what_is_made_again_is_made_again():
    layers = ({name: nn.Linear(8, 8) for name in ("first", "second", "third")} for _ in range(2))
    model, x = nn.Sequential(*(Call(viewing, **each) for each in layers)), torch.randn(4, 8, 8)
    prepared = prepare(capture(model, (x,), loss=lambda y: y.square().mean()))
    tables = tables_of(prepared, (1, 2), "adam", COPY, find_regions(prepared.graph))
    of_views = [g for g in prepared.graph.groups if left_as_views(g)]
    rng, seen = random.Random(1), set()
    for _ in range(60):
        choice, options = draw(tables, rng, keep=True)
        strategy = tables.strategy(choice, options)
        fits = all(
            runs(strategy, group.name) == 2
            for group in of_views
            for name in left_as_views(group)
            if made_again(strategy, name, group.name)
        )
        seen.add(fits)
        if not fits:
            assert tables.breakdown(choice, options)[0] == inf
    assert seen == {True, False}
    assert all(fitting_once(prepared.graph, r, r.groups) == {*r.groups} for r in tables.regions)


def test_layers_alike_share_their_tables():
    prepared = problem(gpt2)
    tables = tables_of(prepared, (1, 2))
    templates = list(tables.templates.values())
    assert len({id(t) for t in templates}) < len(templates)
    by_work = {}
    for group in prepared.graph.groups:
        configuration = tables.configuration(group, 1)
        work = workload(prepared.graph, configuration, tables.mesh)
        assert work.key == tables.templates[group.name].works[1].key
        by_work.setdefault(work.key, []).append(group.name)
    assert max(len(names) for names in by_work.values()) >= 2


def stack():
    """Three equal layers; the last one's result leaves the model."""
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    return Call(lambda m, x: m.layers(x), layers=layers), (torch.randn(8, 16),), {}


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("build", [two_layers, gpt2, stack], ids=lambda b: b.__name__)
def test_inference_has_no_gradients_and_no_state(build, mesh):
    """What leaves the model is gathered, also when a layer like the last one feeds another."""
    rng = random.Random(f"{build.__name__}{mesh}")
    tables = tables_of(problem(build, "inference"), mesh, "adam", COPY)
    for _ in range(10):
        choice, options = draw(tables, rng, keep=False)
        expected = naive_breakdown(tables, choice, options, "adam")
        assert tables.breakdown(choice, options) == pytest.approx(expected)
        strategy = tables.strategy(choice, options)
        stored = sum(
            prod(strategy.local_shape(n, layout)) * strategy.tensor(n).element_bytes
            for n, layout in strategy.stored.items()
        )
        assert tables.breakdown(choice, options)[0] == stored
