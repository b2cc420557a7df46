"""Export of a model with ``torch.export``, so that the traced code is the code that runs in training.

Checkpointed code (``torch.utils.checkpoint``) is traced without its checkpoint, because the plan chooses
which blocks are recomputed. Code that gets no gradient from a reentrant checkpoint gets none in the graph
either.
"""

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
from torch.utils import checkpoint

from tensoropt.capture.blocks import Likeness, TracedBlocks, Unlike, write_out
from tensoropt.capture.custom_functions import own_backwards
from tensoropt.capture.fidelity import EagerStep, any_names, eager_step, tensors_of
from tensoropt.capture.forward_calls import followed_calls, known_values
from tensoropt.capture.lines import own_lines_kept
from tensoropt.capture.no_grad import inference_as_no_grad, keep_no_grad
from tensoropt.capture.other_processes import no_other_processes, refuse_communication
from tensoropt.capture.state import watched
from tensoropt.capture.steps import DRAWN, seeded, unchanged
from tensoropt.capture.unsupported import refusing
from tensoropt.errors import CaptureError


def _instance_norm(*args: Any, **kwargs: Any) -> Any:
    """Decompose an instance norm with running statistics. The operator changes the statistics although its
    schema does not say so; the decomposed form returns the new statistics."""
    operator = torch.ops.aten.instance_norm.default
    bound = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    if bound["running_mean"] is None or not bound["use_input_stats"]:
        return NotImplemented
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


_WRITTEN_OUT = {torch.ops.aten.instance_norm.default: _instance_norm}


class _Checkpoints:
    """Replacements for a model's activation checkpoints that recompute nothing; ``notes`` are for
    the user."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run ``function`` as ``CheckpointFunction.apply`` does, but without recomputation, so that
        ``preserve`` (whether random states are restored) has no effect."""
        self.notes.append(_REPLACED)
        if torch.is_grad_enabled() and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self.notes.append(_IDLE)
            with torch.no_grad():
                return function(*args)
        return function(*args)

    def traced(self) -> contextlib.AbstractContextManager[object]:
        """While open, non-reentrant checkpoints call their function without recomputation."""

        def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            self.notes.append(_REPLACED)
            yield

        return mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", plain)


_REPLACED = (
    "the model's own checkpointing is replaced by the plan's, which chooses the blocks that are recomputed"
)
_IDLE = (
    "a reentrant checkpoint gives no gradient, as in the model, because none of its input tensors requires "
    "one; pass use_reentrant=False to train the parameters inside"
)
_EAGER_NOTE = (
    "the model could not be exported with torch.compiler.is_compiling() true; it was exported as it runs "
    "without a compiler"
)


_Exported = tuple[torch.export.ExportedProgram, EagerStep | None, tuple[str, ...]]


def export(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> _Exported:
    """Return (functional program, outcome of the module's own step or None in inference, notes for the user).

    Under a compiler, some models skip code that the graph needs (T5 and its relatives make their mask in
    eager mode only). If the export fails, it is therefore repeated with ``torch.compiler.is_compiling()``
    false.

    Raises:
        CaptureError: the capture refuses the model; the export is not repeated.
        Exception: both attempts failed. The second error is raised, because it is about the model itself.
    """
    try:
        return _export(subject, args, kwargs, training)
    # Our own error already says what is wrong; a second attempt would give the same.
    except CaptureError:
        raise
    except Exception:
        with mock.patch.object(torch.compiler, "is_compiling", return_value=False):
            exported, step, notes = _export(subject, args, kwargs, training)
        return exported, step, (*notes, _EAGER_NOTE)


def _export(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> _Exported:
    # Dozens of passes each change the graph and have its Python code written and compiled anew, which grows
    # with the model and is a quarter of the total time. Only code that is run has to exist.
    prefix = "model." if training else ""
    # Whatever the model's code sets in its modules while it is traced is fake.
    with (
        unchanged(subject),
        _quiet(),
        any_names(),
        own_lines_kept(),
        _use_lazy_graph_module(True),
        no_other_processes() as asked,
        _as_it_trains(subject, args, kwargs) as (checkpoints, notes),
    ):
        # In inference there is no backward to keep.
        own = own_backwards(checkpoints.reentrant) if training else contextlib.nullcontext()
        with refusing(), inference_as_no_grad(), watched(subject, prefix) as changes, own:
            exported = _with_blocks_once(subject, args, kwargs, notes)
            changes.check(exported, prefix)
        all_notes, step = [*notes, *changes.notes], None
        if training:
            with _unheard():
                step = eager_step(subject, args, kwargs)
                if step.problem:
                    # Some code runs without values only as it does under a compiler.
                    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
                        step = eager_step(subject, args, kwargs)
            if step.drew:
                all_notes.append(DRAWN)
        if asked:
            with _unheard():
                refuse_communication(lambda _: eager_step(subject, args, kwargs))
            all_notes.append(f"{asked[0]} finds no process group: the graph is that of one process")
        all_notes += checkpoints.notes
    return exported, step, tuple(all_notes)


@contextlib.contextmanager
def _as_it_trains(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[_Checkpoints, list[str]]]:
    """While open, run the model's code in the form that is captured: without key/value caches and
    recomputation, and as if every check of values succeeded.

    Yields:
        The replaced checkpoints, and a list of notes on branches taken, which is filled while the code runs.
    """
    on_meta = any(tensor.is_meta for tensor in tensors_of(subject, (args, kwargs)))
    checkpoints = _Checkpoints()
    with (
        _no_cache(subject),
        _unmoved(),
        checkpoints.traced(),
        # Compiled layers compute the same without compilation, and nothing can be compiled under a capture's
        # modes.
        torch.compiler.set_stance("force_eager"),
        known_values(),
        followed_calls(on_meta) as notes,
        own_backwards(checkpoints.reentrant, keep=False),
    ):
        yield checkpoints, notes


def run_as_it_trains(subject: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls ``subject`` in the form that is captured (:func:`_as_it_trains`)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _unheard(), _as_it_trains(subject, args, kwargs):
            return subject(*args, **kwargs)

    return run


def _with_blocks_once(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], notes: list[str]
) -> torch.export.ExportedProgram:
    apart: list[Likeness] = []
    while True:
        blocks = TracedBlocks(subject, apart)
        notes.clear()
        try:
            with blocks.once():
                exported = _functional(subject, args, kwargs)
            write_out(blocks, exported)
        except Unlike as unlike:
            apart.append(unlike.likeness)
        # Our own error already says what is wrong, however often anything is traced.
        except CaptureError:
            raise
        except Exception:
            if not blocks.called:
                raise
            # With every call traced: either it works, or the reason lies in the model.
            notes.clear()
            return _functional(subject, args, kwargs)
        else:
            return exported


def _functional(
    subject: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    with seeded(model=subject):
        exported = torch.export.export(subject, args, dict(kwargs))
    # Before decomposition, which inlines such regions without a trace.
    keep_no_grad(exported)
    # The graph becomes functional, but composite operators (`linear`, attention) stay whole, because the
    # table does not list them.
    return exported.run_decompositions(_WRITTEN_OUT)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, and the partial graph and log that PyTorch prints when it refuses a model. A log
    that the user requested with TORCH_LOGS is shown."""
    shown = io.StringIO()
    with _no_log(), warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(shown):
        yield
    # Only if the export succeeds: for a refusal, the error says all that matters.
    sys.stderr.write(shown.getvalue())


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Suppress what the model's code prints, because it printed the same during the export."""
    nowhere = io.StringIO()
    with _no_log(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    before = logging.root.manager.disable
    if not os.environ.get("TORCH_LOGS"):
        logging.disable(max(before, logging.ERROR))
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _no_cache(model: torch.nn.Module) -> Iterator[None]:
    """Switch off the key/value cache of ``transformers`` models: a single step has no use for it."""
    # Submodules share their model's config object or have their own copies: each object once.
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    with contextlib.ExitStack() as stack:
        for config in configs.values():
            if getattr(config, "use_cache", None) is True:
                stack.enter_context(mock.patch.object(config, "use_cache", False))
        yield


def _unmoved() -> contextlib.AbstractContextManager[object]:
    """While open, make ``layer.to(dtype)`` inside ``forward`` do nothing if the layer already has the dtype.
    Export would take such a call, which routers of experts make, for a replacement of the layer's weights."""
    move = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        in_place = device is None or {t.device for t in tensors} <= {device}
        if in_place and (dtype is None or {t.dtype for t in floating} <= {dtype}):
            return self
        return move(self, *args, **kwargs)

    return mock.patch.object(torch.nn.Module, "to", to)
