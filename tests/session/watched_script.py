"""A script of ``export --as fsdp2`` whose second step is watched: ``watched_script.py SCRIPT OUT ...`` under
torchrun.

Rank 0 writes what it sent, and the most bytes that its tensors had at once, to ``OUT``.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.verify.recorder import CollectiveRecorder, summarise


def is_wrapped(types: Iterable[type]) -> bool:
    """Whether an operator is one of tensors that are made of others, such as DTensors, whose own operators
    come by as well."""
    return any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types)


class Sent(CollectiveRecorder):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if is_wrapped(types) else super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, func: Any, args: Any, result: Any) -> None:
        # DTensors also wrap what is in flight, and wait for it.
        if func.namespace == "c10d" or isinstance(args[-1], str):
            super()._note(func, args, result)


class Held(TorchDispatchMode):
    """The bytes of all storages that are alive, some of which FSDP2 empties and fills again."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak_bytes = 0
        with torch.utils._python_dispatch._disable_current_modes():
            self.see(one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))

    def see(self, values: Iterable[torch.Tensor]) -> None:
        for value in values:
            if value.device.type == "cpu" and value.layout == torch.strided:
                storage = value.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        alive = {key: one for key, made in self.storages.items() if (one := made()) is not None}
        self.storages = {key: self.storages[key] for key in alive}
        self.peak_bytes = max(self.peak_bytes, sum(one.nbytes() for one in alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_wrapped(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        values = tree_leaves((args, kwargs, result))
        self.see(value for value in values if type(value) in (torch.Tensor, torch.nn.Parameter))
        return result


def watch(script: Any, out: Path) -> None:
    """Run a script's training, and watch from the beginning of its second step to that of its third."""
    own, number = script.step, 0
    shape = (1, script.REPLICAS, script.SHARDS, script.TENSOR)
    sent: Sent
    held: Held

    def step(*args: Any) -> Any:
        nonlocal number, sent, held
        number += 1
        if number == 2:
            gc.collect()
            held, sent = Held(), Sent(shape)
            held.__enter__()
            sent.__enter__()
        elif number == 3:
            sent.__exit__(None, None, None)
            held.__exit__(None, None, None)
            # Nothing is sent in a group of one; the last is the loss, which is printed.
            issued = summarise(one for one in sent.issued[:-1] if one.axes)
            if dist.get_rank() == 0:
                out.write_text(json.dumps({"sent": issued, "peak_bytes": held.peak_bytes}))
        return own(*args)

    script.step = step
    script.main()


if __name__ == "__main__":
    path, found = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    watch(module, found)
