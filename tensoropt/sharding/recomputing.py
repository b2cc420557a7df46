"""Part of a step whose inside backward makes again instead of keeping it (Chen et al., arXiv 1604.06174).

What ``torch.utils.checkpoint`` does, for code that draws no numbers from PyTorch's generators, issues the
same calls each time and is never stopped early. That one looks after all else as well, in several calls of
Python for every saved tensor: a step of a small transformer on two CPU ranks, all blocks recomputed, took
71 instead of 60 ms with it (medians of 12, alternating).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Run = Callable[..., Any]


def recomputed(run: Run, *inputs: Any) -> Any:
    """``run(*inputs)``; autograd keeps ``inputs`` of it, which hooks of a user's on what is saved see, and no
    tensor else.

    ``run`` runs a second time when backward first needs one of its tensors, and from then on what backward
    still needs is alive.

    Args:
        run: makes the same tensors each time it is called. It runs in the precision of the autocast, if any,
            that ``recomputed`` was called in.

    Raises:
        RuntimeError: from backward, PyTorch's own if an input was changed in place since.
    """
    inside = _Inside(run, inputs)
    with saved_tensors_hooks(inside.leave, inside.take):
        return run(*inputs)


class _Given(torch.autograd.Function):
    """Has autograd save tensors; nothing goes back through it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        # Not plain references: autograd notices when an input is changed in place before backward, frees them
        # with the graph, and shows them to hooks of the user's.
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nobody has its result")


class _Inside:
    """The tensors that autograd wanted to save in one run. Lives as long as autograd may ask for one."""

    def __init__(self, run: Run, inputs: tuple[Any, ...]):
        self._run = run
        self._others = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        self._places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        # Without an input that requires a gradient the function would get no node, and nowhere to save to.
        device = inputs[self._places[0]].device if self._places else None
        anchor = torch.empty((), requires_grad=True, device=device)
        self._given: Any = _Given.apply(anchor, *(inputs[i] for i in self._places)).grad_fn
        self._autocast = _autocast_now(inputs)
        self._count = 0
        self._made: dict[int, torch.Tensor] = {}

    def leave(self, tensor: torch.Tensor) -> int:
        """Autograd gets a number in place of the tensor."""
        self._count += 1
        return self._count - 1

    def take(self, number: int) -> torch.Tensor:
        if number not in self._made:  # all of them are missing; or, with a kept graph, gone once more
            self._make()
        # Each is needed once: taken out, it is freed as soon as backward is past it.
        return self._made.pop(number)

    def _make(self) -> None:
        made = self._made
        made.clear()

        def keep(tensor: torch.Tensor) -> int:
            made[len(made)] = tensor.detach()  # itself, it would keep the graph alive that it belongs to
            return len(made)

        own = list(self._others)
        for place, value in zip(self._places, self._given.saved_tensors, strict=True):
            # Cut off from the first run's graph, but requiring gradients where it did, or autograd would save
            # other tensors this time and the numbers would not match.
            own[place] = value.detach().requires_grad_(value.requires_grad)
        with saved_tensors_hooks(keep, _no_backward), torch.enable_grad(), self._autocast():
            self._run(*own)
        # The numbers that forward gave out are positions in the order of saving: they mean the same tensors
        # only if the region saves as many again.
        if len(made) != self._count:
            raise RuntimeError(
                f"a recomputed region saved {self._count} tensors in forward and {len(made)} when it ran"
                " again; it must do the same each time"
            )


def _no_backward(number: int) -> torch.Tensor:
    raise RuntimeError("a recomputed region ran backward inside itself")


def _autocast_now(inputs: tuple[Any, ...]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes the context of now again, in which the devices of ``inputs`` compute."""
    kind = next((x.device.type for x in inputs if isinstance(x, torch.Tensor)), "cpu")
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext
    dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype=dtype, cache_enabled=cached)
