"""``torch.no_grad`` and ``torch.inference_mode`` inside a model, preserved through decomposition.

Decomposition inlines such a region without a trace: its results are detached beforehand. A tensor from
outside that it writes to keeps its gradient (``gaussian_nll_loss`` bounds variances in this way).

Also the mode (training or evaluation) of each module during capture, and the attributes that the forward of a
kind of module reads, in its own code and in the code that it calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from tensoropt.capture.convert import Mode
from tensoropt.capture.unsupported import is_own, node_line
from tensoropt.errors import CaptureError


@functools.cache
def names_read(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes that the forward of a kind of module reads, including those read in
    the methods and the user's functions that it calls.
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
    """Yield a function's code, and that of the comprehensions and functions inside it."""
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
"""The most modules that a note names."""


@contextlib.contextmanager
def in_mode(model: nn.Module, mode: Mode) -> Iterator[tuple[str, ...]]:
    """Put a model in the mode in which it is captured, while the context is open.

    For inference all of it evaluates. For training, a model in training mode keeps those modules that were
    set to ``eval()`` by hand; one that evaluates as a whole, as loaded models do, is set to train.

    Yields:
        Notes on anything that a user may not expect.
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
        return (f"held in eval mode, as the model has them: {_listed(shown)}",) if shown else ()
    changed = [names[m] or type(m).__name__ for m in differ if m.training]
    if was_training or not changed:
        return ()
    return (
        "the model was in eval mode and is captured in train mode, which changes what these compute: "
        f"{_listed(changed)}; call train() on the model and eval() on what is to be held",
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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def keep_no_grad(exported: Any) -> None:
    """Detach, in place, every result of a region that ran without gradients; a tensor that a region has
    written to keeps its earlier gradient.

    Raises:
        CaptureError: a region writes to a tensor that has a gradient, and the graph also sees that memory
            under another name.
    """
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        regions = [n for n in module.graph.nodes if n.target is wrap and n.args[0] is False]
        for region in regions:
            writes = _writes_of(module, region)
            for result in [user for user in region.users if user.target is operator.getitem]:
                value = result.meta.get("val")
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    _detach(module.graph, result)
            # Facts about gradients may follow from an earlier region.
            having = _having_gradients(exported, module) if writes else set()
            for write in writes:
                if write.written in having:
                    _pass_on(module.graph, region, write)
        if regions:
            module.recompile()


@dataclass(frozen=True)
class _Write:
    """A tensor from outside that a region writes to, and the region's results that are that tensor."""

    written: fx.Node
    results: tuple[fx.Node, ...]


def _writes_of(module: fx.GraphModule, region: fx.Node) -> list[_Write]:
    inside: Any = module.get_submodule(str(region.args[1].target)).graph  # type: ignore[union-attr]
    placeholders = [node for node in inside.nodes if node.op == "placeholder"]
    bases, itself = {node: node for node in placeholders}, {node: node for node in placeholders}
    written: dict[fx.Node, None] = {}
    for node in inside.nodes:
        first = node.args[0] if node.args else None
        schema = getattr(node.target, "_schema", None)
        if schema is None or not isinstance(first, fx.Node) or first not in bases:
            continue
        alias = schema.arguments[0].alias_info
        if alias is not None and alias.is_write:
            written[bases[first]] = None
            if first in itself:
                itself[node] = itself[first]
        if alias is not None:
            bases[node] = bases[first]
    (returned,) = (node.args[0] for node in inside.nodes if node.op == "output")
    got = {user.args[1]: user for user in region.users if user.target is operator.getitem}
    return [
        _Write(
            region.args[2 + placeholders.index(base)],  # type: ignore[arg-type]
            tuple(got[i] for i, node in enumerate(returned) if itself.get(node) is base and i in got),
        )
        for base in written
    ]


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


def _pass_on(graph: fx.Graph, region: fx.Node, write: _Write) -> None:
    """Make readers of a written tensor after a region see the region's value and the tensor's earlier
    gradient."""
    written, place = write.written, {node: number for number, node in enumerate(graph.nodes)}
    later = [user for user in written.users if place[user] > place[region]]
    sharing = [user for user in written.users if user is not region and _is_view(user)]
    if _is_view(written) or any(place[u] > place[region] for view in sharing for u in view.users):
        line = node_line(region)
        raise CaptureError(
            f"the model{f' at {line}' if line else ''} writes, without gradients, to a tensor that has one, "
            "and of which it has a view; write to the tensor before the view is taken, or use torch.where"
        )
    aten = torch.ops.aten
    with graph.inserting_before(region):
        before = graph.call_function(aten.detach.default, (written,))
        # Zero, with the gradient of the earlier tensor.
        kept = graph.call_function(aten.sub.Tensor, (written, before))
    last = max((user for user in region.users), key=lambda user: place[user], default=region)
    with graph.inserting_after(last):
        detached = graph.call_function(aten.detach.default, (written,))
    with graph.inserting_after(detached):
        passed = graph.call_function(aten.add.Tensor, (detached, kept))
    for node in (before, kept, detached, passed):
        node.meta = {**written.meta, "stack_trace": region.meta.get("stack_trace")}
    for user in later:
        if user is not region:
            user.replace_input_with(written, passed)
    for result in write.results:
        for reader in (result, *(user for user in result.users if user.target is aten.detach.default)):
            reader.replace_all_uses_with(
                passed, delete_user_cb=lambda user: user.target is not aten.detach.default
            )


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While open, ``torch.inference_mode`` only switches gradients off, which export can see."""

    def enter(self: Any) -> None:
        self._tensoropt_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *error: Any) -> None:
        torch.set_grad_enabled(self._tensoropt_before)

    # On the class, because decorators created earlier hold it.
    mode = torch.autograd.grad_mode.inference_mode
    with mock.patch.object(mode, "__enter__", enter), mock.patch.object(mode, "__exit__", leave):
        yield


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    # Decomposition takes shapes and modules from there.
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
