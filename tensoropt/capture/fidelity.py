"""Check that a captured graph trains what its model trains, by comparing gradients with the module's own
forward.

The structure is always compared: the module's forward and backward run once on tensors without values, and
every parameter that gets a gradient there must get one in the graph. If a model is small and has values, both
compute loss and gradients once.

After its code has run, a model is restored: attributes, buffers, the contents of lists and dicts.

No GPU is needed: a model that is not on the CPU is captured on the meta device.

An export needs only shapes and types, which the meta device provides for free. Values are read where the
graph keeps some (constants made from what the model stores), and are moved to the CPU for this.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tensoropt.capture.draws import seeded
from tensoropt.capture.lines import shown_error
from tensoropt.capture.rebuild import rebuild
from tensoropt.errors import CaptureError
from tensoropt.graph import OperatorGraph
from tensoropt.ops.localise import draws_numbers


@contextlib.contextmanager
def unchanged(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """While open, record what the code of a model's modules changes in them; restore it at the end.

    Args:
        values: also restore the contents of changed tensors; otherwise tensors are only put back in their
            places.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = {id(v): (v, v.copy()) for fields in attributes for v in fields.values() if _holds_others(v)}
    stored = [*model.parameters(), *model.buffers()] if values else []
    copies = [(tensor, tensor.detach().clone()) for tensor in stored]
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        for holder, before in contents.values():
            if isinstance(holder, list):
                holder[:] = before
            else:
                holder.clear()
                holder.update(before)
        with torch.no_grad():
            # By value, because kernels of norms change statistics without increasing a version.
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)


def _holds_others(value: Any) -> bool:
    return type(value) in (dict, list, set)


_META = torch.device("meta")


def off_the_cpu(model: nn.Module, call: Any) -> bool:
    """Whether any tensor of the model, or of an example call (any pytree), is on a device other than the CPU.

    Fake tensors are on no device, and are captured unchanged.
    """
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    candidates = [t for t in tensors if isinstance(t, torch.Tensor)]
    if any(isinstance(t, FakeTensor) for t in candidates):
        return False
    return any(t.device.type != "cpu" for t in candidates)


def on_meta(call: Any) -> Any:
    """An example call with its tensors on the meta device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(_META), call)


@contextlib.contextmanager
def shadowed(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Replace a model's tensors with meta tensors while the context is open.

    In place rather than on a copy, because modules hold objects that cannot be copied, and tied tensors stay
    tied.

    Args:
        convert: makes the replacement of a tensor; by default one on the meta device.

    Yields:
        The model's original tensors, by their name in the model: parameters, buffers and tensors that are
        plain attributes of a module.
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
"""The most elements, of a model's parameters and of all its operators' results, for which numbers are
compared: a few tenths of a second on one core. These are assumptions that bound the time, and are not
tuned."""
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-3, 1e-2
"""Relative differences that are accepted as rounding at once; a lost backward differs by at least several per
cent. Other differences are compared with the effect of rounding on the model."""
_ROUNDING_FACTOR = 10.0
"""Up to this factor times the effect of changing all parameters by rounding counts as rounding; an
assumption."""
_GRADIENT_FLOOR = 1e-3
"""A gradient's difference is relative to the parameter's largest gradient, but to no less than this share of
the model's largest."""
_UNIT = {"float64": 1e-15, "float32": 1e-7, "float16": 1e-3, "bfloat16": 8e-3}
"""The relative rounding error of one value, by the lowest precision in which anything is computed."""
_OVERWRITTEN = "modified by an inplace operation"
"""PyTorch's message about a tensor that backward needs and forward has changed."""


@dataclass(frozen=True)
class EagerStep:
    """The outcome of the module's own forward and backward, run without values.

    Attributes:
        trained: names of the parameters that get a gradient.
        drew: whether numbers were drawn from Python's or numpy's random module.
        problem: the reason why it could not be run, or "".
    """

    trained: frozenset[str] = frozenset()
    drew: bool = False
    problem: str = ""


def eager_step(subject: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> EagerStep:
    """Run one step of ``subject``, which returns its loss, without a graph, and return the outcome."""
    with unchanged(subject), _without_values(subject, (args, dict(kwargs))) as (call, named):
        parameters = {name: p for name, p in subject.named_parameters() if p.requires_grad}
        with seeded(model=subject) as drew:
            try:
                loss = subject(*call, **named)
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
    """While open, replace the call's tensors, and the model's, with tensors without values; yield the
    call."""
    tensors = [t for t in (*subject.parameters(), *subject.buffers()) if isinstance(t, torch.Tensor)]
    tensors += [t for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor)]
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
    """Notes on parameters that the graph trains and the module does not, or vice versa.

    Args:
        prefix: the prefix of the model's own names among those of the step.

    Raises:
        CaptureError: a parameter that has a gradient in the module gets none in the graph, or the graph's
        loss has none.
    """
    if not graph.tensors[graph.outputs[0]].requires_grad:
        raise CaptureError(
            "the loss of the captured graph has no gradient, although the model's own has one: torch.export "
            "lost the path from the parameters to the loss; look for values that leave PyTorch on it "
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
    captured = trained_parameters(graph)
    lost = sorted(own - captured)
    if lost:
        raise CaptureError(
            f"the captured graph loses the gradient of {_listed(lost)}, which the model itself trains; look "
            "for what torch.export does not see between it and the loss (values that leave PyTorch, "
            "gradients taken inside forward), or freeze it with requires_grad_(False)"
        )
    more = sorted(captured - own)
    if more:
        return (f"the graph trains {_listed(more)}, which gets no gradient from the model's own backward",)
    return ()


def trained_parameters(graph: OperatorGraph) -> set[str]:
    """The keys of the parameters from which a differentiable path leads to the loss."""
    reached = {graph.outputs[0]}
    for op in reversed(graph.operators):
        if not reached.isdisjoint(op.outputs):
            reached.update(name for name in op.inputs() if graph.tensors[name].requires_grad)
    return {str(t.key) for t in graph.parameters if t.name in reached}


# -- numbers --------------------------------------------------------------------------------------


def can_compare(graph: OperatorGraph, model: nn.Module) -> bool:
    """Whether the model has values and is small enough to be computed once."""
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
    """Notes on how far the graph's loss and gradients are from the module's own.

    Args:
        run: returns the loss of the module's own forward for args and kwargs.

    Raises:
        CaptureError: they differ, and neither rounding nor random numbers explain the difference.
    """
    call = (args, dict(kwargs))
    # The model already issued its warnings when it was captured.
    with warnings.catch_warnings(action="ignore"), unchanged(model, values=True):
        parameters = _differentiated(graph, model)
        module = rebuild(graph, model)

        def own() -> torch.Tensor:
            copies, named = _copied(call)
            with seeded(model=model):
                return run(*copies, **named)

        def captured() -> torch.Tensor:
            leaves = pytree.tree_leaves(_copied(call))
            loss: torch.Tensor = module(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
            return loss

        try:
            model_step = _step(own, parameters, model)
        except Exception as error:  # the model's own error, raised later where its cause is named
            return (f"the model's own step could not be computed to compare: {shown_error(error)}",)
        graph_step = _step(captured, parameters, model)
        apart = _difference(graph_step, model_step)
        if apart.within(_LOSS_TOLERANCE, _GRADIENT_TOLERANCE):
            return ()
        if any(draws_numbers(op) for op in graph.operators):
            return ("the graph's gradients were not compared with the model's own: both draw random numbers",)
        rounding = _rounding(own, parameters, model, model_step, graph)
    loss, gradient = (max(_ROUNDING_FACTOR * size, least) for size, least in zip(
        (rounding.loss, rounding.gradient), (_LOSS_TOLERANCE, _GRADIENT_TOLERANCE), strict=True
    ))  # fmt: skip
    if apart.within(loss, gradient):
        return (
            f"rounding changes the model's gradients by {rounding.gradient:.0e}, so that the graph's were "
            "compared with them no finer than that",
        )
    if apart.loss > loss:
        raise CaptureError(
            f"the captured graph computes another loss than the model itself (off by {apart.loss:.0e} of "
            "it); forward does something else each time that it runs, or something that torch.export does "
            "not see: look for state outside of buffers, and for values that leave PyTorch"
        )
    raise CaptureError(
        f"the captured graph gives {apart.name} another gradient than the model itself (off by "
        f"{apart.gradient:.0e} of it), so that a plan would train otherwise; look for what changes gradients "
        "between it and the loss and is no operator: hooks on grad_fn, gradients taken or changed inside "
        "forward"
    )


@dataclass(frozen=True)
class _Difference:
    """The largest relative differences between two steps: of their losses, and of their gradients."""

    loss: float
    gradient: float
    name: str

    def within(self, loss: float, gradient: float) -> bool:
        # Written so that NaN is never within the tolerance.
        return self.loss <= loss and self.gradient <= gradient


_Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _copied(call: Any) -> Any:
    """The call with copies of its tensors, which a model may write to."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, call)


def _differentiated(graph: OperatorGraph, model: nn.Module) -> dict[str, nn.Parameter]:
    by_name = dict(model.named_parameters(remove_duplicate=False))
    return {str(t.key): by_name[str(t.key)] for t in graph.parameters if t.requires_grad}


def _step(run: Callable[[], torch.Tensor], parameters: Mapping[str, nn.Parameter], model: nn.Module) -> _Step:
    """Return (loss, gradients), computed with the model's tensors restored and the same random numbers each
    time.
    """
    with torch.random.fork_rng(devices=[]), unchanged(model, values=True), torch.enable_grad():
        torch.manual_seed(0)
        loss = run()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    zeros = (
        torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters.values(), strict=True)
    )
    return loss.detach(), dict(zip(parameters, zeros, strict=True))


def _difference(actual: _Step, expected: _Step) -> _Difference:
    largest = max((_largest(g) for g in expected[1].values()), default=0.0)
    worst, name = 0.0, ""
    for key, gradient in expected[1].items():
        size = max(_largest(gradient), _GRADIENT_FLOOR * largest, 1e-30)
        apart = _largest(_wide(actual[1][key]) - _wide(gradient)) / size
        if not apart <= worst:
            worst, name = apart, key
    loss = _largest(_wide(actual[0]) - _wide(expected[0])) / max(_largest(expected[0]), 1e-12)
    return _Difference(loss, worst, name)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _largest(value: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    size = float(_wide(value).abs().max())
    # If a model's own step is not finite, it says nothing about its graph.
    return size if math.isfinite(size) else 0.0


def _rounding(
    own: Callable[[], torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    expected: _Step,
    graph: OperatorGraph,
) -> _Difference:
    """Return the change in the module's step when every parameter is changed by rounding."""
    used = {t.dtype for t in graph.tensors.values()}
    unit = _UNIT[next((d for d in ("bfloat16", "float16", "float32") if d in used), "float64")]
    generator = torch.Generator().manual_seed(0)
    worst = _Difference(0.0, 0.0, "")
    with unchanged(model, values=True):
        for _ in range(2):
            with torch.no_grad():
                for p in parameters.values():
                    p.mul_(1 + unit * torch.randn(p.shape, generator=generator).to(p.dtype))
            change = _difference(_step(own, parameters, model), expected)
            worst = _Difference(
                max(worst.loss, change.loss), max(worst.gradient, change.gradient), change.name
            )
    return worst


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
