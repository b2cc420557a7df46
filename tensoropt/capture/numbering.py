"""Operators and constants named after the computation and nothing else.

``torch.export`` numbers its nodes differently on each device, and a plan names operators.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tensoropt.graph import OperatorGraph, Ref
from tensoropt.graph.ir import map_refs

_CONSTANT = "constant"


def numbered(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with operators named after their targets and constants named ``constant``, each kind
    numbered in order of execution or first use; inputs, parameters and buffers keep their names.
    """
    fixed_names = {t.name for t in graph.tensors.values() if t.kind not in ("activation", "constant")}
    free: dict[str, Iterator[str]] = defaultdict(lambda: iter(()))

    def named(base: str) -> str:
        if base not in free:
            numbers = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(1)))
            free[base] = (name for name in numbers if name not in fixed_names)
        name = next(free[base])
        fixed_names.add(name)
        return name

    operators: dict[str, str] = {}
    tensors = {n: n for n, t in graph.tensors.items() if t.kind not in ("activation", "constant")}
    for op in graph.operators:
        for name in op.inputs():
            if name not in tensors:
                tensors[name] = named(_CONSTANT)
        operators[op.name] = new = named(_base(op.target))
        # The operator's name is followed by the number of the result (`split.0`), which is kept.
        tensors |= {name: new + name.removeprefix(op.name) for name in op.outputs}
    for name in graph.tensors:  # constants that are returned unchanged
        if name not in tensors:
            tensors[name] = named(_CONSTANT)

    def renamed(value: Any) -> Any:
        return map_refs(value, lambda name: Ref(tensors[name]))

    return replace(
        graph,
        tensors={tensors[n]: replace(t, name=tensors[n]) for n, t in graph.tensors.items()},
        operators=tuple(
            replace(
                op,
                name=operators[op.name],
                args=renamed(op.args),
                kwargs={key: renamed(value) for key, value in op.kwargs.items()},
                outputs=tuple(tensors[name] for name in op.outputs),
            )
            for op in graph.operators
        ),
        outputs=tuple(tensors[name] for name in graph.outputs),
        mutations={tensors[buffer]: tensors[name] for buffer, name in graph.mutations.items()},
        constants={tensors[name]: value for name, value in graph.constants.items()},
    )


def _base(target: str) -> str:
    name = target.split(".")[1] if "." in target else target
    return name.strip("_") if name.startswith("__") else name
