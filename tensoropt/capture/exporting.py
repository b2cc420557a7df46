"""``torch.export`` of a model as it is when it trains: what a model does only because it is exported, or only
because it generates text, is left out."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from tensoropt.capture.blocks import Blocks, Likeness, Unlike, write_out
from tensoropt.capture.inner_changes import changes_inside
from tensoropt.capture.loss import WithLoss
from tensoropt.capture.no_grad import keep_no_grad
from tensoropt.capture.state import watched
from tensoropt.capture.validity import valid_values
from tensoropt.errors import CaptureError

EAGER_NOTE = (
    "the model could not be exported with torch.compiler.is_compiling() true; it was exported as it runs "
    "without a compiler"
)


def export(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """(flat, functional program, notes on what was decided along the way).

    Some models leave out under a compiler what they need then (T5's relatives make their mask in eager mode
    only). A model that is refused is therefore tried once more as in eager mode.

    Raises:
        Exception: that of the second attempt, if both fail; it is the one that speaks of the model.
    """
    try:
        return _export(subject, args, kwargs)
    # Ours says already what is wrong; a second attempt would find the same.
    except CaptureError:
        raise
    except Exception:
        with mock.patch.object(torch.compiler, "is_compiling", return_value=False):
            exported, notes = _export(subject, args, kwargs)
        return exported, (*notes, EAGER_NOTE)


def _export(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    # Dozens of passes each change the graph and have its Python code written and compiled anew, which grows
    # with the model and is a quarter of all time. Only code that is run has to be there.
    prefix = "model." if isinstance(subject, WithLoss) else ""
    with (
        _quiet(),
        _no_cache(subject),
        _unmoved(),
        _use_lazy_graph_module(True),
        watched(subject, prefix) as changes,
        valid_values() as notes,
    ):
        exported = _with_blocks_once(subject, args, kwargs, notes)
        changes.check(exported, prefix)
        return exported, (*notes, *changes.notes)


def _with_blocks_once(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], notes: list[str]
) -> torch.export.ExportedProgram:
    apart: list[Likeness] = []
    while True:
        blocks = Blocks(subject, apart)
        notes.clear()
        try:
            with blocks.once():
                exported = _functional(subject, args, kwargs)
            write_out(blocks, exported)
        except Unlike as unlike:
            apart.append(unlike.likeness)
        except Exception:
            if not blocks.called:
                raise
            # With every call traced: either it works or the reason is the model's own.
            notes.clear()
            return _functional(subject, args, kwargs)
        else:
            return exported


def _functional(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    exported = torch.export.export(subject, args, dict(kwargs))
    # Before decomposition, which inlines such regions and leaves no trace of them.
    keep_no_grad(exported)
    # The graph becomes functional, but composite operators (`linear`, attention) stay whole: the table does
    # not name them.
    return exported.run_decompositions(changes_inside(exported))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and nothing of the graph so far, which PyTorch prints when it refuses a model."""
    shown, logger = io.StringIO(), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(shown):
                yield
    finally:
        logger.setLevel(level)
    # Only where the export succeeds: of a refusal the error says all that matters.
    sys.stderr.write(shown.getvalue())


@contextlib.contextmanager
def _no_cache(model: torch.nn.Module) -> Iterator[None]:
    """Switch off the key/value cache of ``transformers`` models: one step has no use for it."""
    # Submodules share their model's config object, or have copies of their own: each object once.
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    cached = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True


@contextlib.contextmanager
def _unmoved() -> Iterator[None]:
    """``layer.to(dtype)`` inside ``forward`` is nothing when the layer has that type already; export takes it
    for an exchange of the layer's weights (routers of sparse models keep their type so)."""
    move = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        in_place = device is None or {t.device for t in tensors} <= {device}
        if in_place and (dtype is None or {t.dtype for t in floating} <= {dtype}):
            return self
        return move(self, *args, **kwargs)

    with mock.patch.object(torch.nn.Module, "to", to):
        yield
