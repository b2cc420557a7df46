"""Picklable references to models, from which every rank builds and captures the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt import zoo
from tensoropt.capture import Capture, Mode, capture
from tensoropt.capture.fidelity import doubled, in_double
from tensoropt.capture.folding import kept_constants
from tensoropt.capture.other_processes import no_other_processes
from tensoropt.capture.precision import with_compute_dtype
from tensoropt.engine.drawn_values import draw_values
from tensoropt.engine.engine import device_of
from tensoropt.errors import PlanError
from tensoropt.plan.plan import Plan
from tensoropt.question.model_source import ModelSourceError, OnnxOptions
from tensoropt.question.model_source import load_model as build_from_source
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators


@dataclass(frozen=True)
class ModelSpec:
    """A model as picklable data, from which every rank builds the same one.

    Attributes:
        source: the model's origin, such as ``zoo:NAME``, as for :func:`tensoropt.load_model`.
        seed: the seed of weights and example inputs.
        dtype: ``float64`` for double precision, or None.
        settings: pairs of a name and a value: ``batch``, or for a zoo model also its own settings.
        compute_dtype: the dtype of the computation: ``bfloat16`` for mixed precision.
        onnx: the sizes that an ONNX file leaves open.
        mode: ``train`` or ``inference``.
        device: ``cpu``, ``cuda`` for the current GPU, or ``meta`` without values.
        expert_imbalance: the predicted rows of the busiest rank of experts, divided by the mean over ranks.
    """

    source: str
    seed: int = 0
    dtype: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    compute_dtype: str = "float32"
    onnx: OnnxOptions | None = None
    mode: Mode = "train"
    device: str = "cpu"
    expert_imbalance: float = 1.0

    @classmethod
    def of(cls, plan: Plan) -> ModelSpec:
        """Return the spec of the model that a plan was made for."""
        model = plan.model
        return cls(
            model.source,
            model.seed,
            settings=() if model.batch is None else (("batch", model.batch),),
            compute_dtype=plan.compute_dtype,
            onnx=None if model.onnx is None else model.onnx.options(),
            mode=model.mode,
            expert_imbalance=float(plan.settings.get("expert_imbalance", 1.0)),
        )

    def build(self) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return (model, args, kwargs), equal in every process; on the CPU or the meta device."""
        # A tuple of pairs in the spec, as specs are hashed; the batch is no setting of the model's own.
        settings = dict(self.settings)
        batch = settings.pop("batch", None)
        if settings and not self.source.startswith("zoo:"):
            raise PlanError(f"{self.source} takes no settings; only models of the zoo do")
        name = self.source.removeprefix("zoo:")
        # As in the process that explored: on ranks, the model's code would find their group.
        with no_other_processes():
            if settings:
                built: Any = zoo.build(name, batch, device=self._made_on, seed=self.seed, **settings)
            else:
                built = self._opened(batch)
        return built.model, built.args, dict(built.kwargs)

    def build_to_run(self) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Build the model as :meth:`build` does, with random values where its code gives none."""
        model, args, kwargs = self.build()
        if self._made_on != "meta":
            args, kwargs = draw_values(model, (args, kwargs), self.seed)
        return model, args, kwargs

    @property
    def _made_on(self) -> str:
        return "meta" if self.device == "meta" else "cpu"  # one seed, one set of weights

    def _opened(self, batch: int | None) -> Any:
        if self._made_on == "meta":
            try:
                return build_from_source(
                    self.source, device="meta", seed=self.seed, batch=batch, onnx=self.onnx
                )
            except ModelSourceError:
                pass  # code that needs values builds on the CPU, or says there what is wrong
        return build_from_source(self.source, seed=self.seed, batch=batch, onnx=self.onnx)


def model_values(captured: Capture) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by graph name, without copies; PlanError if the model lacks one."""
    tensors: dict[str, torch.Tensor] = dict(captured.model.named_buffers(remove_duplicate=False))
    # Duplicates stay: the graph may know a tied parameter by any of its names.
    tensors |= dict(captured.model.named_parameters(remove_duplicate=False))
    values = {}
    for tensor in captured.graph.tensors.values():
        if tensor.kind in ("parameter", "buffer"):
            if tensor.key not in tensors:
                raise PlanError(f"the model has no {tensor.kind} called {tensor.key}, which the plan needs")
            values[tensor.name] = tensors[tensor.key].detach()
    return values


@dataclass
class CapturedModel:
    """A model built and captured in this process.

    Attributes:
        device: the device that a rank of the model computes on.
        inputs: the tensors of the example call, flattened, on that device.
        values: parameters and buffers by graph name, on the CPU; no run changes them.
        results: cached results that depend only on the model.
    """

    spec: ModelSpec
    captured: Capture
    graph: GroupGraph
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    inputs: tuple[torch.Tensor, ...]
    values: dict[str, torch.Tensor]
    results: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Opened:
    """A model built and captured, from which its graphs in other precisions are made."""

    captured: Capture
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, spec: ModelSpec) -> _Opened:
        model, args, kwargs = spec.build_to_run()
        # Every rank does so, and verify compares the graph with the module itself.
        captured = capture(model, args, kwargs, mode=spec.mode, compare=False)
        # Copied, as every run starts from these, whatever happens to the model. Not on the GPU, where a rank
        # has its shards only.
        values = {name: value.clone() for name, value in model_values(captured).items()}
        return cls(captured, args, kwargs, values)

    def in_precision(self, spec: ModelSpec) -> CapturedModel:
        graph = with_compute_dtype(self.captured.graph, spec.compute_dtype)
        args, kwargs, values = self.args, self.kwargs, self.values
        if spec.dtype == "float64":
            # Only the graph is widened: capturing a model converted to double would give another graph
            # (:func:`tensoropt.capture.fidelity.in_double`).
            graph = in_double(graph)
            args, kwargs = pytree.tree_map_only(torch.Tensor, doubled, (args, kwargs))
            values = {name: doubled(value) for name, value in values.items()}
        # A graph in another precision has constants of its own.
        graph = replace(
            graph, kept_constants=kept_constants(graph.constants), expert_imbalance=spec.expert_imbalance
        )
        captured = replace(self.captured, graph=graph)
        leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        device = device_of(values)
        if spec.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        inputs = tuple(v.to(device) for v in leaves)
        groups = group_operators(refine_graph(graph))
        return CapturedModel(spec, captured, groups, args, kwargs, device, inputs, values)


_Key = tuple[ModelSpec, int]

# Ranks run many checks of one model after another: it is kept in all requested precisions, as distinguishing
# rounding from faults alternates between them. Two large models may not fit.
_opened: dict[_Key, _Opened] = {}
_loaded: dict[_Key, dict[ModelSpec, CapturedModel]] = {}

_KEPT_BYTES = 2**26
"""The total size in bytes of parameters and buffers above which the cache of models is emptied."""


def load_model(spec: ModelSpec) -> CapturedModel:
    """Build and capture a model; the last model and small ones are cached until their files change."""
    key = replace(spec, dtype=None, compute_dtype="float32"), _changed_ns(spec.source)
    if key not in _opened:
        if sum(value.nbytes for opened in _opened.values() for value in opened.values.values()) > _KEPT_BYTES:
            _forget_models()
        _opened[key] = _Opened.of(spec)
    if key not in _loaded:
        _loaded.clear()
    precisions = _loaded.setdefault(key, {})
    if spec not in precisions:
        precisions[spec] = _opened[key].in_precision(spec)
    return precisions[spec]


def _forget_models() -> None:
    _opened.clear()
    _loaded.clear()


def _changed_ns(source: str) -> int:
    file = Path(source) if source.endswith(".onnx") else Path(source.rpartition(":")[0])
    return file.stat().st_mtime_ns if file.is_file() else 0


def open_model(spec: ModelSpec) -> CapturedModel:
    """Build and capture a model without the cache."""
    return _Opened.of(spec).in_precision(spec)
