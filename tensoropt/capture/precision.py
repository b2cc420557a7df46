"""Mixed precision as a pass over the graph: which operators compute in bfloat16, and the casts between them.

Parameters, their gradients and the optimizer's state stay float32 (master weights). Operators declare their
precision (:class:`tensoropt.ops.calls.Precision`), after PyTorch's autocast (docs, "Autocast Op Reference")
and Micikevicius et al., Mixed Precision Training (ICLR 2018, section 3.1): bfloat16 (products, convolutions,
attention, lookups, norms that are one kernel) or float32 (losses, softmax, powers, sums). Other operators
compute in the widest dtype of those inputs and activations that depend on a parameter or on a floating-point
input. ``torch.autocast`` is not used, because it lacks the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isinf
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.capture.numbering import reading
from tensoropt.errors import CaptureError
from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor, TorchLiteral, map_refs
from tensoropt.ops.calls import LocalCall, Precision
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.registry import bind, precision_of

_COMPUTE_DTYPES = ("float32", "bfloat16")
_WIDE, _NARROW = "float32", "bfloat16"


def with_compute_dtype(graph: OperatorGraph, dtype: str) -> OperatorGraph:
    """Return the graph computing in ``dtype``, with float32 master weights; ``float32`` leaves it unchanged.

    Raises:
        CaptureError: ``dtype`` is neither float32 nor bfloat16.
    """
    if dtype not in _COMPUTE_DTYPES:
        raise CaptureError(f"unknown dtype '{dtype}'; use {' or '.join(_COMPUTE_DTYPES)}")
    return graph if dtype == _WIDE else _Policy(graph).apply()


class _Policy:
    """A pass that decides in which dtype each operator reads its operands, and then inserts the casts.

    Attributes:
        now: dtype of each tensor in the new graph, by name.
        carries: names of tensors that depend on a parameter or a floating-point input. No other operand makes
            an operator compute in float32.
        read_as: dtype of each floating-point operand, by operator and tensor.
        kept: targets of operators that stay in float32 because they have no bfloat16 kernel.
    """

    def __init__(self, graph: OperatorGraph):
        self.graph = graph
        self.now = {name: t.dtype for name, t in graph.tensors.items()}
        # Parameters are not among them: they follow the tensors that they are used with, and are cast
        # accordingly.
        self.carries = {n for n in graph.inputs if graph.tensors[n].dtype == _WIDE}
        self.read_as: dict[str, dict[str, str]] = {}
        self.results: dict[object, tuple[str, ...] | None] = {}
        self.kept: dict[str, None] = {}
        self.tensors: dict[str, Tensor] = dict(graph.tensors)
        self.operators: list[Operator] = []
        self.constants: dict[str, Any] = dict(graph.constants)
        self.casts: dict[tuple[str, str], str] = {}

    def apply(self) -> OperatorGraph:
        for op in self.graph.operators:
            self._decide(op)
        # After all decisions: how a parameter is seen depends on all of its readers.
        self._parameters()
        for op in self.graph.operators:
            self._write(op)
        mutations = {
            buffer: self._cast(value, self.graph.tensors[buffer].dtype)
            for buffer, value in self.graph.mutations.items()
        }
        outputs = list(self.graph.outputs)
        if self.graph.training:
            # A loss is reported, scaled and summed over micro-batches in float32.
            outputs[0] = self._cast(outputs[0], _WIDE)
        read = {n for op in self.operators for n in op.inputs()} | {*outputs, *mutations, *mutations.values()}
        # If all readers of a constant want it narrow, the wide one is left over.
        unread = [n for n, t in self.tensors.items() if t.kind == "constant" and n not in read]
        for name in unread:
            del self.tensors[name]
            self.constants.pop(name, None)
        notes = self.graph.notes
        if self.kept:
            notes = (*notes, f"operators without a bfloat16 kernel stay in float32: {', '.join(self.kept)}")
        return replace(
            self.graph,
            tensors=self.tensors,
            operators=tuple(self.operators),
            outputs=tuple(outputs),
            mutations=mutations,
            constants=self.constants,
            notes=notes,
            compute_dtype=_NARROW,
        )

    # -- deciding ---------------------------------------------------------------------------------

    def _decide(self, op: Operator) -> None:
        tensors = self.graph.tensors
        floats = [n for n in dict.fromkeys(op.inputs()) if tensors[n].dtype == _WIDE]
        # Integers and masks keep their type.
        if not floats:
            return
        dtypes = self._wanted(op, floats)
        made = self._made(op, dtypes)
        if made is None:
            # A dict used as an ordered set, for the note.
            self.kept.setdefault(op.target)
            dtypes = dict.fromkeys(floats, _WIDE)
            made = tuple(tensors[n].dtype for n in op.outputs)
        self.read_as[op.name] = dtypes
        self.now.update(zip(op.outputs, made, strict=True))
        if any(n in self.carries or tensors[n].kind == "parameter" for n in floats):
            self.carries.update(n for n in op.outputs if self.now[n] in (_WIDE, _NARROW))

    def _wanted(self, op: Operator, floats: list[str]) -> dict[str, str]:
        tensors, precision = self.graph.tensors, precision_of(op.target)
        if precision is Precision.NARROW_INPUT:
            # The input of a batch norm; its weights and statistics follow it.
            first = op.inputs()[0]
            return {n: _NARROW if n == first else _WIDE for n in floats}
        if precision is Precision.NARROW:
            return dict.fromkeys(floats, _NARROW)
        if precision is Precision.WIDE:
            return dict.fromkeys(floats, _WIDE)
        carrying = [self.now[n] for n in floats if n in self.carries]
        parameters = any(tensors[n].kind == "parameter" for n in floats)
        # An operator on parameters alone (weight arithmetic) computes narrow; one on constants alone stays
        # wide.
        narrow = _WIDE not in carrying if carrying else parameters
        return dict.fromkeys(floats, _NARROW if narrow else _WIDE)

    def _made(self, op: Operator, dtypes: Mapping[str, str]) -> tuple[str, ...] | None:
        """Return the dtypes of a call's results for operands of the given ``dtypes``, by running the call on
        the meta device; None if the call fails."""
        read = [(n, self.graph.tensors[n].shape, dtypes.get(n, self.now[n])) for n in op.inputs()]
        place = {name: f"t{i}" for i, name in enumerate(dict.fromkeys(op.inputs()))}
        args = map_refs((op.args, tuple(op.kwargs.items())), lambda n: Ref(place[n]))
        key = (op.target, repr(args), tuple((place[n], shape, dtype) for n, shape, dtype in read))
        if key not in self.results:
            self.results[key] = _dtypes(op, {n: (shape, dtype) for n, shape, dtype in read})
        return self.results[key]

    def _parameters(self) -> None:
        """Store in bfloat16 each parameter that all operators read in bfloat16 and that is no output; those
        trained have float32 masters."""
        wants: dict[str, set[str]] = {}
        for operands in self.read_as.values():
            for name, dtype in operands.items():
                wants.setdefault(name, set()).add(dtype)
        for tensor in self.graph.parameters:
            if wants.get(tensor.name) == {_NARROW} and tensor.name not in self.graph.outputs:
                # Without a backward pass the wide values are not needed.
                master = _WIDE if self.graph.training and tensor.requires_grad else None
                self.tensors[tensor.name] = replace(tensor, dtype=_NARROW, master_dtype=master)
                self.now[tensor.name] = _NARROW

    # -- writing ----------------------------------------------------------------------------------

    def _write(self, op: Operator) -> None:
        dtypes = self.read_as.get(op.name, {})
        names = {n: self._cast(n, dtype, op) for n, dtype in dtypes.items()}
        op = reading(op, names)
        if any(self.now[n] == _NARROW for n in op.outputs):
            op = replace(op, args=_representable(op.args), kwargs=_representable(op.kwargs))
        for name in op.outputs:
            self.tensors[name] = replace(self.tensors[name], dtype=self.now[name])
        self.operators.append(op)

    def _cast(self, name: str, dtype: str, reader: Operator | None = None) -> str:
        """Return the name of the tensor in ``dtype``: the tensor itself, a cast constant, or the result of a
        cast that all readers share.
        """
        tensor = self.tensors[name]
        if tensor.dtype == dtype:
            return name
        if (name, dtype) not in self.casts:
            made = f"{name}_{dtype}"
            # A graph may already have a tensor of that name, for example after an import.
            while made in self.tensors:
                made += "_"
            self.casts[name, dtype] = made
            if tensor.kind == "constant":
                self.tensors[made] = replace(tensor, name=made, dtype=dtype)
                if name in self.constants:  # a saved graph has no values
                    self.constants[made] = _narrowed(self.constants[name], dtype)
            else:
                source = name
                if dtype == _NARROW and tensor.kind != "parameter" and name not in self.carries:
                    limit = torch.finfo(torch.bfloat16).max  # a mask, perhaps of float32's least number
                    source = f"{made}_range"
                    self._insert(source, "aten.clamp.default", (Ref(name), -limit, limit), {}, tensor, reader)
                literal = {"dtype": TorchLiteral(dtype)}
                cast = replace(tensor, dtype=dtype)
                self._insert(made, "aten._to_copy.default", (Ref(source),), literal, cast, reader)
        return self.casts[name, dtype]

    def _insert(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        like: Tensor,
        reader: Operator | None,
    ) -> None:
        self.tensors[name] = Tensor(name, like.shape, like.dtype, "activation", like.requires_grad)
        where = (reader.module, reader.source) if reader else ("", "")
        self.operators.append(Operator(name, target, args, kwargs, (name,), *where))


def _dtypes(op: Operator, operands: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[str, ...] | None:
    call = LocalCall(op.target, _representable(op.args), op.kwargs, op.name)
    function = bind(call, SingleDevice())

    def tensor(name: str) -> torch.Tensor:
        shape, dtype = operands[name]
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    try:
        with torch.no_grad():
            args, kwargs = call.arguments(tensor)
            results = function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    values = [results] if isinstance(results, torch.Tensor) else results
    values = [v for v in values if isinstance(v, torch.Tensor)][: len(op.outputs)]
    if len(values) < len(op.outputs):
        return None
    return tuple(str(v.dtype).removeprefix("torch.") for v in values)


def _representable(value: Any) -> Any:
    """Return an argument with finite numbers clamped to bfloat16's range, such as the fill of a mask."""
    limit = torch.finfo(torch.bfloat16).max
    return pytree.tree_map_only(float, lambda v: v if isinf(v) else min(max(v, -limit), limit), value)


def _narrowed(value: Any, dtype: str) -> Any:
    """Return a constant in a narrower dtype. Finite values stay finite, because a row of -inf would become
    NaN in softmax.
    """
    target = getattr(torch, dtype)
    limit = torch.finfo(target).max
    finite = value.clamp(-limit, limit).to(target)
    return torch.where(value.isinf(), value.to(target), finite)
