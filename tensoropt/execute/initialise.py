"""Drawing of initial weights by a function, one layer at a time.

``init_weights(module)`` is called for each module as by ``model.apply(init_weights)``, with the same random
numbers. A tensor is in memory only between the first and the last call that touches it, and otherwise on the
meta device. Trial calls on the meta device find out beforehand which tensors each call touches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.engine.gradients import storage_key
from tensoropt.errors import PlanError

InitWeights = Callable[[nn.Module], Any]


@dataclass(eq=False)
class _Cell:
    """A tensor of the model with all its names.

    Attributes:
        own: the model's own tensor.
        names: its state-dict names, the main one first.
        slots: the places where it is registered: (a module's dict, key).
        visits: the ascending numbers of the calls of ``init_weights`` that touch it.
    """

    own: torch.Tensor
    names: list[str] = field(default_factory=list)
    slots: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)

    def make(self, device: str) -> torch.Tensor:
        """Copy the model's tensor to ``device``; the copy has no values if either is on the meta device."""
        own = self.own.detach()
        if device == "meta" or own.is_meta:
            value = torch.empty_like(own, device=device)
        else:
            value = own.to(device, copy=True)
        return nn.Parameter(value, self.own.requires_grad) if isinstance(self.own, nn.Parameter) else value


class _Watch(TorchDispatchMode):
    """Records which of the model's tensors operators read or write."""

    def __init__(self, cells: dict[int, _Cell]):
        super().__init__()
        self.cells = cells
        self.touched: set[_Cell] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and storage_key(value) in self.cells:
                self.touched.add(self.cells[storage_key(value)])
        return func(*args, **(kwargs or {}))


@contextmanager
def _on_meta() -> Iterator[None]:
    """Create new tensors on the meta device, and replace ``trunc_normal_``, which writes nothing there."""
    own = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor.normal_()  # type: ignore[assignment]
    try:
        with torch.device("meta"):
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = own


class Initialisation:
    """The values that ``init_weights`` gives a model, without holding the whole model in memory.

    Args:
        model: the model, on any device, left unchanged; the function sees its values if it has any.
        init_weights: a function that is called with each module, under ``torch.no_grad()``.
        seed: the seed of PyTorch's generator at the first call.

    Raises:
        PlanError: the function fails on the meta device, where tensors have no values.
    """

    def __init__(self, model: nn.Module, init_weights: InitWeights, seed: int):
        self.init_weights = init_weights
        self.seed = seed
        self.names = {module: name or "the model" for name, module in model.named_modules()}
        self.modules = list(_children_first(model))
        self.cells = _cells(model)
        self._by_name = {name: cell for cell in self.cells for name in cell.names}
        self._shadows = {cell: cell.make("meta") for cell in self.cells}
        for visit in range(len(self.modules)):
            for cell in self._call(visit):
                cell.visits.append(visit)

    def __contains__(self, name: str) -> bool:
        """Return whether the function sets or changes a tensor."""
        return name in self._by_name and bool(self._by_name[name].visits)

    def order(self, names: Collection[str]) -> list[str]:
        """Return ``names`` in the order in which :meth:`stream` yields them."""
        name_of = {self._by_name[name]: name for name in names}
        # `cells` are in order, and sorting is stable for those that one call finishes.
        cells = [cell for cell in self.cells if cell in name_of]
        return [name_of[cell] for cell in sorted(cells, key=lambda cell: cell.visits[-1])]

    def stream(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, value) of tensors on the CPU, each as soon as no further call changes it.

        Every run yields the same values. Calls after the last that touches one of ``names`` are skipped.
        """
        name_of = {self._by_name[name]: name for name in names}
        alive: dict[_Cell, torch.Tensor] = {}
        state = torch.Generator().manual_seed(self.seed).get_state()
        for visit in range(max((cell.visits[-1] for cell in name_of), default=-1) + 1):
            touched = [cell for cell in self.cells if visit in cell.visits]
            alive |= {cell: cell.make("cpu") for cell in touched if cell not in alive}
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                self._call(visit, alive)
                state = torch.get_rng_state()
            for cell in touched:
                if visit == cell.visits[-1]:
                    if cell in name_of:
                        # In one expression: a local name would keep the value alive during the next call.
                        yield name_of[cell], alive.pop(cell).detach()
                    else:
                        del alive[cell]

    def _call(self, visit: int, alive: dict[_Cell, torch.Tensor] | None = None) -> set[_Cell]:
        """Call the function for one module; return the tensors that it touched.

        Args:
            alive: the tensors in memory, replaced where the function replaces them; all others are on the
                meta device. None for a trial.
        """
        module = self.modules[visit]
        with self._standing(alive or {}) as standing, torch.no_grad():
            watch = _Watch({storage_key(value): cell for cell, value in standing.items()})
            try:
                with watch, _on_meta() if alive is None else nullcontext():
                    self.init_weights(module)
            except Exception as error:
                where = " on the meta device, where it may not read values" if alive is None else ""
                raise PlanError(
                    f"init_weights failed for {self.names[module]} ({type(module).__name__}){where}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            touched = watch.touched
            for cell, value in standing.items():
                holder, key = cell.slots[0]
                replacement = next((h[k] for h, k in cell.slots if h[k] is not value), holder[key])
                if replacement is value and storage_key(replacement) in watch.cells:
                    continue
                # `module.weight = …` or `module.weight.data = …` leaves nothing of the earlier tensor.
                touched.add(cell)
                if replacement is None or tuple(replacement.shape) != tuple(cell.own.shape):
                    shape = None if replacement is None else tuple(replacement.shape)
                    raise PlanError(
                        f"init_weights gave {cell.names[0]} the shape {shape} instead of "
                        f"{tuple(cell.own.shape)}; it must keep the shapes of tensors"
                    )
                if alive is not None and cell in alive:
                    alive[cell] = replacement
                else:  # of the trial nothing is kept in memory
                    self._shadows[cell] = cell.make("meta")
            # The call on the meta device did not show this: the value written is lost.
            unseen = [cell.names[0] for cell in touched if alive is not None and cell not in alive]
            if unseen:
                raise PlanError(
                    f"init_weights touched {unseen[0]} when called for {self.names[module]}, but not in "
                    "its trial call on the meta device; it must do the same in every call"
                )
        return touched

    @contextmanager
    def _standing(self, alive: dict[_Cell, torch.Tensor]) -> Iterator[dict[_Cell, torch.Tensor]]:
        """Put tensors into the model temporarily: those in ``alive``, and otherwise meta tensors."""
        standing = {cell: alive.get(cell, shadow) for cell, shadow in self._shadows.items()}
        before = [(holder, key, holder[key]) for cell in self.cells for holder, key in cell.slots]
        try:
            for cell, value in standing.items():
                for holder, key in cell.slots:
                    holder[key] = value
            yield standing
        finally:
            for holder, key, value in before:
                holder[key] = value


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _cells(model: nn.Module) -> list[_Cell]:
    cells: dict[int, _Cell] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for name, value in holder.items():
                if value is None:
                    continue
                cell = cells.setdefault(id(value), _Cell(value))
                cell.names.append(f"{path}.{name}" if path else name)
                if not any(registered is holder and key == name for registered, key in cell.slots):
                    cell.slots.append((holder, name))
    return list(cells.values())
