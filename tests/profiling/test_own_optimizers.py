"""What is found of optimizers that people bring, beside those that are known, and what is refused."""

from __future__ import annotations

import pytest

from tensoropt.errors import MeasurementError, TensorOptError
from tensoropt.plan.plan import Plan
from tensoropt.profiling.optimizers import OPTIMIZERS, kind_of, make_optimizer, short_optimizer, with_kind
from tensoropt.question.settings import Settings, settings_fields
from tests.profiling import own_optimizers

OWN = f"{own_optimizers.__name__}:"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_known_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_optimizers, "known", lambda ps: make_optimizer(name, ps), raising=False)
    found, known = kind_of(with_kind(f"{OWN}known")), OPTIMIZERS[name]
    assert (found.state, found.transient) == (known.state, known.transient)
    assert found.traffic == 3 + 5 * known.state


@pytest.mark.parametrize(
    ("name", "state", "transient", "largest"),
    [("adamw", 2, 1, 0), ("rmsprop", 1, 1, 0), ("amsgrad", 3, 0, 2), ("lion", 1, 0, 3)],
)
def test_what_is_not_known_is_found(name: str, state: float, transient: float, largest: float) -> None:
    kind = kind_of(with_kind(f"{OWN}{name}"))
    assert (kind.state, kind.transient) == (state, transient)
    assert kind.largest == largest  # of optimizers that take one parameter after the other
    assert kind.made(7, (7, 2)) == transient + largest / 2
    assert kind.made(6, (7, 2)) == transient
    assert kind.traffic == 5 * state + 3
    assert len(kind.code) == 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adafactor", r"'row_var' of its state is \[24, 1\] for a parameter of \[24, 16\]"),
        ("muon", "stepped in pieces differs from one stepped whole"),
        ("normed", "stepped in pieces differs from one stepped whole"),
        ("lbfgs", "without a closure"),
        ("nothing", "must return a torch.optim.Optimizer"),
        ("missing", r"has no function 'missing'; define missing\(parameters\)"),
    ],
)
def test_what_shards_cannot_step_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        Settings(optimizer=f"{OWN}{name}")


def test_settings_and_plans_keep_what_was_found_and_run_no_code_again() -> None:
    settings = Settings(optimizer=f"{OWN}lion")
    again = Settings.from_dict(settings.to_dict())
    assert again == settings
    # Whoever reads it needs no file.
    elsewhere = settings.optimizer.replace(own_optimizers.__name__, "not.here")
    assert kind_of(Settings(optimizer=elsewhere).optimizer) == kind_of(settings.optimizer)
    with pytest.raises(TensorOptError, match="unknown optimizer"):
        Settings.from_dict({"optimizer": f"{OWN}lion"})
    field = next(field for field in settings_fields() if field.name == "optimizer")
    assert field.option(settings.optimizer) == ["--optimizer", f"{OWN}lion"]
    assert short_optimizer(settings.optimizer) == f"{OWN}lion"
    with pytest.raises(TensorOptError, match=r"unknown optimizer 'lion'; use sgd, .* or module.py:make"):
        Settings(optimizer="lion")
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        Plan.__pydantic_validator__.validate_assignment(Plan.model_construct(), "optimizer", "lion")
