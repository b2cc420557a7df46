"""Models by reference: what a rank needs to build the same model as every other rank."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt import zoo
from tensoropt.capture import Capture, capture
from tensoropt.errors import PlanError
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators


@dataclass(frozen=True)
class ModelSpec:
    """A model as picklable data.

    Attributes:
        source: ``zoo:NAME``, ``package.module:function`` or ``path/file.py:function``; the function
            returns ``(model, args)`` or ``(model, args, kwargs)``.
        seed: of weights and example inputs.
        dtype: name of a floating dtype to convert weights and inputs to, or None.
        settings: overrides of a zoo model, ``batch`` among them.
    """

    source: str
    seed: int = 0
    dtype: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    def build(self) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
        """(model, args, kwargs), equal in every process."""
        settings = dict(self.settings)
        if self.source.startswith("zoo:"):
            batch = settings.pop("batch", None)
            built = zoo.build(self.source.removeprefix("zoo:"), batch, seed=self.seed, **settings)
            model, args, kwargs = built.model, built.args, dict(built.kwargs)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model, args, kwargs = _recipe(self.source, _function(self.source)(**settings))
        if self.dtype is not None:
            dtype = getattr(torch, self.dtype)
            model = model.to(dtype)

            def convert(leaf: Any) -> Any:
                floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
                return leaf.to(dtype) if floating else leaf

            args, kwargs = pytree.tree_map(convert, (args, kwargs))
        return model, args, kwargs


def _recipe(source: str, made: Any) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise PlanError(
            f"{source} must return (model, args) or (model, args, kwargs), not {type(made).__name__}"
        )
    model, args, kwargs = (*made, {}) if len(made) == 2 else made
    return model, tuple(args), dict(kwargs)


def _function(source: str) -> Callable[..., Any]:
    where, _, name = source.rpartition(":")
    if not where:
        raise PlanError(
            f"'{source}' names no model; use zoo:NAME, package.module:function or file.py:function"
        )
    try:
        module = _file_module(where) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        raise PlanError(f"{where} cannot be imported ({error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise PlanError(f"{where} has no function '{name}'")
    return function


def _file_module(path: str) -> Any:
    file = Path(path).resolve()
    if not file.is_file():
        raise PlanError(f"there is no file {path}")
    key = f"tensoropt_model_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


def model_values(captured: Capture) -> dict[str, torch.Tensor]:
    """The model's values of the graph's parameters and buffers, by graph name; nothing is copied.

    Raises:
        PlanError: the model lacks one.
    """
    known: dict[str, torch.Tensor] = dict(captured.model.named_buffers(remove_duplicate=False))
    known |= dict(captured.model.named_parameters(remove_duplicate=False))
    values = {}
    for tensor in captured.graph.tensors.values():
        if tensor.kind in ("parameter", "buffer"):
            if tensor.key not in known:
                raise PlanError(f"the model has no {tensor.kind} called {tensor.key}, which the plan needs")
            values[tensor.name] = known[tensor.key].detach()
    return values


@dataclass
class LoadedModel:
    """A model built and captured in this process.

    Attributes:
        inputs: the tensors of the example call, flattened.
        values: parameters and buffers by graph name; unchanged by any run.
        memory: results that depend on the model only, computed once.
    """

    spec: ModelSpec
    captured: Capture
    graph: GroupGraph
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[torch.Tensor, ...]
    values: dict[str, torch.Tensor]
    memory: dict[Any, Any] = field(default_factory=dict)


_loaded: dict[ModelSpec, LoadedModel] = {}


def load_model(spec: ModelSpec) -> LoadedModel:
    """Build and capture a model; the last one asked for is kept for the next call."""
    if spec not in _loaded:
        _loaded.clear()
        model, args, kwargs = spec.build()
        captured = capture(model, args, kwargs)
        graph = group_operators(refine_graph(captured.graph))
        inputs = tuple(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
        values = {name: value.clone() for name, value in model_values(captured).items()}
        _loaded[spec] = LoadedModel(spec, captured, graph, args, kwargs, inputs, values)
    return _loaded[spec]
