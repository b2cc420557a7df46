"""The models that checks run: they need no other package, and have sizes for a core and for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tensoropt.capture import find_loss
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import CapturedModel, ModelSpec
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.selftest.outcome import CheckContext

_SMALL: dict[str, tuple[tuple[str, Any], ...]] = {
    "zoo:mlp": (),
    "zoo:gpt-mini": (),
    "zoo:vgg11-tiny": (),
    "zoo:transformer-tiny": (),
}
_LARGE: dict[str, tuple[tuple[str, Any], ...]] = {
    # Sizes of a GPT-2 and of image classifiers whose kernels keep a GPU busy for some tens of milliseconds,
    # and that fit into 16 GiB; assumptions, which no GPU has tried.
    "zoo:gpt-mini": tuple(
        {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 32768, "sequence": 512, "batch": 8}.items()
    ),
    "zoo:vgg16": (("batch", 32),),
    "zoo:resnet101": (("batch", 32),),
    "zoo:transformer-base": (("batch", 32),),
}


def small_models(context: CheckContext) -> list[ModelSpec]:
    """Return four models that any device runs in milliseconds."""
    return [ModelSpec(source, settings=given, device=context.device) for source, given in _SMALL.items()]


def timed_models(context: CheckContext) -> list[ModelSpec]:
    """Return four models whose steps are long enough to be timed on this device."""
    if not context.on_gpu:
        return [replace(spec, settings=_WIDER.get(spec.source, ())) for spec in small_models(context)]
    return [ModelSpec(source, settings=given, device="cuda") for source, given in _LARGE.items()]


_WIDER: dict[str, tuple[tuple[str, Any], ...]] = {
    # Steps of about 20 to 100 ms on a core: shorter ones mostly show the core's clock and its neighbours.
    "zoo:mlp": (("batch", 256),),
    "zoo:gpt-mini": (("hidden", 128), ("sequence", 64), ("batch", 8)),
    "zoo:transformer-tiny": (("batch", 16),),
}


def short_name(spec: ModelSpec) -> str:
    """Return the model's name in the report."""
    return spec.source.removeprefix("zoo:")


def device_of_check(context: CheckContext) -> torch.device:
    """Return the check's device as a PyTorch device."""
    return torch.device("cuda", 0) if context.on_gpu else torch.device("cpu")


def unsplit_engine(loaded: CapturedModel, device: torch.device | None = None) -> ShardedEngine:
    """Return an engine of the unsplit model's lowered graph on one rank."""
    runtime = Runtime((1,), seed=loaded.spec.seed, device=device or loaded.device)
    return ShardedEngine(unsplit_strategy(loaded.graph), loaded.values, runtime=runtime)


def module_of(spec: ModelSpec, device: torch.device) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """Return (module, args, kwargs) of a model on a device, in training mode."""
    model, args, kwargs = spec.build()
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda value: value.to(device), (args, kwargs))
    return model.to(device).train(), args, kwargs


def loss_of(result: Any) -> torch.Tensor:
    """Return the loss in the results of a zoo model."""
    _, loss = find_loss(result)
    return loss
