"""PyTorch's composite operators, which a capture keeps whole, are prepared once per process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch._export import utils
from torch._subclasses import fake_impls
from torch.export import exported_program

_LIST, _OVERRIDE = "_materialize_cpp_cia_ops", "_override_composite_implicit_decomp"

_prepared: dict[Any, tuple[Any, dict[Any, Any], dict[Any, Any], Any]] = {}
"""Of each composite operator: its decomposition, its kernels without and with it, and its rule for fake
tensors."""


@contextlib.contextmanager
def composites_prepared_once() -> Iterator[None]:
    """Prepare PyTorch's composite operators once per process: listing them for each namespace of operators,
    and registering the kernels of each in both passes of ``run_decompositions``, takes more than half of the
    time of capturing a small model."""
    listed = getattr(utils, _LIST, lambda: None)
    if hasattr(listed, "cache_info"):  # another capture's, in another thread
        yield
        return
    override = getattr(exported_program, _OVERRIDE, contextlib.nullcontext)
    with (
        mock.patch.object(utils, _LIST, functools.cache(listed), create=True),
        mock.patch.object(exported_program, _OVERRIDE, functools.partial(_overridden, override), create=True),
    ):
        yield


@contextlib.contextmanager
def _overridden(override: Callable[..., Any], decompositions: Mapping[Any, Any]) -> Iterator[None]:
    """PyTorch's ``override(decompositions)``, which registers a dozen kernels of each operator; here those of
    an earlier call are put in place again wherever they would be the same."""
    rules = fake_impls.op_implementations_dict
    ready = {
        op: _prepared[op]
        for op, decomposition in decompositions.items()
        if op in _prepared and op not in rules and _prepared[op][:2] == (decomposition, op.py_kernels)
    }
    others = {op: decomposition for op, decomposition in decompositions.items() if op not in ready}
    # An operator with a rule of its own loses it in the first call.
    before = {op: dict(op.py_kernels) for op in others if op not in rules}
    try:
        for op, (_, _, kernels, rule) in ready.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            rules[op] = rule
        with override(others):
            for op, kernels in before.items():
                _prepared[op] = others[op], kernels, dict(op.py_kernels), rules[op]
            yield
    finally:
        for op, (_, kernels, _, _) in ready.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            rules.pop(op, None)
