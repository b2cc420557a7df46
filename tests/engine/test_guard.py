"""What a plan would not follow is refused in one process as well: modes, settings and buffers of modules."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.runtime import content_hash
from tensoropt.errors import PlanError
from tensoropt.execute import executable, original_shape, parallelize
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators
from tests.execute.jobs import captured_once

X = torch.randn(8, 4)


class StaysInEvaluation(nn.BatchNorm1d):
    """As frozen norms are written."""

    def train(self, mode: bool = True):
        return super().train(False)


def unsplit(kind: str, model: Any, **how: Any) -> Any:
    """The model on one device; models of a kind are built alike."""
    with captured_once(("test_guard", kind)):
        captured = executable.capture(model, (X,), **how)
        strategy = unsplit_strategy(group_operators(refine_graph(captured.graph)))
        return parallelize(model, strategy, (X,), as_measured=False, **how)


def parallel() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    model[3].weight.requires_grad_(False)
    return unsplit("parallel", model, loss=torch.sum)


def set_buffer(model: Any) -> None:
    model[1].running_mean = torch.zeros(4)


@pytest.mark.parametrize(("change", "says"), [
    (lambda m: m[1].eval(), "1 is in evaluation mode while the plan runs it in training mode"),
    (lambda m: m.eval()[2].train(), "2 is in training mode while the plan runs it in evaluation mode"),
    (lambda m: setattr(m[2], "p", 0.1), "2.p is 0.1 now, but was 0.3 when the model was parallelized"),
    (lambda m: delattr(m[2], "p"), "2.p is not set now, but was 0.3"),
    (lambda m: setattr(m[1], "momentum", 0.01), "1.momentum is 0.01 now"),
    (set_buffer, "the buffer 1.running_mean was replaced after parallelize"),
    (lambda m: m[3].weight.requires_grad_(), "3.weight requires a gradient now, but was frozen"),
])  # fmt: skip
def test_what_a_module_reads_of_itself(change, says):
    assert_refused(parallel(), change, says)


def assert_refused(model: Any, change: Any, says: str) -> None:
    """Whether a model that was run says what was changed since."""
    model(X)
    change(model)
    with pytest.raises(PlanError, match=says):
        model(X)


class Offset(nn.Module):
    """What another class computes for its children."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.offset).sum()


class Reading(Offset):
    """Reads numbers, functions and lists of its own, also in a method, a property and a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = torch.relu
        self.unread = torch.relu
        self.scale: float | None = None
        self.factors = [1.0, 2.0]
        self.table = {"a": 1.0}
        self.power = 2
        self.shift = 0.5
        self.mask = torch.ones(4)
        self.partly = functools.partial(torch.mul, other=2.0)

    @property
    def shifted(self) -> float:
        return self.shift + 1

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.power + self.shifted + self.partly(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.layer(x)) * (self.scale or self.table["a"]) * self.mask
        return super().forward(sum(factor * self.helped(x) for factor in self.factors))


@pytest.mark.slow
@pytest.mark.parametrize(("change", "says"), [
    (lambda m: setattr(m, "act", torch.tanh), "0.act is tanh now, but was relu"),
    (lambda m: setattr(m, "scale", 2.0), "0.scale is 2.0 now, but was None"),
    (lambda m: m.factors.append(3.0), r"0.factors is \[1.0, 2.0, 3.0\] now, but was \[1.0, 2.0\]"),
    (lambda m: m.table.update(a=2.0), "0.table is"),
    (lambda m: setattr(m, "power", 3), "0.power is 3 now"),
    (lambda m: setattr(m, "power", torch.ones(2)), "0.power is a tensor of shape"),
    (lambda m: setattr(m, "shift", 3.0), "0.shift is 3.0 now"),
    (lambda m: setattr(m, "offset", 3.0), "0.offset is 3.0 now"),
    (lambda m: m.mask.zero_(), "0.mask was changed or replaced after parallelize"),
    (lambda m: setattr(m, "mask", torch.zeros(4)), "0.mask was changed or replaced after parallelize"),
    (lambda m: setattr(m, "partly", torch.neg), "0.partly is neg now"),
])  # fmt: skip
def test_what_a_forward_reads_in_whatever_way(change, says):
    model = unsplit("reading", nn.Sequential(Reading()))
    model(X)
    model[0].unread = torch.tanh
    assert_refused(model, lambda m: change(m[0]), says)


def test_what_is_followed_or_not_read():
    model = parallel()
    model[0].in_features = 5  # which no forward reads
    model[1].running_mean.zero_()
    model[0].eval()
    assert torch.isfinite(model.eval()(X))
    assert torch.isfinite(model.train()(X))
    assert original_shape(model[0].weight) == (4, 4)


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.rate, self.unread, self.use_cache, self.sizes = 0.5, 3, True, [1, 2]


def _doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * module.factor  # type: ignore[operator]


class Configured(nn.Module):
    """Reads a config, its class, and what a function reads of it."""

    power: float = 2.0
    unread = 5

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config, self.factor = nn.Linear(4, 4), Settings(), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _doubled(self, self.layer(x)) * self.config.rate * sum(self.config.sizes)
        y = y if self.config.use_cache else y * 1.0
        return (y.abs() ** self.power).sum()


def set_class(model: Any) -> None:
    type(model).power = 3.0


@pytest.mark.slow
@pytest.mark.parametrize(("change", "says"), [
    (lambda m: setattr(m.config, "rate", 0.25), "config.rate is 0.25 now, but was 0.5"),
    (lambda m: m.config.sizes.append(3), r"config.sizes is \[1, 2, 3\] now, but was \[1, 2\]"),
    (lambda m: setattr(m, "config", Settings()), "config is another Settings than when the model was"),
    (lambda m: setattr(m, "power", 1.0), "power is 1.0 now, but was 2.0 when"),
    (set_class, "power is 3.0 now, but was 2.0 when"),
    (lambda m: setattr(m, "factor", 1.0), "factor is 1.0 now, but was 2.0"),
])  # fmt: skip
def test_what_forward_reads_of_configs_and_classes(change, says):
    try:
        assert_refused(unsplit("configured", Configured()), change, says)
    finally:
        Configured.power = 2.0


def test_what_forward_does_not_read_of_them():
    model = unsplit("configured", Configured())
    model.config.unread, model.unread, model.config.use_cache, model.config.new = 4, 6, False, 1
    model(X)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_modules_that_stay_in_evaluation(training):
    """Also where the model as a whole was in evaluation when it was parallelized."""
    model = nn.Sequential(nn.Linear(4, 4), StaysInEvaluation(4)).train(training)
    unsplit(f"stays in evaluation {training}", model, loss=torch.sum)
    model.train()
    assert_refused(model, lambda m: setattr(m[1], "training", True), "1 is in training mode")


def test_hashes_tell_bits_shapes_and_types():
    values = [
        torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.randn(70_001),
        torch.tensor([0.0, 0.0, 0.0, -0.0]), torch.randn(5).bfloat16(), torch.tensor(True),
        torch.randn(3, dtype=torch.complex64), torch.empty(0),
    ]  # fmt: skip
    hashes = [int(content_hash(value)) for value in values]
    assert len(set(hashes)) == len(values)
    assert hashes == [int(content_hash(value.clone())) for value in values]
    large = torch.randn(1 << 20)
    before = int(content_hash(large))
    large[777_777] = torch.nextafter(large[777_777], torch.tensor(torch.inf))
    assert int(content_hash(large)) != before
    # Of a piece that begins anywhere, and of one that is not contiguous.
    assert content_hash(large[3:9]) == content_hash(large[3:9].clone())
    assert content_hash(large.view(4, -1).t()) == content_hash(large.view(4, -1).t().contiguous())
