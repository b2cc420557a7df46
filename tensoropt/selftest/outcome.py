"""The outcome of a check: figures, each with the most it may be, or the reason why there are none.

Each check runs in a separate process, so that a kernel's fault or a hang ends only that process. ``python -m
tensoropt.selftest.outcome FUNCTION DEVICE FOLDER`` writes ``FOLDER/outcome.json``.

The models that checks run need no other package, and have sizes for a core and for a GPU.
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tensoropt.capture import find_loss
from tensoropt.console import json_text
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import CapturedModel, ModelSpec
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.units import format_bytes, format_seconds

RESULT = "outcome.json"
"""The file in which a check's process leaves its outcome."""

_State = Literal["passed", "failed", "skipped", "left out"]


@dataclass(frozen=True)
class Bounded:
    """A figure with its bound.

    Attributes:
        what: what it measures, in words.
        value: the value in ``unit``; NaN is within no bound.
        bound: the most that it may be; None for a figure that is only shown.
        unit: ``s``, ``bytes``, or ``share`` of something (1 for all of it); empty for other numbers.
    """

    what: str
    value: float
    bound: float | None = None
    unit: str = ""

    @classmethod
    def share(cls, what: str, value: float, bound: float) -> Bounded:
        """Make a share, which people read as per cents."""
        return cls(what, value, bound, "share")

    @property
    def ok(self) -> bool:
        """Whether it is within its bound; a figure without a bound always is."""
        return self.bound is None or self.value <= self.bound

    @property
    def text(self) -> str:
        """The value as people read it."""
        return _text(self.value, self.unit)

    @property
    def bound_text(self) -> str:
        """The bound as people read it."""
        return "-" if self.bound is None else _text(self.bound, self.unit)


def _text(value: float, unit: str) -> str:
    if math.isnan(value):
        return "not a number"
    if unit == "share":
        return f"{value * 100:.3g} %"
    shown = {"s": format_seconds, "bytes": format_bytes}.get(unit, "{:.3g}".format)
    return shown(value)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        state: ``skipped`` if this machine cannot do it, ``left out`` if there was no time for it.
        reason: the reason for all states but ``passed``, in a sentence.
        notes: what else a reader of the figures needs to know.
        details: plain data for a closer look.
    """

    state: _State
    figures: tuple[Bounded, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Sequence[Bounded], *notes: str, **details: Any) -> Outcome:
        """Make an outcome that is passed if all figures are within their bounds; at least one must have a
        bound."""
        bounded = [figure for figure in figures if figure.bound is not None]
        assert bounded, "a check without bounds cannot fail"
        far = [
            f"{figure.what}: {figure.text}, at most {figure.bound_text}"
            for figure in bounded
            if not figure.ok
        ]
        return cls("failed" if far else "passed", tuple(figures), "; ".join(far), notes, details)

    @classmethod
    def skipped(cls, reason: str) -> Outcome:
        """Make the outcome of a check that this machine cannot do."""
        return cls("skipped", reason=reason)

    @classmethod
    def left_out(cls, reason: str) -> Outcome:
        """Make the outcome of a check for which there was no time."""
        return cls("left out", reason=reason)

    @classmethod
    def failed(cls, reason: str, **details: Any) -> Outcome:
        """Make the outcome of a check that did not get as far as figures."""
        return cls("failed", reason=reason, details=details)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_dict` reads."""
        figures = [asdict(figure) | {"ok": figure.ok} for figure in self.figures]
        return {
            "state": self.state,
            "reason": self.reason,
            "figures": figures,
            "notes": list(self.notes),
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the outcome that :meth:`to_dict` wrote; its inverse."""
        figures = tuple(
            Bounded(f["what"], math.nan if f["value"] is None else f["value"], f["bound"], f["unit"])
            for f in data["figures"]
        )
        return cls(data["state"], figures, data["reason"], tuple(data["notes"]), dict(data["details"]))


@dataclass(frozen=True)
class CheckContext:
    """The device and the folder that a check works with.

    Attributes:
        device: ``cpu``, or ``cuda`` for the first GPU.
        folder: an existing folder for files that nobody needs afterwards.
    """

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the check works on the first GPU."""
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        """The communication backend of a rank of this kind."""
        return "nccl" if self.on_gpu else "gloo"


_FRAMES = 6


def main(function: str, device: str, folder: Path) -> None:
    """Run a check (``module:function``) and write its outcome; an error of any kind is an outcome, too."""
    module, _, name = function.partition(":")
    try:
        outcome = getattr(importlib.import_module(module), name)(CheckContext(device, folder))
    except Exception as error:
        words = " ".join(str(error).split()) or "no message"
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        outcome = Outcome.failed(f"{type(error).__name__}: {words}", raised_in=where)
    (folder / RESULT).write_text(json_text(outcome.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))


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
