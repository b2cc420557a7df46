"""What a parallelized model returns in training: the loss in the place where the model itself puts it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from tensoropt.capture.loss import find_loss
from tensoropt.errors import CaptureError


@dataclasses.dataclass
class Required:
    logits: torch.Tensor
    loss: torch.Tensor
    hidden: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class LooksAtItsFields:
    logits: torch.Tensor
    loss: torch.Tensor
    classes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.classes = self.logits.shape[-1]


class Named(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


class NamedOtherwise(NamedTuple):
    logits: torch.Tensor
    objective: torch.Tensor


class OwnConstructor:
    def __init__(self, loss: torch.Tensor, logits: torch.Tensor, *, scale: float = 2.0):
        self.loss, self.logits, self.scale = loss, logits, scale * logits.numel()


class Computed:
    """The loss is no attribute that can be set."""

    def __init__(self, values: torch.Tensor):
        self.values = values

    @property
    def loss(self) -> torch.Tensor:
        return self.values.mean()


def loss_and_logits() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(3, 4, requires_grad=True)
    return logits.mean(), logits


@pytest.mark.parametrize(
    "kind",
    [Required, Frozen, LooksAtItsFields, Named, NamedOtherwise, OwnConstructor],
    ids=lambda k: k.__name__,
)
def test_classes_with_required_fields(kind: Any) -> None:
    loss, logits = loss_and_logits()
    key = "objective" if kind is NamedOtherwise else "loss"
    more = {"hidden": None} if kind is Required else {}
    returned, found = find_loss(kind(**{key: loss, "logits": logits}, **more))
    assert found is loss
    again = returned.rebuild(torch.tensor(3.0))
    assert type(again) is kind
    assert getattr(again, key) == 3.0
    assert again.logits is None
    if isinstance(again, tuple):
        assert len(again) == 2


@pytest.mark.parametrize(
    "output",
    [
        lambda loss, logits: {"logits": logits, "loss": loss},
        lambda loss, logits: collections.OrderedDict(logits=logits, loss=loss),
        lambda loss, logits: collections.defaultdict(list, logits=logits, total=loss),
        lambda loss, logits: collections.UserDict(logits=logits, loss=loss),
        lambda loss, logits: [logits, loss],
        lambda loss, logits: (loss, logits),
    ],
)
def test_mappings_and_sequences(output: Any) -> None:
    loss, logits = loss_and_logits()
    original = output(loss, logits)
    returned, _ = find_loss(original)
    again = returned.rebuild(torch.tensor(3.0))
    assert type(again) is type(original)
    assert len(again) == 2
    values = list(again.values()) if hasattr(again, "values") else list(again)
    assert sorted(v is None for v in values) == [False, True]


def test_attrs_classes() -> None:
    attrs = pytest.importorskip("attrs")
    loss, logits = loss_and_logits()
    kind = attrs.make_class("Out", {"_logits": attrs.field(), "loss": attrs.field()}, frozen=True)
    returned, _ = find_loss(kind(logits=logits, loss=loss))
    again = returned.rebuild(torch.tensor(3.0))
    assert again.loss == 3.0
    assert again._logits is None


def test_what_cannot_be_made_is_refused_by_its_name() -> None:
    returned, _ = find_loss(Computed(loss_and_logits()[1]))
    with pytest.raises(CaptureError, match=r"test_returned\.Computed, and no such object"):
        returned.rebuild(torch.tensor(3.0))
