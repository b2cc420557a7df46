"""Counts the figures that ``tensoropt list models`` shows, for every model of the zoo, captured on the meta
device.

``python -m tests.zoo.statistics [NAME ...]`` writes ``zoo/figures.json`` anew, or only
the rows of the names given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import networkx as nx
from networkx.algorithms.approximation import treewidth_min_fill_in

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.costs.tables import Template
from tensoropt.costs.variables import Variable
from tensoropt.evaluation.problem import prepare, shares_of_flops, unsplit
from tensoropt.graph import Operator, OperatorGraph
from tensoropt.graph.ir import DTYPE_BYTES
from tensoropt.ops.registry import resolve_function
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.groups import GroupGraph
from tensoropt.zoo.figures import FILE, Figures


def count(name: str, **settings: Any) -> Figures:
    """Return the figures of a model of the zoo at its own batch; nothing of its size is allocated.

    Args:
        settings: settings of the model's builder, such as ``image=128``.
    """
    built = zoo.build(name, device="meta", **settings)
    problem = prepare(capture(built.model, built.args, built.kwargs))
    known: dict[str, Facts] = {}

    def facts_of(work: Workload) -> Facts:
        if work.key not in known:
            known[work.key] = find_facts(work)
        return known[work.key]

    graph = problem.graph
    templates = unsplit(graph, facts_of)
    ruled, split = shares_of_flops(graph, templates)
    facts = [templates[g.name].facts[0] for g in graph.groups]
    return Figures(
        batch=zoo.entry(name).batch,
        parameters=built.parameter_count,
        parameter_bytes=built.parameter_bytes,
        kept_bytes=kept_bytes(graph, templates),
        output_bytes=output_bytes(graph.atoms.graph),
        operators=len(graph.atoms.graph.operators),
        groups=len(graph.groups),
        # A heuristic: an upper bound, which ``list models`` shows as such.
        treewidth=treewidth_min_fill_in(variable_graph(graph))[0],
        flop=sum(f.forward_flops + f.backward_flops for f in facts),
        rule_share=round(ruled, 6),
        split_share=round(split, 6),
    )


def kept_bytes(graph: GroupGraph, templates: Mapping[str, Template]) -> int:
    """Return the bytes of activations that the unsplit model keeps for backward; what several operators need
    counts once."""
    tensors, total = graph.atoms.graph.tensors, 0
    needed: set[str] = set()
    counted: set[str] = set()
    for group in graph.groups:
        facts = templates[group.name].facts[0]
        total += facts.kept_bytes
        names = {short: name for name, short in group.short_names.items()}
        needed.update(names[short] for short in facts.reads_kept)
        counted.update(names[short] for short in facts.writes_kept)
    # Parameters and inputs exist in any case; a tensor that its writer keeps is counted with that group.
    needed = {name for name in needed - counted if tensors[name].kind == "activation"}
    return total + sum(tensors[name].elements * DTYPE_BYTES[tensors[name].dtype] for name in needed)


def output_bytes(graph: OperatorGraph) -> int:
    """Return the bytes of the outputs of all operators; a view of another tensor has none of its own."""
    return sum(
        graph.tensors[name].elements * DTYPE_BYTES[graph.tensors[name].dtype]
        for op in graph.operators
        if not _is_view(op)
        for name in op.outputs
    )


def _is_view(op: Operator) -> bool:
    schema = getattr(resolve_function(op.target), "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def variable_graph(graph: GroupGraph) -> nx.Graph:
    """Return groups, hubs and tied parameters as the search sees them: an edge where two choices meet in a
    cost."""
    found = nx.Graph()
    found.add_nodes_from(g.name for g in graph.groups)
    producer = graph.atoms.graph.producer
    for name in graph.hubs:
        found.add_edge(Variable.of_hub(name), graph.group_of[producer[name].name].name)
    for group in graph.groups:
        for name in group.reads:
            source = Variable.of_hub(name) if name in graph.hubs else graph.group_of[producer[name].name].name
            found.add_edge(source, group.name)
        for name in group.shared:
            found.add_edge(Variable.of_parameter(name), group.name)
    return found


def main(names: list[str]) -> None:
    """Count the given models, or all, and write the file of figures after each."""
    path = Path(zoo.__file__).parent / FILE
    before = json.loads(path.read_text(encoding="utf-8"))["models"] if names and path.exists() else {}
    models = dict(before)
    for name in names or [e.name for e in zoo.list_models()]:
        print(name, file=sys.stderr, flush=True)
        models[name] = asdict(count(name))
        # After each model: counting them all takes long, and an interruption keeps what was counted.
        _write(path, models)


def _write(path: Path, models: Mapping[str, object]) -> None:
    packages = ("torch", "transformers", "networkx")
    data = {
        "about": "one training step, unsplit; made by `make zoo-figures` on the meta device",
        "versions": {package: version(package) for package in packages},
        "models": dict(sorted(models.items())),
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
