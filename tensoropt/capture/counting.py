"""A uniform way to count tokens per expert, on whichever device a model is captured.

``transformers`` casts expert numbers for ``histc`` to float32 on a CPU, whose kernel accepts nothing else,
and to int32 elsewhere, so a model on the meta device would give a different graph from the same model with
weights. The counts are exact in float32 up to 2**24 tokens.
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.graph import FLOATING, OperatorGraph, TorchLiteral

COUNT, CAST, COUNTED = "aten.histc.default", "aten._to_copy.default", "float32"


def count_in_floats(graph: OperatorGraph) -> OperatorGraph:
    """The graph in which every cast that only feeds a ``histc`` of integers is a cast to float32."""
    tensors, casts = dict(graph.tensors), set()
    for op in graph.operators:
        source = op.inputs()[0] if op.target == COUNT else None
        if source is None or tensors[source].dtype in FLOATING:
            continue
        cast = graph.producer.get(source)
        # A cast with other readers stays unchanged, because they may need integers.
        if cast is not None and cast.target == CAST and len(graph.consumers[source]) == 1:
            casts.add(cast.name)
            for name in (source, *op.outputs):
                tensors[name] = replace(tensors[name], dtype=COUNTED)
    if not casts:
        return graph
    operators = tuple(
        replace(op, kwargs={**op.kwargs, "dtype": TorchLiteral(COUNTED)}) if op.name in casts else op
        for op in graph.operators
    )
    return replace(graph, tensors=tensors, operators=operators)
