"""Names of operators and constants that depend only on the computation, and so are equal on all devices.

A plan refers to operators by name, but ``torch.export`` numbers its nodes differently on each device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tensoropt.graph import Operator, OperatorGraph, Ref, map_refs

_CONSTANT = "constant"


def numbered(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with operators named after their targets and constants named ``constant``, each kind
    numbered in order of execution or first use; inputs, parameters and buffers keep their names.
    """
    fixed_names = {t.name for t in graph.tensors.values() if t.kind not in ("activation", "constant")}
    taken = Counter[str]()

    def named(base: str) -> str:
        name = base
        while name in fixed_names:
            taken[base] += 1
            name = f"{base}_{taken[base]}"
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

    return replace(
        graph,
        tensors={tensors[n]: replace(t, name=tensors[n]) for n, t in graph.tensors.items()},
        operators=tuple(
            replace(
                reading(op, tensors),
                name=operators[op.name],
                outputs=tuple(tensors[name] for name in op.outputs),
            )
            for op in graph.operators
        ),
        outputs=tuple(tensors[name] for name in graph.outputs),
        mutations={tensors[buffer]: tensors[name] for buffer, name in graph.mutations.items()},
        constants={tensors[name]: value for name, value in graph.constants.items()},
    )


def reading(op: Operator, names: Mapping[str, str]) -> Operator:
    """Return the operator with new names of the tensors that it reads; ``names`` maps old names to new."""

    def renamed(name: str) -> Ref:
        return Ref(names.get(name, name))

    kwargs = {key: map_refs(value, renamed) for key, value in op.kwargs.items()}
    return replace(op, args=map_refs(op.args, renamed), kwargs=kwargs)


def _base(target: str) -> str:
    name = target.split(".")[1] if "." in target else target
    return name.strip("_") if name.startswith("__") else name
