"""The lowered graph compared with the module that it was captured from: loss and gradients of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from tensoropt.engine.models import CapturedModel, ModelSpec, open_model
from tensoropt.selftest.models import (
    device_of_check,
    loss_of,
    module_of,
    short_name,
    small_models,
    unsplit_engine,
)
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.verify.findings import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NARROW_FACTOR
from tensoropt.verify.reference import first_step, module_difference

Gradients = Mapping[str, torch.Tensor]


def run(context: CheckContext) -> Outcome:
    """Check that the graph's step is the module's in float32, and as near to it as autocast's in bfloat16."""
    figures = []
    for spec in small_models(context):
        figures += [*_float32(spec), *_bfloat16(spec, device_of_check(context))]
    return Outcome.of(
        figures,
        "float32: the largest difference, relative to the loss and to each parameter's largest gradient",
        "bfloat16: how far gradients are from the module's in float32, in norm, over how far the module's "
        "own are under torch.autocast",
    )


def _float32(spec: ModelSpec) -> list[Bounded]:
    findings = module_difference(0, 1, spec, 0)
    assert findings is not None  # models that draw numbers are not among the small ones
    name, differences = short_name(spec), findings.differences
    loss, gradient = (math.nan if x is None else x for x in (differences.loss, differences.gradient))
    return [
        Bounded(f"{name}, float32: loss", loss, LOSS_TOLERANCE),
        Bounded(f"{name}, float32: gradients", gradient, GRADIENT_TOLERANCE),
        Bounded(f"{name}, float32: values that are NaN or infinite", sum(findings.not_finite.values()), 0),
    ]


def _bfloat16(spec: ModelSpec, device: torch.device) -> list[Bounded]:
    loaded = open_model(replace(spec, compute_dtype="bfloat16"))
    exact = _module_gradients(loaded, device, autocast=False)
    autocast = distance(_module_gradients(loaded, device, autocast=True), exact)
    graph = distance(first_step(unsplit_engine(loaded), loaded)[1], exact)
    name = short_name(spec)
    return [
        Bounded(f"{name}, bfloat16: gradients over autocast's", graph / autocast, NARROW_FACTOR),
        Bounded(f"{name}, bfloat16: gradients", graph),
    ]


def _module_gradients(
    loaded: CapturedModel, device: torch.device, *, autocast: bool
) -> dict[str, torch.Tensor]:
    """Return the module's gradients of a step, by the graph's names of parameters."""
    model, args, kwargs = module_of(loaded.spec, device)
    with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        loss = loss_of(model(*args, **kwargs))
    loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {}
    for tensor in loaded.captured.graph.parameters:
        gradient = parameters[str(tensor.key)].grad
        if gradient is not None:
            gradients[tensor.name] = gradient
    return gradients


def distance(got: Gradients, exact: Gradients) -> float:
    """Return the norm of the difference of all gradients together, relative to that of the exact ones."""
    apart = size = 0.0
    for name, want in exact.items():
        apart += float((got[name].double() - want.double()).square().sum())
        size += float(want.double().square().sum())
    return math.sqrt(apart / size)
