"""A check whether PyTorch has a kernel of an operator for a type of device."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tensoropt.ops.calls import LocalCall
from tensoropt.ops.overloads import FUNCTIONS

_KEYS = {"cuda": "CUDA", "cpu": "CPU"}
_ANY_DEVICE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")


def has_kernel(target: str, device_type: str) -> bool | None:
    """Return whether an operator (``aten.linear.default``) runs on ``cpu`` or ``cuda``; None if unknown."""
    # Our kernels, and the model's own Python, call other operators.
    if LocalCall(target, (), {}).is_kernel or target.startswith(f"{FUNCTIONS}."):
        return True
    namespace, packet, overload = target.split(".")
    name = packet if overload == "default" else f"{packet}.{overload}"
    custom = torch._library.custom_ops.OPDEFS.get(f"{namespace}::{packet}")
    if custom is not None:  # with kernels in Python; None is a kernel for any device
        return not {None, device_type}.isdisjoint(custom._backend_fns)
    if device_type == "cuda" and not torch.backends.cuda.is_built():
        return name not in _cpu_only() if namespace == "aten" else None
    try:
        found: Any = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(found(f"{namespace}::{name}", key) for key in (_KEYS[device_type], *_ANY_DEVICE))
    except RuntimeError:  # not registered in this process
        return None


@cache
def _cpu_only() -> frozenset[str]:
    """Return the PyTorch operators, without namespace, with kernels for CPUs but none for CUDA."""
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        return frozenset()
    table = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    return _cpu_only_of(table.read_text(encoding="utf-8")) if table.is_file() else frozenset()


def _cpu_only_of(table: str) -> frozenset[str]:
    """Parse PyTorch's table of native functions; return the operators with kernels for CPUs only."""
    keys: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    for entry in re.split(r"^- func: ", table, flags=re.MULTILINE)[1:]:
        name = entry.partition("(")[0].strip()
        if delegate := re.search(r"^  structured_delegate: (\S+)", entry, re.MULTILINE):
            delegates[name] = delegate.group(1)
        if dispatch := re.search(r"^  dispatch:.*\n((?:    .*\n)+)", entry, re.MULTILINE):
            lines = dispatch.group(1).splitlines()
            keys[name] = {key.strip() for line in lines for key in line.partition(":")[0].split(",")}
    # An operator without a dispatch table is made of others, and runs wherever these do.
    of = {name: keys.get(delegates.get(name, name), set()) for name in (*keys, *delegates)}
    other = {"CUDA", *_ANY_DEVICE, "CompositeExplicitAutogradNonFunctional"}
    return frozenset(name for name, found in of.items() if "CPU" in found and found.isdisjoint(other))
