"""Loading an ONNX model, from a file or from memory, as a module with example inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import fx

from tensoropt.capture.lines import shown_error
from tensoropt.capture.onnx import ops as _converters  # noqa: F401 - registers them
from tensoropt.capture.onnx.importer import Importer
from tensoropt.capture.onnx.reader import checked, newer, read_model
from tensoropt.capture.onnx.signature import Input, bind_inputs, with_loss
from tensoropt.capture.onnx.values import OnnxError, OnnxValue, Traced


@dataclass(frozen=True)
class ImportedModel:
    """An imported file as a PyTorch module.

    Attributes:
        module: module that takes the file's inputs in order and returns its output, or a tuple of outputs.
            Weights are parameters and other constants buffers, under the file's names if Python allows.
        inputs: the module's inputs, with all sizes bound.
        outputs: names of the returned tensors in the file.
        notes: notes for the user on the added loss and on batch norms with running statistics.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]

    def example(self, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Return random inputs that the model accepts: indices are within the table that they index."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(i.example(generator, device) for i in self.inputs)


def load_onnx(
    path: str | os.PathLike[str],
    dims: Mapping[str, int] | None = None,
    *,
    outputs: Sequence[str] = (),
    loss: str | None = None,
    device: str = "cpu",
) -> fx.GraphModule:
    """Import an ONNX file by :func:`import_onnx`, and return only the PyTorch module."""
    return import_onnx(path, dims, outputs=outputs, loss=loss, device=device).module


def import_onnx(
    source: str | os.PathLike[str] | onnx.ModelProto,
    dims: Mapping[str, int] | None = None,
    *,
    outputs: Sequence[str] = (),
    loss: str | None = None,
    device: str = "cpu",
) -> ImportedModel:
    """Import an ONNX file as an ``fx.GraphModule`` of PyTorch calls.

    Args:
        source: a file, whose external data is read only from its folder, or a model in memory.
        dims: sizes of dims that the file leaves open, by name (``batch``) or as ``input[position]``, which
            also replaces a fixed size.
        outputs: names of tensors to return instead of the file's outputs; other nodes are left out.
        loss: ``auto`` or a name in :data:`~tensoropt.capture.onnx.signature.LOSSES` makes the module return a
            scalar loss; None makes it return the outputs.
        device: device of the module's tensors; on ``meta`` only the shapes of large weights are read.

    Raises:
        OnnxError: the file is malformed or hostile, a dim has no size, operators are unsupported (all are
            listed), or shapes depend on an input's values.
    """
    name = "the model" if isinstance(source, onnx.ModelProto) else str(source)
    try:
        return _import(source, dict(dims or {}), outputs, loss, device)
    except OnnxError as error:
        text = str(error)
        named = text.startswith(("there is no file", name))
        raise type(error)(text if named else f"{name}: {text}") from None
    except Exception as error:  # a file may hold anything anywhere
        said = shown_error(error)[:300]
        raise OnnxError(f"{name} is malformed ({type(error).__name__}: {said})") from error


def _import(
    source: Any, dims: dict[str, int], outputs: Sequence[str], loss: str | None, device: str
) -> ImportedModel:
    folder = None
    if isinstance(source, onnx.ModelProto):
        model = source
    else:
        path = Path(source)
        model, folder = read_model(path), path.parent
    model = checked(model)
    output_names = list(outputs) or [o.name for o in model.graph.output]
    if not output_names:
        raise OnnxError("it has no outputs")
    model = newer(model, output_names)
    graph = model.graph
    inputs, batch = bind_inputs(graph, dims)
    names = [i.name for i in inputs]
    if len(set(names)) != len(names):
        raise OnnxError("it has two inputs with the same name")
    importer = Importer(model, folder, device, batch)
    values: dict[str, Traced] = {i.name: importer.builder.input(i.name, i.shape, i.dtype) for i in inputs}
    results = importer.convert(values, output_names)
    # After the pass, which determines the tables that an input indexes.
    inputs = [replace(i, below=importer.builder.bounds.get(values[i.name].node)) for i in inputs]
    notes = list(importer.notes)
    frozen = sum(n.op_type == "BatchNormalization" for n in graph.node)
    if loss is not None and frozen:
        notes.append(f"{frozen} batch norms use running statistics, as the file does not set training_mode=1")
    if loss is not None:
        results, added, note = with_loss(importer.builder, loss, results, output_names)
        inputs += added
        notes.append(note)
        output_names = ["loss"]
    return ImportedModel(_module(importer, results), tuple(inputs), tuple(output_names), tuple(notes))


def _module(importer: Importer, results: Sequence[OnnxValue]) -> fx.GraphModule:
    builder = importer.builder
    nodes = tuple(builder.node(value) for value in results)
    builder.graph.output(nodes[0] if len(nodes) == 1 else nodes)
    builder.graph.eliminate_dead_code()
    builder.graph.lint()
    name = "".join(c for c in importer.model.graph.name.title() if c.isalnum())
    return fx.GraphModule(builder.root, builder.graph, class_name=f"Onnx{name}"[:60])
