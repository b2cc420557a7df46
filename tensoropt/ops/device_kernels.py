"""The types of devices for which PyTorch's operators have a kernel."""

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
    if LocalCall(target, (), {}).is_kernel:  # one of ours, which calls operators for any device
        return True
    namespace, packet, overload = target.split(".")
    name = packet if overload == "default" else f"{packet}.{overload}"
    if namespace == FUNCTIONS:  # the model's own Python, which calls other operators
        return True
    if (types := _python_types(f"{namespace}::{packet}")) is not None:
        return None in types or device_type in types
    if device_type == "cuda" and not torch.backends.cuda.is_built():
        return name not in _cpu_only() if namespace == "aten" else None
    try:
        found: Any = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(found(f"{namespace}::{name}", key) for key in (_KEYS[device_type], *_ANY_DEVICE))
    except RuntimeError:  # not registered in this process
        return None


def _python_types(name: str) -> frozenset[str | None] | None:
    """Return the device types of a ``custom_op``'s kernels, with None for any; None for other operators."""
    definition = torch._library.custom_ops.OPDEFS.get(name)
    return None if definition is None else frozenset(definition._backend_fns)


@cache
def _cpu_only() -> frozenset[str]:
    """Return PyTorch's operators, without namespace, with kernels for CPUs and not CUDA."""
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        return frozenset()
    table = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    return _cpu_only_of(table.read_text(encoding="utf-8")) if table.is_file() else frozenset()


def _cpu_only_of(table: str) -> frozenset[str]:
    """Parse PyTorch's table of native functions; return the operators with kernels for CPUs, not CUDA."""
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
