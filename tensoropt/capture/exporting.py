"""``torch.export`` of a model as it is when it trains: what a model does only because it is exported, or only
because it generates text, is left out."""

from __future__ import annotations

import contextlib
import io
import keyword
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from tensoropt.capture.blocks import Blocks, Likeness, Unlike, write_out
from tensoropt.capture.forward_calls import followed_calls
from tensoropt.capture.lines import own_lines_kept
from tensoropt.capture.no_grad import keep_no_grad
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
    on_meta = any(t.is_meta for t in (*subject.parameters(), *subject.buffers(), *_tensors((args, kwargs))))
    with contextlib.ExitStack() as stack:
        for context in (_quiet(), _no_cache(subject), _unmoved(), _any_names(), own_lines_kept()):
            stack.enter_context(context)
        stack.enter_context(_use_lazy_graph_module(True))
        notes = stack.enter_context(followed_calls(on_meta))
        return _with_blocks_once(subject, args, kwargs, notes), tuple(notes)


def _tensors(call: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]


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
    # An empty table: the graph becomes functional, but composite operators (`linear`, attention) stay whole.
    return exported.run_decompositions({})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and nothing of the graph so far or of PyTorch's log, which it prints when it refuses a
    model; a log that was asked for (TORCH_LOGS) is left."""
    shown = io.StringIO()
    handlers = [] if os.environ.get("TORCH_LOGS") else _handlers_of_pytorch()
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(shown):
                yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)
    # Only where the export succeeds: of a refusal the error says all that matters.
    sys.stderr.write(shown.getvalue())


def _handlers_of_pytorch() -> list[logging.Handler]:
    """Those of its loggers, of which many have one of their own."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")
    ]
    return list({id(handler): handler for logger in loggers for handler in logger.handlers}.values())


def _nothing(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


@contextlib.contextmanager
def _any_names() -> Iterator[None]:
    """Names of modules may hold quotes and newlines, or be Python's own words; PyTorch writes them into code
    as they are."""

    def written(base: str, target: str) -> str:
        for name in target.split("."):
            plain = name.isidentifier() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
        return base

    with mock.patch.object(torch.fx.graph, "_format_target", written):
        yield


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
