"""Padding of batches of texts, which loaders pad only to their own longest text, to the plan's length."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader, get_worker_info

from tensoropt.engine.parallel_model import parallel_of

_MASK = "attention_mask"
_TEXTS = (_MASK, "decoder_attention_mask", "labels")
"""Arguments with two dims, of which the second is the texts' length."""
_IGNORED = -100
"""The target that transformers' losses ignore."""
_SAID: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()
"""Model -> whether the padding of its batches was reported; shared with all loader workers."""


def padded(loader: DataLoader[Any], model: nn.Module) -> DataLoader[Any]:
    """Return a loader whose shorter batches are padded to the plan's length.

    Only batches with an attention mask are padded: without one the model might read the padding. The model's
    call refuses longer batches.
    """
    own = copy.copy(loader)
    own.collate_fn = _PlanLength(loader.collate_fn, model)
    own.__dict__["_iterator"] = None
    return own


class _PlanLength:
    def __init__(self, collate: Callable[[Any], Any], model: nn.Module):
        parallel = parallel_of(model)
        self.collate, self.shapes = collate, parallel.input_shapes()
        self.token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
        self.speaks = parallel.engine.runtime.rank == 0
        if model not in _SAID:
            _SAID[model] = torch.zeros((), dtype=torch.bool).share_memory_()
        self.said = _SAID[model]

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if not isinstance(batch, MutableMapping) or _MASK not in batch:
            return batch
        values = {
            name: value
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
            and value.dim() > 1
            and value.dim() == len(self.shapes.get(name, ()))
        }
        # Sizes of the batch and of the plan.
        lengths = {
            (values[name].shape[1], self.shapes[name][1])
            for name in _TEXTS
            if name in values and values[name].dim() == 2 and not values[name].is_floating_point()
        }
        shorter = {pair for pair in lengths if pair[0] < pair[1]}
        for name, value in values.items():
            length, wanted = value.shape[1], self.shapes[name][1]
            if (length, wanted) in shorter:
                rest = [0, 0] * (value.dim() - 2)
                batch[name] = pad(value, [*rest, 0, wanted - length], value=self._filler(name))
        if shorter:
            self._say(batch[_MASK])
        return batch

    def _filler(self, name: str) -> int:
        if name == "labels":
            return _IGNORED
        return self.token if name.endswith("input_ids") else 0

    def _say(self, mask: torch.Tensor) -> None:
        worker = get_worker_info()
        if not self.speaks or self.said or (worker is not None and worker.id):
            return
        self.said.fill_(True)
        share = float((mask == 0).float().mean())
        warnings.warn(
            f"batches are padded to the plan's length of {mask.shape[1]} tokens (labels {_IGNORED}, "
            f"{_MASK} 0): {share:.0%} of the first one is padding; if that is much, explore the model with a "
            "shorter length, or pack texts",
            stacklevel=2,
        )
