"""The table of things in a model that cannot be captured or trained, each with what to do instead.

Most of them are recognised where the model's code does them, so that the refusal names the model's own line;
others in a traced graph or in one of PyTorch's own errors.

Operators are named after the computation and nothing else: ``torch.export`` numbers its nodes differently on
each device, and a plan names operators.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import os
import re
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType, TracebackType
from typing import Any
from unittest import mock

import torch
import torch._functorch.eager_transforms
import torch._higher_order_ops.utils

from tensoropt.errors import CaptureError
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


_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = str(Path(__file__).parents[1] / "zoo") + os.sep
"""The only files of this package that are models; the others on a stack are those that capture."""
_EXPORTING = str(Path(__file__).parent / "exporting.py")
_PYTHON = str(Path(sysconfig.get_path("stdlib"))) + os.sep


def is_ours(filename: str) -> bool:
    """Return whether a source file is this package's, and no model's."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_MODELS)


def is_own(filename: str) -> bool:
    """Return whether a source file may be a model's: not PyTorch's, not ours, and not of Python's standard
    library.
    """
    if filename.startswith(_MODELS):
        return True
    inner = filename.startswith((_TORCH, _PACKAGE, "<"))
    return not inner and (not filename.startswith(_PYTHON) or "site-packages" in filename)


def calling_frame() -> FrameType | None:
    """Return the frame where the model's code currently is; None while an export acts by itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == _EXPORTING:
            return None
        frame = frame.f_back
    return frame


def asking_frame(outside: str = "") -> FrameType | None:
    """Return the innermost frame that calls PyTorch, possibly in PyTorch's own code; it skips function modes,
    each of which passes a call on to the next, and files whose names begin with ``outside``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__"
        or (outside and frame.f_code.co_filename.startswith(outside))
    ):
        frame = frame.f_back
    return frame


def current_line() -> str:
    """Return ``FILE:LINE`` of the model's code that is currently running."""
    frame = calling_frame()
    return "the model" if frame is None else line_of(frame)


def line_of(frame: FrameType) -> str:
    """Return ``FILE:LINE`` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def quoted_line(frame: FrameType) -> str:
    """Return ``FILE:LINE (source)`` of a frame."""
    return _quoted(FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


def first_line(function: Any) -> str:
    """Return ``FILE:LINE`` where the definition of a function, a method or a callable object begins."""
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "func", function)  # for a partial
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "no file" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def shown_error(error: BaseException) -> str:
    """Return the first line of an error's message, or its type name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors it was raised from: PyTorch raises its own errors from others."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield all frames that an error and its causes passed through, innermost first."""
    for cause in causes(error):
        passed = []
        trace: TracebackType | None = cause.__traceback__
        while trace is not None:
            passed.append(trace)
            trace = trace.tb_next
        yield from (trace.tb_frame for trace in reversed(passed))


def raised_by_model(error: BaseException) -> BaseException | None:
    """Return the error, or the one behind it, that a ``raise`` or ``assert`` in the model's own code made."""
    for cause in causes(error):
        trace: TracebackType | None = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or not is_own(trace.tb_frame.f_code.co_filename):
            continue
        # An own line may also call what raises in C++, which is PyTorch's refusal.
        if dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS":
            return cause
    return None


def failing_line(error: BaseException) -> str:
    """Return ``FILE:LINE (source)`` of the innermost line of an error that belongs to the model, or
    nothing.
    """
    for cause in causes(error):
        trace: TracebackType | None = cause.__traceback__
        summary: FrameSummary | None = None
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_own(code.co_filename):
                summary = FrameSummary(code.co_filename, trace.tb_lineno, code.co_name)
            trace = trace.tb_next
        if summary is not None:
            return _quoted(summary)
    return next((line for cause in causes(error) if (line := _named_line(str(cause)))), "")


_TRACE_LINE = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)


def _named_line(text: str) -> str:
    matches = [match for match in _TRACE_LINE.finditer(text) if is_own(match["file"])]
    if not matches:
        return ""
    return _quoted(FrameSummary(matches[-1]["file"], int(matches[-1]["line"]), matches[-1]["name"]))


def node_line(node: torch.fx.Node) -> str:
    """Return ``FILE:LINE (source)`` of the line that made a traced node, or nothing."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    places = [(i, line.strip()) for i, line in enumerate(trace) if line.strip().startswith("File ")]
    if not places:
        return ""
    index, place = places[-1]
    parts = place.split(", ")
    source = trace[index + 1].strip() if index + 1 < len(trace) else ""
    filename = ", ".join(parts[:-2]).removeprefix('File "').removesuffix('"')
    return f"{filename}:{parts[-2].removeprefix('line ')}" + (f" ({source})" if source else "")


@contextlib.contextmanager
def own_lines_kept() -> Iterator[None]:
    """While open, traced nodes keep the model's innermost line, including that of a helper; PyTorch keeps
    only those of functions called ``forward``."""

    def own(self: object, frames: StackSummary) -> StackSummary:
        return StackSummary.from_list([frame for frame in frames if is_own(frame.filename)][-1:])

    with mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", own):
        yield


def _quoted(frame: FrameSummary) -> str:
    line = (frame.line or "").strip()
    return f"{frame.filename}:{frame.lineno}" + (f" ({line})" if line else "")


@dataclass(frozen=True)
class _Unsupported:
    """One kind of unsupported behaviour.

    Attributes:
        what: what the model does, as the end of "the model ...".
        remedy: what to do instead.
    """

    what: str
    remedy: str

    def refused(self, model: str, line: str, of: str = "", said: str = "") -> CaptureError:
        """Return the error to raise; ``line`` is the model's own, ``of`` the part of the model that is
        meant, ``said`` what PyTorch said.
        """
        where = f" at {line}" if line else ""
        part = f" (in `{of}`)" if of else ""
        words = f" (PyTorch: {said})" if said else ""
        return CaptureError(f"{model}{where} {self.what}{part}, which is not supported; {self.remedy}{words}")


_FIXED = "keep shapes fixed: use torch.where or a mask instead"

_SPARSE_GRADIENT = _Unsupported(
    "gives an embedding a sparse gradient", "pass sparse=False: gradients are summed and sent as they are"
)
_SPARSE = _Unsupported(
    "makes a sparse tensor",
    "keep it dense (`.to_dense()`), or write the product with index_select and index_add",
)
_NESTED = _Unsupported(
    "makes a nested tensor", "pad the sequences to one length and mask what is beyond their ends"
)
QUANTISED = _Unsupported(
    "makes a quantized tensor",
    "train in floating point; torch.fake_quantize_per_tensor_affine rounds values and has a gradient",
)
_PACKED = _Unsupported(
    "packs sequences of several lengths (packed sequences)",
    "run the layer on the padded batch and mask the loss beyond each sequence's end",
)
_CTC = _Unsupported(
    "computes a CTC loss",
    "explore with another loss over the same scores (cross_entropy costs about the same)",
)
_GRADIENT = _Unsupported(
    "computes a gradient inside forward",
    "a step has one backward pass, and a plan no second derivative, so that a gradient penalty cannot be "
    "added outside of a parallelized model either; write it by finite differences (what the layers give for "
    "x and for x plus a small step, both in forward), use spectral_norm in its place, or train this model "
    "unsplit",
)
_ADAPTIVE = _Unsupported(
    "computes an adaptive softmax, whose shapes depend on the targets",
    "use nn.Linear and cross_entropy over the whole vocabulary",
)
_CUMULATIVE = _Unsupported(
    "averages a norm's statistics over all steps (momentum=None)",
    "give the layer a number: momentum=0.1 is the default",
)
_NUMPY = _Unsupported(
    "turns a tensor into numpy or a list", "stay in PyTorch inside forward: numpy is not traced"
)
_VALUE = _Unsupported(
    "branches on, or takes a size from, the value of a tensor",
    "use torch.where or a mask instead of `if` and boolean indexing, leave out .item() and .tolist()",
)
_SHAPE = _Unsupported(
    "makes a tensor whose shape depends on values", f"{_FIXED} of boolean indexing and nonzero"
)
NUMBER = _Unsupported(
    "makes a number of a tensor's value",
    "leave .item(), int() and float() out of forward: a tensor of no dims computes the same",
)
_CLASSES = _Unsupported("asks one_hot for as many classes as there are", "pass num_classes=")
_COUNTED = _Unsupported(
    "counts values by bincount, whose length depends on them", "sum one_hot(x, num_classes=N) over its rows"
)
_REPEATED = _Unsupported(
    "repeats rows as often as a tensor says", f"{_FIXED}, or pass output_size= where the total is known"
)
_GENERATOR = _Unsupported(
    "draws random numbers from a torch.Generator of its own",
    "draw without generator=: a plan has its own seed, and its ranks draw the numbers that one process would",
)
_MADE = _Unsupported(
    "makes a parameter in forward, where no optimizer sees it",
    "make it in __init__ (a layer's parameters too)",
)
_FREEZES = _Unsupported(
    "freezes or unfreezes a parameter in forward",
    "set requires_grad before, outside of the model; inside, detach() or torch.no_grad() keeps a gradient "
    "from one use of it",
)

_NO_BACKWARD = _Unsupported(
    "calls an operator that has no backward",
    "give it one (torch.library.register_autograd), call it under torch.no_grad, or write it otherwise",
)

_DISTRIBUTED = _Unsupported(
    "communicates with other processes", "leave that out: the search decides how to spread the model"
)
CUDA = _Unsupported(
    "puts a tensor on a GPU by name", "make it where the inputs are (`device=x.device`, `.to(x.device)`)"
)
_STACKED = _Unsupported(
    "makes a tensor of the values of others", "torch.stack makes one of tensors, and keeps their gradients"
)
OBJECT = _Unsupported(
    "returns, or is passed, an object of its own class",
    "use tensors, tuples or dicts, or call torch.export.register_dataclass on the class first",
)

_TAKE_FUNCTIONS = frozenset(
    {"cond", "scan", "associative_scan", "while_loop", "map", "map_impl", "flex_attention"}
)


def higher_order(name: str) -> _Unsupported:
    """Return the unsupported behaviour that leaves an operator which takes functions in a model's graph."""
    return _Unsupported(
        f"uses {name if name in _TAKE_FUNCTIONS else 'an operator'}, which takes functions",
        "write what it computes in plain calls: torch.where for a branch, a Python loop (which is unrolled) "
        "over steps, the whole batch (or torch.vmap) for a map, scaled_dot_product_attention with a mask "
        "for flex_attention",
    )


_OF_FILES = (
    (r"torch/_higher_order_ops/(\w+)\.py$", None),
    (r"torch/nn/attention/(flex_attention)\.py$", None),
    (r"torch/nn/modules/adaptive\.py$", _ADAPTIVE),
    (r"torch/nn/modules/batchnorm\.py$", _CUMULATIVE),
    (r"torch/nn/utils/rnn\.py$", _PACKED),
    (r"torch/nested/", _NESTED),
    (r"torch/_functorch/eager_transforms\.py$", _GRADIENT),
    (r"torch/autograd/functional\.py$", _GRADIENT),
)
"""PyTorch files in an error's traceback, mapped to the model's action; the innermost match decides."""
_OF_MESSAGES = (
    (r"FlexAttention", higher_order("flex_attention")),
    (r"process group|group cannot be None|torch\.distributed|c10d", _DISTRIBUTED),
    (r"CUDA|cuda devices|NVIDIA driver|cuda:\d", CUDA),
    (r"data is not allocated yet", _STACKED),
    (r"Unsupported input type|not a known type|register a pytree|register_pytree_node", OBJECT),
    (
        r"derivative for \S+ is not implemented|no autograd formula|is not differentiable|"
        r"does not support automatic differentiation",
        _NO_BACKWARD,
    ),
    (r"TensorWrapper|fake tensor in the exported program constant", _GRADIENT),
    (r"[Dd]ata-dependent|DataDependent|unbacked", _VALUE),
)


def of_error(error: BaseException) -> _Unsupported | None:
    """Return the unsupported behaviour that made PyTorch raise this error; None if it is not known, or if the
    model's own code raises it, whose words say nothing of what PyTorch cannot do."""
    if raised_by_model(error) is not None:
        return None
    for frame in frames_of(error):
        for pattern, kind in _OF_FILES:
            match = re.search(pattern, frame.f_code.co_filename)
            # Operators that take functions are recognised only by their own files, because every replay of a
            # graph passes through the other files of that folder.
            if kind is _CUMULATIVE and getattr(frame.f_locals.get("self"), "momentum", None) is not None:
                continue
            if match and (kind is not None or match[1] in _TAKE_FUNCTIONS):
                return kind if kind is not None else higher_order(match[1])
    text = f"{type(error).__name__} {error}"
    return next((kind for pattern, kind in _OF_MESSAGES if re.search(pattern, text)), None)


def of_shape(target: str) -> _Unsupported:
    """Return the unsupported behaviour of calling an operator whose result size depends on values."""
    name = target.removeprefix("aten.").partition(".")[0]
    return {"bincount": _COUNTED, "repeat_interleave": _REPEATED}.get(name, _SHAPE)


# -- where the model's code does it -----------------------------------------------------------------


def refuse_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a PyTorch call that can be recognised by its name and arguments.

    Raises:
        CaptureError: with the model's line.
    """
    kind: _Unsupported | None = _OF_CALLS.get(name)
    position = _SPARSE_FLAG.get(name)
    if position is not None and (kwargs.get("sparse") or any(args[position : position + 1])):
        kind = _SPARSE_GRADIENT
    elif name == "one_hot" and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
        kind = _CLASSES
    elif kwargs.get("generator") is not None:
        kind = _GENERATOR
    elif _freezes(name, args, kwargs):
        kind = _FREEZES
    if kind is not None:
        refuse_at_the_call(kind)


def _freezes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes what is trained; one that leaves ``requires_grad`` unchanged does not."""
    if name not in ("requires_grad_", "__set__") or not isinstance(args[0], torch.nn.Parameter):
        return False
    requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    return isinstance(requires_grad, bool) and requires_grad != args[0].requires_grad


_OF_CALLS = {
    "ctc_loss": _CTC,
    "_pack_padded_sequence": _PACKED,
    "numpy": _NUMPY,
    "array": _NUMPY,
    "tolist": _NUMPY,
    "quantize_per_tensor": QUANTISED,
    "quantize_per_tensor_dynamic": QUANTISED,
    "quantize_per_channel": QUANTISED,
    "backward": _GRADIENT,
}
_SPARSE_FLAG = {"embedding": 4, "embedding_bag": 5}
"""Functions that take ``sparse``, mapped to its position among the arguments."""


_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def refuse_result(result: Any) -> None:
    """Refuse the result of a call, if it is a tensor of a kind that no plan can hold."""
    kind = kind_of_tensor(result)
    if kind is not None:
        refuse_at_the_call(kind)


def kind_of_tensor(value: Any) -> _Unsupported | None:
    """Return the reason why a tensor is unsupported; None for ordinary ones."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_nested:
        return _NESTED
    if value.is_quantized or value.dtype in _QUANTISED:
        return QUANTISED
    return _SPARSE if value.layout != torch.strided else None


def refuse_at_the_call(kind: _Unsupported) -> None:
    """Raise the refusal with the current line of the model's code; do nothing if PyTorch itself makes the
    call."""
    frame = None if getattr(_own, "calls", False) else calling_frame()
    if frame is not None:
        raise kind.refused("the model", quoted_line(frame))


_own = threading.local()


@contextlib.contextmanager
def own_calls() -> Iterator[None]:
    """While the context is open nothing is refused, because capture itself calls PyTorch below the model's
    code."""
    before, _own.calls = getattr(_own, "calls", False), True
    try:
        yield
    finally:
        _own.calls = before


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """While the context is open, refuse at the call whatever PyTorch does not show to function modes."""
    with contextlib.ExitStack() as stack:
        for place, name, kind in _PATCHED:
            stack.enter_context(mock.patch.object(place, name, _refused(getattr(place, name), kind)))
        register = torch.nn.Module.register_parameter
        stack.enter_context(
            mock.patch.object(torch.nn.Module, "register_parameter", _refused_if_new(register))
        )
        helpers = torch._higher_order_ops.utils
        run = helpers._hop_compile_and_call
        stack.enter_context(mock.patch.object(helpers, "_hop_compile_and_call", _refused_unless_plain(run)))
        yield


def _refused(function: Callable[..., Any], kind: _Unsupported) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_at_the_call(kind)
        return function(*args, **kwargs)

    return checked


def _refused_if_new(register: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a registration to refuse new parameters: ``self.weight /= n`` only reassigns one that it changed
    in place."""

    @functools.wraps(register)
    def checked(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> Any:
        if module._parameters.get(name) is not param or param is None:
            refuse_at_the_call(_MADE)
        return register(module, name, param)

    return checked


def _refused_unless_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator that takes functions: only the associative scan is traced as plain calls, others are
    refused."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == torch._higher_order_ops.utils.__file__:
            frame = frame.f_back
        name = Path(frame.f_code.co_filename).stem if frame is not None else ""
        if name != "associative_scan":
            refuse_at_the_call(higher_order(name))
        return function(*args, **kwargs)

    return checked


_PATCHED: tuple[tuple[Any, str, _Unsupported], ...] = (
    (torch.autograd, "_engine_run_backward", _GRADIENT),
    (torch._functorch.eager_transforms, "grad_increment_nesting", _GRADIENT),
    (torch._functorch.eager_transforms, "enter_jvp_nesting", _GRADIENT),
)
