"""The capture of a PyTorch model as an operator graph, through ``torch.export``.

``torch.export.export`` followed by ``run_decompositions({})`` gives a flat, functional ATen graph that keeps
``linear``, ``layer_norm``, ``scaled_dot_product_attention``, ... whole. In training everything but the loss
is dropped, and only activations on a path from a parameter to the loss get a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.capture import fidelity
from tensoropt.capture.bitsandbytes import replace_layers
from tensoropt.capture.convert import Converter, Mode
from tensoropt.capture.experts import with_experts
from tensoropt.capture.exporting import export, run_as_it_trains
from tensoropt.capture.folding import kept_constants
from tensoropt.capture.loss import WithLoss
from tensoropt.capture.no_grad import in_mode
from tensoropt.capture.numbering import reading
from tensoropt.capture.precision import with_compute_dtype
from tensoropt.capture.products import with_linear_products
from tensoropt.capture.quantised import with_quantised_linear
from tensoropt.capture.refusals import check_hooks, check_inputs, check_memory, check_model, refusal
from tensoropt.capture.results import Returned
from tensoropt.errors import CaptureError
from tensoropt.graph import FLOATING, Operator, OperatorGraph, Ref, TorchLiteral

_INPUT_GRADIENTS = "inputs that require a gradient get none: a plan computes gradients of parameters only"


def _without_idle_gradients(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph without ``requires_grad`` on tensors that get no gradient from the loss.

    A parameter that is only read without gradient is never trained, because PyTorch's optimizers leave it
    unchanged. Such a parameter counts as frozen, which a note reports. A parameter keeps ``requires_grad`` if
    some operators give it a gradient (:meth:`~tensoropt.sharding.groups.GroupGraph.learns` tells which do).

    An operator through which no gradient flows reads a detached copy of each activation with a gradient. So
    an activation either gets a gradient from all operators that read it, or from none.
    """
    if not graph.training:
        return graph
    # In training the only output, the loss.
    reached = {graph.outputs[0]}
    for op in reversed(graph.operators):
        if not reached.isdisjoint(op.outputs):
            reached.update(name for name in op.inputs() if graph.tensors[name].requires_grad)
    tensors = {
        name: replace(tensor, requires_grad=False)
        if tensor.kind in ("activation", "parameter") and tensor.requires_grad and name not in reached
        else tensor
        for name, tensor in graph.tensors.items()
    }
    operators = []
    for op in graph.operators:
        if not reached.isdisjoint(op.outputs) or op.target == _DETACH:
            operators.append(op)
            continue
        read = [tensors[name] for name in dict.fromkeys(op.inputs())]
        detached = {t.name: f"{t.name}_detached" for t in read if t.kind == "activation" and t.requires_grad}
        for name, result in detached.items():
            if result not in tensors:  # one detach for all readers that take no gradient
                tensors[result] = replace(tensors[name], name=result, requires_grad=False)
                operators.append(Operator(result, _DETACH, (Ref(name),), {}, (result,), op.module, op.source))
        operators.append(reading(op, detached))
    idle = [str(t.key) for t in graph.parameters if t.requires_grad and not tensors[t.name].requires_grad]
    notes = graph.notes
    if idle:
        few = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        notes = (*notes, f"{len(idle)} parameters get no gradient from the loss, and are not trained: {few}")
    return replace(graph, tensors=tensors, operators=tuple(operators), notes=notes)


_DETACH = "aten.detach.default"
COUNT, _CAST, _COUNTED = "aten.histc.default", "aten._to_copy.default", "float32"


def _count_in_floats(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with a cast to float32 in place of each cast to integers that only ``histc`` reads.
    ``transformers`` counts tokens per expert in float32 on a CPU and in int32 elsewhere; both are exact up to
    2**24, and the graph has to be the same on all devices."""
    tensors, casts = dict(graph.tensors), set()
    for op in graph.operators:
        source = op.inputs()[0] if op.target == COUNT else None
        if source is None or tensors[source].dtype in FLOATING:
            continue
        cast = graph.producer.get(source)
        # A cast with other readers stays unchanged, because they may need integers.
        if cast is not None and cast.target == _CAST and len(graph.consumers[source]) == 1:
            casts.add(cast.name)
            for name in (source, *op.outputs):
                tensors[name] = replace(tensors[name], dtype=_COUNTED)
    if not casts:
        return graph
    operators = tuple(
        replace(op, kwargs={**op.kwargs, "dtype": TorchLiteral(_COUNTED)}) if op.name in casts else op
        for op in graph.operators
    )
    return replace(graph, tensors=tensors, operators=operators)


@dataclass(frozen=True)
class Capture:
    """A captured model: its graph, and the structure of its inputs and outputs.

    Attributes:
        graph: the operator graph.
        model: the captured module, with its parameters (possibly on the meta device).
        in_spec: pytree structure of ``(args, kwargs)``.
        out_spec: pytree structure of the model's output (inference).
        returned: position of the loss in the model's output (training); None in inference.
        example: values of the example call, flattened by ``in_spec``.
    """

    graph: OperatorGraph
    model: torch.nn.Module
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    returned: Returned | None
    example: tuple[Any, ...] = field(repr=False, default=())


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    mode: Mode = "train",
    dtype: str = "float32",
    compare: bool = True,
    read_stored: bool = True,
) -> Capture:
    """Capture ``model(*args, **kwargs)`` as an operator graph.

    Nothing is computed on a GPU. The capture runs on the meta device unless the whole model and all example
    inputs are on the CPU.

    Args:
        model: any module that ``torch.export`` accepts, on any device; on the meta device for big models.
            The model's layers of bitsandbytes are replaced (:mod:`tensoropt.capture.bitsandbytes`).
        args, kwargs: example inputs at the global batch size, on any device.
        loss: function of the model's output that returns a scalar. It is needed in training unless the output
            contains one scalar, or a scalar called ``loss``.
        mode: ``"train"`` keeps only the loss and expects a backward pass; ``"inference"`` keeps all outputs.
        dtype: the dtype in which operators compute: ``float32`` keeps the model's own dtypes, ``bfloat16``
            adds casts and keeps float32 master weights (:mod:`tensoropt.capture.precision`).
        compare: whether the loss and gradients of a small model are computed both by the graph and by the
            model, and compared (:mod:`tensoropt.capture.fidelity`).
        read_stored: whether attention masks among the model's buffers are read, to replace causal masks with
            the flag ``is_causal``. A model on the meta device has no values, and so keeps such masks.

    Raises:
        CaptureError: the export fails (the message has the reason), no loss is found, or the graph would
            train differently from the model.
    """
    if isinstance(model, WithLoss):
        # The fourth item that a model file may return: its own loss.
        loss, model = loss or model.loss, model.model
    check_model(model)
    replaced = replace_layers(model)
    training = mode == "train"
    if training:
        check_hooks(model)
    kwargs = dict(kwargs or {})
    check_inputs(model, args, kwargs)
    wanted = any(getattr(value, "requires_grad", False) for value in pytree.tree_leaves((args, kwargs)))
    args, kwargs = _separate_inputs(args, kwargs)
    subject: torch.nn.Module = WithLoss(model, loss) if training else model
    stored: Mapping[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        notes = [*replaced, *stack.enter_context(in_mode(model, mode))]
        if training and wanted:
            notes.append(_INPUT_GRADIENTS)
        call = args, kwargs
        if fidelity.off_the_cpu(model, call):
            args, kwargs = fidelity.on_meta(call)
            stored = stack.enter_context(fidelity.shadowed(subject))
        try:
            exported, step, export_notes = export(subject, args, kwargs, training)
        except CaptureError:
            raise
        except Exception as error:
            raise refusal(model, error, args, kwargs) from error
        notes += export_notes
        # `WithLoss` has the model as its attribute; keys are those of the user's own model.
        prefix = "model." if training else ""
        graph = _count_in_floats(Converter(exported, prefix, mode, subject, stored, read_stored).convert())
        # Before the graph is compared with the model, so that the comparison covers it.
        graph = with_linear_products(with_experts(_without_idle_gradients(graph)))
        graph = with_quantised_linear(graph)
        if step is not None and isinstance(subject, WithLoss):
            compared = fidelity.check_structure(graph, step, prefix)
            if compare and fidelity.can_compare(graph, model):
                compared = fidelity.check_numbers(run_as_it_trains(subject), args, kwargs, graph, model)
            notes += [*subject.notes, *compared]
    check_memory(model, graph)
    # Precision comes last: its casts inherit whether their operand has a gradient.
    graph = with_compute_dtype(graph, dtype)
    # Last, because anything that computes in another precision has its own constants.
    graph = replace(
        graph, notes=(*graph.notes, *dict.fromkeys(notes)), kept_constants=kept_constants(graph.constants)
    )
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    returned = subject.returned if isinstance(subject, WithLoss) else None
    return Capture(graph, model, in_spec, exported.call_spec.out_spec, returned, tuple(leaves))


def _separate_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clone tensors that are passed twice, because export would merge them into one input."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    first: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), place) != place:
            leaves[place] = leaf.clone()
    return pytree.tree_unflatten(leaves, spec)
