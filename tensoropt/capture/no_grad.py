"""Preservation of ``torch.no_grad`` and ``torch.inference_mode`` inside a model through decomposition.

Decomposition inlines the calls of such a region and forgets that they ran without gradients. The results of
the region are therefore detached beforehand. This file also sets a model's mode (training or evaluation)
during capture, and finds the attributes that a module's forward reads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from tensoropt.capture.convert import Mode
from tensoropt.capture.lines import is_own, node_line, shown_names
from tensoropt.errors import CaptureError


@functools.cache
def names_read(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes that the forward of a class of modules reads, including names read
    in the methods and in the user's functions that forward calls.
    """
    attribute_names: set[str] = set()
    waiting: list[Any] = [kind.forward]
    looked_at: set[Any] = set()
    while waiting:
        function = waiting.pop()
        for wrapped in ("fget", "func", "__func__"):  # properties, cached ones, class and static methods
            function = getattr(function, wrapped, function)
        function = inspect.unwrap(function) if callable(function) else None
        code = getattr(function, "__code__", None)
        if code is None or code in looked_at:
            continue
        looked_at.add(code)
        names = {name for part in codes(code) for name in part.co_names}
        attribute_names |= names
        # For every class, because a method may call those of its base classes.
        own = [vars(base) for base in kind.__mro__ if base not in nn.Module.__mro__]
        waiting += [members[name] for members in own for name in names & members.keys()]
        waiting += _called(function, names)
    return frozenset(attribute_names)


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code object, and the code objects of comprehensions and functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from codes(part)


def _called(function: Any, names: set[str]) -> list[types.FunctionType]:
    within = getattr(function, "__globals__", {})
    values = [within[name] for name in names & within.keys()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    functions = (inspect.unwrap(value) for value in values if inspect.isfunction(value))
    return [value for value in functions if inspect.isfunction(value) and is_own(value.__code__.co_filename)]


_DROPOUTS = nn.modules.dropout._DropoutNd
_SHOWN = 4
"""The largest number of modules that a note names."""


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: Mode) -> Iterator[tuple[str, ...]]:
    """While open, put a model in the mode in which it is captured.

    For inference, all modules are in eval mode. For training, modules that were set to ``eval()`` by hand
    stay in eval mode. A model that is in eval mode as a whole, as loaded models are, is set to train.

    Yields:
        Notes for the user on modules whose mode may be unexpected.
    """
    before = {module: module.training for module in model.modules()}
    notes: tuple[str, ...] = ()
    try:
        if mode == "inference":
            model.eval()
        else:
            notes = _train(model)
        yield notes
    finally:
        for module, training in before.items():
            module.training = training


def _train(model: nn.Module) -> tuple[str, ...]:
    names = {module: name for name, module in model.named_modules()}
    differ = [module for module in names if _depends_on_mode(module)]
    # A new head in a loaded model is in training mode by default, which says nothing about the model.
    by_hand = model.training or any(module.training for module in differ)
    evaluating = [module for module in names if not module.training] if by_hand else []
    was_training = model.training
    # By the model's own method, which may keep parts of it in eval.
    model.train()
    for module in evaluating:
        module.training = False
    if evaluating:
        shown = [names[m] or type(m).__name__ for m in differ if not m.training]
        return (f"modules that stay in eval mode, as given: {shown_names(shown, _SHOWN)}",) if shown else ()
    changed = [names[m] or type(m).__name__ for m in differ if m.training]
    if was_training or not changed:
        return ()
    return (
        "the model was in eval mode and is captured in train mode, which changes what these modules compute: "
        f"{shown_names(changed, _SHOWN)}; to keep some in eval mode, call train() on the model and eval() on "
        "these",
    )


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    if isinstance(module, nn.RReLU):
        return True
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    if type(module).__module__.startswith("torch."):
        return False
    cls: Any = type(module)  # a cache key; mypy does not accept a class as one
    names = names_read(cls)
    # Models that use it only to decide whether to checkpoint compute the same.
    return "training" in names and "gradient_checkpointing" not in names


def keep_no_grad(exported: Any) -> None:
    """Detach, in an exported program, every result of a region that ran without gradients.

    Raises:
        CaptureError: a region writes to a tensor that has a gradient.
    """
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        regions = [n for n in module.graph.nodes if n.target is wrap and n.args[0] is False]
        for region in regions:
            written = _written(module, region)
            # Facts about gradients may follow from an earlier region.
            having = _having_gradients(exported, module) if written else set()
            for tensor, write in written.items():
                # A changed parameter is refused as such.
                if tensor in having and tensor.op != "placeholder":
                    line = node_line(write)
                    raise CaptureError(
                        f"the model{f' at {line}' if line else ''} writes, without gradients, to a tensor "
                        "that has one (as gaussian_nll_loss does with variances); compute a new tensor: "
                        "x + (bounded(x) - x).detach() has the value of bounded(x) and the gradient of x"
                    )
            if written:  # what it writes comes from its operands, whose gradients end here
                inside = _inside(module, region)
                for operand, outer in zip(_placeholders(inside), region.args[2:], strict=True):
                    if outer not in written:
                        _detach(inside.graph, operand)
                inside.recompile()
            for result in [user for user in region.users if user.target is operator.getitem]:
                _detach(module.graph, result)
        if regions:
            module.recompile()


def _inside(module: fx.GraphModule, region: fx.Node) -> Any:
    return module.get_submodule(str(region.args[1].target))  # type: ignore[union-attr]


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _written(module: fx.GraphModule, region: fx.Node) -> dict[fx.Node, fx.Node]:
    """Return the outer tensors that a region writes to, whole or in part, mapped to the node that writes."""
    inside = _inside(module, region)
    bases: dict[fx.Node, Any] = dict(zip(_placeholders(inside), region.args[2:], strict=True))
    written: dict[fx.Node, fx.Node] = {}
    for node in inside.graph.nodes:
        first, schema = next(iter(node.args), None), getattr(node.target, "_schema", None)
        alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
        part = node.target is operator.getitem  # of chunk(), split(), ...
        if (alias is not None or part) and isinstance(first, fx.Node) and first in bases:
            bases[node] = bases[first]
            if alias is not None and alias.is_write:
                written[bases[first]] = node
    return written


def _having_gradients(exported: Any, module: fx.GraphModule) -> set[fx.Node]:
    names = exported.graph_signature.inputs_to_parameters
    trained = {name for name, key in names.items() if exported.state_dict[key].requires_grad}
    nodes: set[fx.Node] = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            continue
        cut = node.target is torch.ops.aten.detach.default
        if node.name in trained or (not cut and not nodes.isdisjoint(node.all_input_nodes)):
            nodes.add(node)
    return nodes


def inference_as_no_grad() -> contextlib.AbstractContextManager[object]:
    """While open, ``torch.inference_mode`` only switches gradients off, which export can represent."""

    def enter(self: Any) -> None:
        self._tensoropt_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *error: Any) -> None:
        torch.set_grad_enabled(self._tensoropt_before)

    # On the class, because decorators created earlier hold it.
    mode = torch.autograd.grad_mode.inference_mode
    return mock.patch.multiple(mode, __enter__=enter, __exit__=leave)


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    # Decomposition takes shapes and modules from there.
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
