"""``torch.export`` of a model as it is when it trains: what a model does only because it is exported, or only
because it generates text, is left out."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from tensoropt.capture.blocks import Blocks, Likeness, Unlike, write_out
from tensoropt.capture.checkpoints import Checkpoints
from tensoropt.capture.custom_functions import own_backwards
from tensoropt.capture.detaching import Detachments
from tensoropt.capture.draws import note_of, seeded
from tensoropt.capture.fidelity import EagerStep, eager_step
from tensoropt.capture.forward_calls import followed_calls
from tensoropt.capture.hooks import asked_of_backward, no_new_hooks
from tensoropt.capture.inner_changes import changes_inside
from tensoropt.capture.keys import any_names
from tensoropt.capture.known import known_values
from tensoropt.capture.lines import own_lines_kept
from tensoropt.capture.loss import WithLoss
from tensoropt.capture.no_grad import inference_as_no_grad, keep_no_grad
from tensoropt.capture.state import watched
from tensoropt.capture.unsupported import refusing
from tensoropt.errors import CaptureError

EAGER_NOTE = (
    "the model could not be exported with torch.compiler.is_compiling() true; it was exported as it runs "
    "without a compiler"
)


Exported = tuple[torch.export.ExportedProgram, EagerStep | None, tuple[str, ...]]


def export(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> Exported:
    """(flat, functional program, the module's own step in training, notes on what was decided along the way).

    Some models leave out under a compiler what they need then (T5's relatives make their mask in eager mode
    only). A model that is refused is therefore tried once more as in eager mode.

    Raises:
        Exception: that of the second attempt, if both fail; it is the one that speaks of the model.
    """
    try:
        return _export(subject, args, kwargs, training)
    # Ours says already what is wrong; a second attempt would find the same.
    except CaptureError:
        raise
    except Exception:
        with mock.patch.object(torch.compiler, "is_compiling", return_value=False):
            exported, step, notes = _export(subject, args, kwargs, training)
        return exported, step, (*notes, EAGER_NOTE)


def _export(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> Exported:
    # Dozens of passes each change the graph and have its Python code written and compiled anew, which grows
    # with the model and is a quarter of all time. Only code that is run has to be there.
    with contextlib.ExitStack() as stack:
        for context in (_quiet(), any_names(), own_lines_kept(), _use_lazy_graph_module(True)):
            stack.enter_context(context)
        checkpoints, notes = stack.enter_context(as_it_trains(subject, args, kwargs))
        with contextlib.ExitStack() as tracing:
            for context in (refusing(), inference_as_no_grad()):
                tracing.enter_context(context)
            prefix = "model." if training else ""
            changes = tracing.enter_context(watched(subject, prefix))
            # Outside of that, which makes a detach of reads of `.data`.
            tracing.enter_context(Detachments())
            # In inference there is no backward to keep.
            asked: list[str] = []
            if training:
                for context in (no_new_hooks(), own_backwards(checkpoints.reentrant)):
                    tracing.enter_context(context)
                asked = tracing.enter_context(asked_of_backward())
            exported = _with_blocks_once(subject, args, kwargs, notes)
            changes.check(exported, prefix)
        found, step = [*notes, *changes.notes, *asked], None
        if training:
            with _unheard():
                step = eager_step(subject, args, kwargs)
                if step.problem:
                    # Some code runs without values only as it does under a compiler.
                    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
                        step = eager_step(subject, args, kwargs)
            if step.drew:
                found.append(note_of(subject, lambda: eager_step(subject, args, kwargs)))
        found += checkpoints.notes
    return exported, step, tuple(found)


@contextlib.contextmanager
def as_it_trains(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Checkpoints, list[str]]]:
    """While open the model's code runs as it is captured: no caches, checkpoints that compute once, checks of
    values that pass.

    Yields:
        The checkpoints met, and notes on the branches that were decided.
    """
    on_meta = any(t.is_meta for t in (*subject.parameters(), *subject.buffers(), *_tensors((args, kwargs))))
    checkpoints = Checkpoints(subject.model if isinstance(subject, WithLoss) else subject)
    with contextlib.ExitStack() as stack:
        for context in (_no_cache(subject), _unmoved(), checkpoints.traced()):
            stack.enter_context(context)
        # Compiled layers compute the same without, and nothing can be compiled under the modes of a capture.
        stack.enter_context(_uncompiled())
        stack.enter_context(known_values())
        notes = stack.enter_context(followed_calls(on_meta))
        stack.enter_context(own_backwards(checkpoints.reentrant, keep=False))
        yield checkpoints, notes


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def run_as_it_trains(subject: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls ``subject`` as it is captured (:func:`as_it_trains`)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _unheard(), as_it_trains(subject, args, kwargs):
            return subject(*args, **kwargs)

    return run


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
        # Ours says already what is wrong, whatever is traced how often.
        except CaptureError:
            raise
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
    with seeded(model=subject):
        exported = torch.export.export(subject, args, dict(kwargs))
    # Before decomposition, which inlines such regions and leaves no trace of them.
    keep_no_grad(exported)
    # The graph becomes functional, but composite operators (`linear`, attention) stay whole: the table does
    # not name them.
    return exported.run_decompositions(changes_inside(exported))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and nothing of the graph so far or of PyTorch's log, which it prints when it refuses a
    model; a log that was asked for (TORCH_LOGS) is left."""
    shown = io.StringIO()
    with _no_log(), warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(shown):
        yield
    # Only where the export succeeds: of a refusal the error says all that matters.
    sys.stderr.write(shown.getvalue())


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Nothing that the model's code prints: it has said it when it was exported."""
    nowhere = io.StringIO()
    with _no_log(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    handlers = [] if os.environ.get("TORCH_LOGS") else _handlers_of_pytorch()
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)


def _handlers_of_pytorch() -> list[logging.Handler]:
    """Those of its loggers, of which many have one of their own."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")
    ]
    return list({id(handler): handler for logger in loggers for handler in logger.handlers}.values())


def _nothing(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


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
