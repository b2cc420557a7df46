"""A table of operations in models that cannot be captured or trained, each with what to do instead.

An operation is recognised by PyTorch's error, or by the model's call if PyTorch raises no error. The message
names the model's own line. Other faults are found by comparing the graph with the model.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.eager_transforms
import torch._higher_order_ops.utils

from tensoropt.capture.lines import asking_frame, calling_frame, frames_of, quoted_line, raised_by_model
from tensoropt.errors import CaptureError


@dataclass(frozen=True)
class Unsupported:
    """One row of the table.

    Attributes:
        what: what the model does, as the end of a sentence "the model ...".
        remedy: what to do instead.
    """

    what: str
    remedy: str

    def refused(self, model: str, line: str, said: str = "") -> CaptureError:
        """Return the error for a ``line`` of the model called ``model``; ``said`` is PyTorch's message."""
        where, words = f" at {line}" if line else "", f" (PyTorch: {said})" if said else ""
        return CaptureError(f"{model}{where} {self.what}, which is not supported; {self.remedy}{words}")


VALUE = Unsupported(
    "takes a branch, a number or a shape from the value of a tensor",
    "keep shapes fixed: use torch.where or a mask instead of `if`, boolean indexing, nonzero and unique; "
    "leave out .item(), .tolist() and .numpy() (torch.stack makes one tensor of others); give sizes "
    "(num_classes=, output_size=). Of PyTorch's own layers an adaptive softmax does this (use "
    "cross_entropy), and a batch norm with momentum=None (use momentum=0.1)",
)
SPARSE_GRADIENT = Unsupported(
    "gives an embedding a sparse gradient", "pass sparse=False, because only dense gradients are reduced"
)
_KINDS = {
    "a sparse tensor": "keep it dense (`.to_dense()`), or write the product with index_select and index_add",
    "a nested tensor": "pad the sequences to one length and mask what is beyond their ends",
    "a quantized tensor": "compute in floating point (`.dequantize()`); "
    "torch.fake_quantize_per_tensor_affine rounds values and has a gradient",
}
_GRADIENT = Unsupported(
    "computes a gradient inside forward",
    "a step has one backward pass, and a plan computes no second derivatives, not even for a gradient "
    "penalty outside of the model; write the penalty by finite differences (of the outputs for x and for x "
    "plus a small step, both in forward), use spectral_norm in its place, or train this model unsplit",
)
_MADE = Unsupported(
    "makes a parameter in forward, where no optimizer sees it",
    "make it in __init__ (a layer's parameters too)",
)
_FREEZES = Unsupported(
    "freezes or unfreezes a parameter in forward",
    "set requires_grad before, outside of the model; inside, detach() or torch.no_grad() stops the "
    "gradient of a single use",
)
_PACKED = Unsupported(
    "packs sequences of several lengths (packed sequences)",
    "run the layer on the padded batch and mask the loss beyond each sequence's end",
)
_CALLS = {
    "_pack_padded_sequence": _PACKED,
    **dict.fromkeys(
        ("quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel"),
        Unsupported("makes a quantized tensor", _KINDS["a quantized tensor"]),
    ),
    "ctc_loss": Unsupported(
        "computes a CTC loss",
        "explore with another loss over the same scores (cross_entropy costs about the same)",
    ),
}
OBJECT = Unsupported(
    "returns, or is passed, an object of its own class",
    "use tensors, tuples or dicts, or call torch.export.register_dataclass on the class first",
)
_TAKE_FUNCTIONS = frozenset(
    {"cond", "scan", "associative_scan", "while_loop", "map", "map_impl", "flex_attention"}
)


def higher_order(name: str) -> Unsupported:
    """Return the table's row for an operator that takes functions as arguments."""
    return Unsupported(
        f"uses {name if name in _TAKE_FUNCTIONS else 'an operator'}, which takes functions",
        "write what it computes in plain calls: torch.where for a branch, a Python loop (which is unrolled) "
        "over steps, the whole batch (or torch.vmap) for a map, scaled_dot_product_attention with a mask "
        "for flex_attention",
    )


_OF_FILES = (
    (r"torch/_higher_order_ops/(\w+)\.py$", None),
    (r"torch/nn/attention/(flex_attention)\.py$", None),
    (r"torch/nn/utils/rnn\.py$", _PACKED),
    (r"torch/nested/", Unsupported("makes a nested tensor", _KINDS["a nested tensor"])),
    (r"torch/(_functorch/eager_transforms|autograd/functional)\.py$", _GRADIENT),
)
"""Pairs (pattern of a PyTorch file in an error's traceback, row). The row is None for files of operators that
take functions (:func:`higher_order`). The innermost file that matches decides."""
_OF_MESSAGES = (
    (r"FlexAttention", higher_order("flex_attention")),
    (
        r"process group|group cannot be None|torch\.distributed|c10d",
        Unsupported(
            "communicates with other processes", "leave that out: the plan decides how ranks communicate"
        ),
    ),
    (
        r"CUDA|cuda devices|NVIDIA driver|cuda:\d",
        Unsupported(
            "puts a tensor on a GPU by name",
            "make it where the inputs are (`device=x.device`, `.to(x.device)`)",
        ),
    ),
    (r"Unsupported input type|not a known type|register a pytree|register_pytree_node", OBJECT),
    (
        r"derivative for \S+ is not implemented|no autograd formula|is not differentiable|"
        r"does not support automatic differentiation",
        Unsupported(
            "calls an operator that has no backward",
            "give it one (torch.library.register_autograd), call it under torch.no_grad, or write it "
            "otherwise",
        ),
    ),
    (r"TensorWrapper|fake tensor in the exported program constant", _GRADIENT),
    (r"[Dd]ata-dependent|DataDependent|unbacked|data is not allocated yet", VALUE),
)


def of_error(error: BaseException) -> Unsupported | None:
    """Return the table's row that explains an error of PyTorch; None if there is none, or if the model's own
    code raised the error, whose message then says nothing about PyTorch."""
    if raised_by_model(error) is not None:
        return None
    for frame in frames_of(error):
        for pattern, kind in _OF_FILES:
            match = re.search(pattern, frame.f_code.co_filename)
            # Operators that take functions are recognised only by their own files, because every replay of a
            # graph passes through the other files of that folder.
            if match and (kind is not None or match[1] in _TAKE_FUNCTIONS):
                return kind if kind is not None else higher_order(match[1])
    text = f"{type(error).__name__} {error}"
    return next((kind for pattern, kind in _OF_MESSAGES if re.search(pattern, text)), None)


def kind_of_tensor(value: torch.Tensor) -> tuple[str, str] | None:
    """Return (kind, remedy) of a tensor that no plan supports (sparse, nested, quantized), else None."""
    kind = ""
    if value.is_nested:
        kind = "a nested tensor"
    elif value.is_quantized or value.dtype in _QUANTISED:
        kind = "a quantized tensor"
    elif value.layout != torch.strided:
        kind = "a sparse tensor"
    return (kind, _KINDS[kind]) if kind else None


_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


# -- where PyTorch raises nothing --------------------------------------------------------------------


def refuse_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise :class:`CaptureError` if a PyTorch call, by its name and arguments, is not supported."""
    kind = _CALLS.get(name)
    if name in ("requires_grad_", "__set__") and isinstance(args[0], torch.nn.Parameter):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if isinstance(wanted, bool) and wanted != args[0].requires_grad:
            kind = _FREEZES
    if kind is not None:
        _refuse_at_the_call(kind)


def _refuse_at_the_call(kind: Unsupported) -> None:
    """Raise a row's error for the model's line that makes the current call, if a line of the model does."""
    frame = None if getattr(_own, "calls", False) else calling_frame()
    if frame is not None:
        raise kind.refused("the model", quoted_line(frame))


_own = threading.local()


@contextlib.contextmanager
def own_calls() -> Iterator[None]:
    """While open, refuse no calls, because the capture itself makes them."""
    before, _own.calls = getattr(_own, "calls", False), True
    try:
        yield
    finally:
        _own.calls = before


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """While open, refuse calls that function modes do not see: gradients inside forward, new parameters, and
    operators that take functions."""
    registered = torch.nn.Module.register_parameter
    helpers = torch._higher_order_ops.utils
    run = helpers._hop_compile_and_call

    @functools.wraps(registered)
    def register(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> Any:
        # `self.weight /= n` only assigns again what it changed in place.
        if module._parameters.get(name) is not param or param is None:
            _refuse_at_the_call(_MADE)
        return registered(module, name, param)

    @functools.wraps(run)
    def run_plain(*args: Any, **kwargs: Any) -> Any:
        frame = asking_frame(__file__, str(helpers.__file__))
        name = Path(frame.f_code.co_filename).stem if frame is not None else ""
        if name != "associative_scan":  # which is traced as plain calls
            _refuse_at_the_call(higher_order(name))
        return run(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for place, name in _DIFFERENTIATE:
            stack.enter_context(mock.patch.object(place, name, _no_gradient(getattr(place, name))))
        stack.enter_context(mock.patch.object(torch.nn.Module, "register_parameter", register))
        stack.enter_context(mock.patch.object(helpers, "_hop_compile_and_call", run_plain))
        yield


def _no_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_at_the_call(_GRADIENT)
        return function(*args, **kwargs)

    return checked


_DIFFERENTIATE: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "_engine_run_backward"),
    (torch._functorch.eager_transforms, "grad_increment_nesting"),
    (torch._functorch.eager_transforms, "enter_jvp_nesting"),
)
