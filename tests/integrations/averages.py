"""The exponential moving average of a model's parameters, as scripts keep it, under any plan and without."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensoropt
from tensoropt.engine.parallel_model import ATTRIBUTE

DECAY = 0.8


def in_two_parts(folder: Path, plan: str | None, epochs: int, begin: Callable[[], Any]) -> dict[str, Any]:
    """What is found by a loop that averages, and is saved in its middle; then from the middle again.

    Args:
        begin: makes (model, optimizer, scheduler, loader for evaluation, epoch), of which
            ``epoch(number, average)`` gives the losses, norms and rates of an epoch.
    """
    found: dict[str, Any] = {}
    for part in ("first", "again"):
        model, optimizer, scheduler, evaluation, epoch = begin()
        begun, average, rows = 0, Average(model), []
        if part == "again" and plan is not None:
            begun = tensoropt.load_checkpoint(folder / "middle", model, optimizer, scheduler)["epoch"]
            average.load(folder / "average")
        for number in range(begun, epochs):
            rows.append(epoch(number, average))
            if part == "first" and number + 1 == epochs // 2 and plan is not None:
                extra = {"epoch": number + 1}
                tensoropt.save_checkpoint(folder / "middle", model, optimizer, scheduler, extra)
                average.save(folder / "average")
        if part == "again" and plan is None:
            rows = rows[epochs // 2 :]
        joined = [[x for of_epoch in kind for x in of_epoch] for kind in zip(*rows, strict=True)]
        of_part = dict(zip(("losses", "norms", "rates"), joined, strict=True))
        model.eval()
        with torch.no_grad():
            of_part["evaluated"] = [float(model(**batch).loss) for batch in evaluation]
            with average.in_place():
                of_part["averaged"] = [float(model(**batch).loss) for batch in evaluation]
        found[part] = of_part
    return found


class Average:
    """The average of all parameters since it was made; a rank averages what it has of them.

    Saved as the parameters of a checkpoint, which any plan of the model reads.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.values = self._parameters()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are, after a step."""
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(parameter, 1 - DECAY)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the average as its parameters, until the block ends."""
        own = self._parameters()
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    def save(self, path: Path) -> None:
        """All ranks together."""
        if not hasattr(self.model, ATTRIBUTE):
            torch.save(self.values, path)
            return
        with self.in_place():
            tensoropt.save_checkpoint(path, self.model)

    def load(self, path: Path) -> None:
        """All ranks together; the parameters stay."""
        if not hasattr(self.model, ATTRIBUTE):
            self.values = torch.load(path)
            return
        own = self._parameters()
        tensoropt.load_checkpoint(path, self.model)
        self.values = self._parameters()
        self._put(own)
