"""A check that a captured graph computes the same as its model, by comparing one step of each.

The set of parameters that get a gradient is always compared, in a step of the model on tensors without
values. Loss, gradients and buffers are compared if the model is small and has values. Changes that the
model's code makes to the model are undone. This file also has the reverse conversion: a PyTorch module that
runs an operator graph call by call, also in double precision."""

from __future__ import annotations

import contextlib
import keyword
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tensoropt.capture.lines import shown_error, shown_names
from tensoropt.capture.refusals import refusing_hooks
from tensoropt.capture.steps import ROUNDING_FACTOR, Apart, apart, rounding, run_step, seeded, unchanged
from tensoropt.errors import CaptureError
from tensoropt.graph import OperatorGraph, TorchLiteral
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.localise import draws_numbers
from tensoropt.ops.overloads import returns_one_tensor
from tensoropt.ops.registry import bind

_WIDER = dict.fromkeys(("bfloat16", "float16", "float32"), "float64") | {"complex64": "complex128"}


def in_double(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph in double precision: narrower floating-point and complex tensors, constants and dtype
    arguments are widened."""
    return replace(
        graph,
        tensors={
            name: replace(
                tensor,
                dtype=_WIDER.get(tensor.dtype, tensor.dtype),
                master_dtype=tensor.master_dtype and _WIDER[tensor.master_dtype],
            )
            for name, tensor in graph.tensors.items()
        },
        operators=tuple(
            replace(op, args=_argument(op.args), kwargs=_argument(op.kwargs)) for op in graph.operators
        ),
        constants={name: doubled(value) for name, value in graph.constants.items()},
    )


def doubled(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor in double precision if it is narrower, otherwise the tensor itself."""
    wider = {getattr(torch, narrow): getattr(torch, wide) for narrow, wide in _WIDER.items()}
    return value.to(wider.get(value.dtype, value.dtype))


def _argument(value: Any) -> Any:
    return pytree.tree_map_only(TorchLiteral, lambda v: TorchLiteral(_WIDER.get(v.name, v.name)), value)


def register(root: torch.nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Register a tensor in ``root`` under a dotted key, as a parameter if it is an ``nn.Parameter``, else as
    a buffer. Missing submodules along the key are created.
    """
    module = root
    *path, last = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, torch.nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def any_names() -> contextlib.AbstractContextManager[object]:
    """While open, allow module names that contain quotes or newlines or are Python keywords, which PyTorch
    would write into generated code unchanged."""

    def written(base: str, target: str) -> str:
        for name in target.split("."):
            plain = name.isidentifier() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
        return base

    return mock.patch.object(torch.fx.graph, "_format_target", written)


_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})
"""Views that run as reshapes, because the graph omits copies that only make a tensor contiguous."""


class _Rebuilt(nn.Module):
    """A module that runs a graph operator by operator, with a model's own parameters and buffers."""

    def __init__(self, graph: OperatorGraph, model: nn.Module):
        super().__init__()
        self._graph, self._values = graph, dict(graph.constants)
        stored: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
        stored |= dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in graph.tensors.items():
            if tensor.kind == "constant":
                if name not in graph.constants:
                    raise CaptureError(
                        f"the constant {name} has no data (meta device); capture the model with its weights"
                    )
                # Stored narrowed to one element where it does not change.
                self._values[name] = graph.constants[name].expand(tensor.shape)
            elif tensor.kind in ("parameter", "buffer"):
                key = tensor.key or name
                if key not in stored:
                    raise CaptureError(f"the model has no {tensor.kind} called {key}, which its graph needs")
                self._values[name] = stored[key]
                register(self, key, stored[key])
        for further, key in graph.aliases.items():
            register(self, further, self.get_parameter(key))

    def forward(self, *inputs: torch.Tensor) -> Any:
        graph = self._graph
        values = self._values | dict(zip(graph.inputs, inputs, strict=True))
        # Copies: backward may need the old values, and buffers are written before it runs.
        values |= {name: values[name].clone() for name in graph.mutations}
        for op in graph.operators:
            target = "aten.reshape.default" if op.target in _VIEWS else op.target
            call = LocalCall(target, op.args, op.kwargs, op.name)
            args, kwargs = call.arguments(values.__getitem__)
            made = bind(call, SingleDevice())(*args, **kwargs)
            for name in op.outputs:
                single = name == op.name or returns_one_tensor(op.target)
                values[name] = made if single else made[int(name.rpartition(".")[2])]
        for name, new in graph.mutations.items():
            self._values[name].copy_(values[new])
        outputs = tuple(values[name] for name in graph.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def rebuild(graph: OperatorGraph, model: nn.Module) -> nn.Module:
    """Return the captured graph as a separate module with the model's own parameters and buffers.

    The module takes the graph's inputs (the tensors of the flattened call, in order) and returns the graph's
    outputs; in training, that is the scalar loss.

    Raises:
        CaptureError: the model lacks a parameter or buffer, or a constant has no data (meta device).
    """
    return _Rebuilt(graph, model)


def copied(call: Any) -> Any:
    """Return a copy of a call's arguments, because forward may change them in place."""
    return pytree.tree_map_only(
        torch.Tensor, lambda v: v.detach().clone().requires_grad_(v.requires_grad), call
    )


_META = torch.device("meta")


def off_the_cpu(model: nn.Module, call: Any) -> bool:
    """Return whether any tensor of the model, or of an example call (any pytree), is on a device other than
    the CPU; False if any of them is a fake tensor, because fake tensors are captured unchanged."""
    tensors = tensors_of(model, call)
    fake = any(isinstance(t, FakeTensor) for t in tensors)
    return not fake and any(t.device.type != "cpu" for t in tensors)


def tensors_of(model: nn.Module, call: Any) -> list[torch.Tensor]:
    """Return all tensors of a model (parameters and buffers) and of a call (any pytree)."""
    values = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(call))
    return [value for value in values if isinstance(value, torch.Tensor)]


def on_meta(call: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(_META), call)


@contextlib.contextmanager
def shadowed(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Replace a model's tensors with meta tensors while the context is open.

    The model itself is changed, because modules may hold objects that cannot be copied. Tied tensors stay
    tied.

    Args:
        convert: returns the replacement of a tensor; by default a meta tensor of equal shape.

    Yields:
        The original tensors by their name in the model: parameters, buffers and tensors that are plain
        attributes of a module.
    """
    originals: dict[str, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    originals[f"{path}.{name}" if path else name] = value
                    places.append((holder, name, value))
    shadows = {id(value): (convert or _shadow)(value) for _, _, value in places}
    try:
        for holder, name, value in places:
            holder[name] = shadows[id(value)]
        yield originals
    finally:
        for holder, name, value in places:
            holder[name] = value


def _shadow(value: torch.Tensor) -> torch.Tensor:
    shadow = torch.empty_like(value, device=_META, requires_grad=False)
    return nn.Parameter(shadow, value.requires_grad) if isinstance(value, nn.Parameter) else shadow


_MOST_PARAMETERS, _MOST_ACTIVATIONS = 1 << 22, 1 << 24
"""The largest numbers of elements, of a model's parameters and of all results of its operators, for which
values are compared. These assumptions bound a comparison's duration to tenths of a second on one core."""
_LOSS_TOLERANCE, _REST_TOLERANCE = 1e-3, 1e-2
"""Relative differences, of the loss and of gradients and buffers, that are accepted as rounding. A lost
backward gives several per cent or more. Larger differences are compared with the effect of rounding."""
_OVERWRITTEN = "modified by an inplace operation"
"""Part of PyTorch's message about a tensor that backward needs and forward has changed."""


@dataclass(frozen=True)
class EagerStep:
    """The outcome of one forward and backward of the model itself, run on tensors without values.

    Attributes:
        trained: names of the parameters that get a gradient.
        drew: whether numbers were drawn from Python's or numpy's random module.
        problem: the reason why the step could not be run, or "".
    """

    trained: frozenset[str] = frozenset()
    drew: bool = False
    problem: str = ""


def eager_step(subject: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> EagerStep:
    """Run one step of ``subject``, a module that returns its loss, on tensors without values."""
    with unchanged(subject), _without_values(subject, (args, dict(kwargs))) as (call, named):
        parameters = {name: p for name, p in subject.named_parameters() if p.requires_grad}
        with seeded(model=subject) as drew:
            try:
                loss = subject(*call, **named)
                with refusing_hooks():
                    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            except CaptureError:
                raise
            except Exception as error:
                return EagerStep(drew=drew(), problem=shown_error(error))
            trained = (
                name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
            )
            return EagerStep(frozenset(trained), drew())


@contextlib.contextmanager
def _without_values(subject: nn.Module, call: Any) -> Iterator[Any]:
    """While open, a model's tensors have no values; yield the call with tensors that have none either."""
    tensors = tensors_of(subject, call)
    fake = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    if fake is not None:
        with fake:
            yield call
        return
    if any(t.device == _META for t in tensors):
        yield call
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor, static_shapes=True)

    with shadowed(subject, convert), mode:
        yield pytree.tree_map_only(torch.Tensor, convert, call)


def check_structure(graph: OperatorGraph, step: EagerStep, prefix: str) -> tuple[str, ...]:
    """Compare which parameters get a gradient in the graph and in the model itself; return notes for the
    user.

    Args:
        prefix: prefix of names in ``step`` that is removed to get the user's own names.

    Raises:
        CaptureError: a parameter that has a gradient in the module gets none in the graph, the graph's loss
            has no gradient, or the module's own backward fails.
    """
    if not graph.tensors[graph.outputs[0]].requires_grad:
        raise CaptureError(
            "the loss of the captured graph has no gradient, although the model's own has one: torch.export "
            "lost the path from the parameters to the loss; look for values on this path that leave PyTorch "
            "(.data, .numpy(), set_grad_enabled)"
        )
    if _OVERWRITTEN in step.problem:
        raise CaptureError(
            "the model's own backward fails, with or without a plan: a tensor that it needs is changed in "
            "place after the operation that reads it (a buffer that forward writes to, `x += ...`); read a "
            "clone() of it, or write to another tensor"
        )
    if step.problem:
        return (f"the model's own gradients were not compared with the graph's: {step.problem}",)
    own = {graph.aliases.get(key, key) for key in (name.removeprefix(prefix) for name in step.trained)}
    captured = {str(t.key) for t in graph.parameters if t.requires_grad}
    lost, more = (shown_names(sorted(names), 3) for names in (own - captured, captured - own))
    if lost:
        raise CaptureError(
            f"the captured graph loses the gradient of {lost}, which the model itself trains; look for code "
            "between this parameter and the loss that torch.export does not see (values that leave PyTorch, "
            "gradients taken inside forward), or freeze the parameter with requires_grad_(False)"
        )
    if more:
        return (f"the graph trains {more}, which gets no gradient from the model's own backward",)
    return ()


# -- numbers --------------------------------------------------------------------------------------


def can_compare(graph: OperatorGraph, model: nn.Module) -> bool:
    """Return whether the model has values on the CPU, and is small enough for a comparison of values."""
    stored = [*model.parameters(), *model.buffers()]
    if any(t.device.type != "cpu" or isinstance(t, FakeTensor) for t in stored):
        return False
    made = sum(t.elements for t in graph.tensors.values() if t.kind == "activation")
    return sum(t.numel() for t in stored) <= _MOST_PARAMETERS and made <= _MOST_ACTIVATIONS


def check_numbers(
    run: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: OperatorGraph,
    model: nn.Module,
) -> tuple[str, ...]:
    """Compare the graph's loss, gradients and buffers with the module's own; return notes for the user.

    Args:
        run: function of ``args`` and ``kwargs`` that returns the loss of the module's own forward.

    Raises:
        CaptureError: neither rounding nor random numbers explain a difference.
    """
    call = (args, dict(kwargs))
    # The model already issued its warnings when it was captured.
    with warnings.catch_warnings(action="ignore"), unchanged(model, values=True):
        by_name = dict(model.named_parameters(remove_duplicate=False))
        parameters = {str(t.key): by_name[str(t.key)] for t in graph.parameters if t.requires_grad}
        module = rebuild(graph, model)

        def own() -> torch.Tensor:
            copies, named = copied(call)
            with seeded(model=model):
                return run(*copies, **named)

        def captured() -> torch.Tensor:
            leaves = pytree.tree_leaves(copied(call))
            loss: torch.Tensor = module(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
            return loss

        try:
            model_step = run_step(own, parameters, model)
        except Exception as error:  # the model's own error, raised later where its cause is named
            return (f"the model's own step could not be computed for comparison: {shown_error(error)}",)
        if not model_step.finite:
            return ("the graph was not compared with the model, whose own step gives NaN or infinity",)
        found = apart(run_step(captured, parameters, model), model_step)
        if _within(found, _LOSS_TOLERANCE, _REST_TOLERANCE):
            return ()
        if any(draws_numbers(op) for op in graph.operators):
            return ("the graph's gradients were not compared with the model's, as both draw random numbers",)
        allowed = rounding(own, parameters, model, model_step, graph)
    change = max(allowed.gradient.size, allowed.buffer.size)
    loss = max(allowed.loss, _LOSS_TOLERANCE)
    if _within(found, loss, max(change, _REST_TOLERANCE)):
        return (
            f"rounding changes the model's gradients by {change / ROUNDING_FACTOR:.0e}, so the graph's "
            f"gradients were compared with them only to within {change:.0e}",
        )
    differs, size = "loss", found.loss
    if size <= loss:
        of_buffer = found.buffer.size > found.gradient.size
        size, name = found.buffer if of_buffer else found.gradient
        differs = f"value of the buffer {name}" if of_buffer else f"gradient of {name}"
    raise CaptureError(
        f"the captured graph computes another {differs} than the model itself (relative difference "
        f"{size:.0e}), so a plan would train differently; either forward differs from run to run, or it does "
        "something that torch.export does not see: look for state outside of buffers, values that leave "
        "PyTorch, hooks on grad_fn, and gradients taken or changed inside forward"
    )


def _within(found: Apart, loss: float, rest: float) -> bool:
    return found.loss <= loss and max(found.gradient.size, found.buffer.size) <= rest
