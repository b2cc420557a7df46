"""What can be chosen about an exploration, said whole or one by one."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.plan.constraints import constraints_of
from tensoropt.plan.settings import Chosen, Settings, settings_of

PINS = {"pin": [{"operators": "a*", "axes": {"gpu": "batch"}}]}


def test_one_by_one_and_whole_are_the_same() -> None:
    chosen = Chosen(optimizer="sgd", micro_batches=[1, 2], epsilon=0.0)
    whole = Settings(optimizer="sgd", micro_batches=(1, 2), epsilon=0.0)
    assert settings_of(None, chosen) == whole
    assert settings_of(whole, Chosen()) is whole
    assert settings_of(None, Chosen()) == Settings()


def test_chosen_names_the_fields_of_settings() -> None:
    assert list(Chosen.__annotations__) == list(Settings.__dataclass_fields__)


@pytest.mark.parametrize("name", ["epsilon", "memory_bytes"])
def test_what_is_given_twice_is_named(name: str) -> None:
    with pytest.raises(TensorOptError, match=rf"{name} is given twice, as {name}= and in settings="):
        settings_of(Settings(), {name: 0.5})  # type: ignore[misc]


def test_what_is_no_setting_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="'epsilom' is no setting; there are mode, optimizer"):
        settings_of(None, {"epsilom": 0.5})  # type: ignore[typeddict-unknown-key]


def test_settings_are_frozen_and_checked() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().epsilon = 0.5  # type: ignore[misc]
    with pytest.raises(TensorOptError, match="epsilon 2 is not between 0 and 1"):
        Settings(epsilon=2)


def test_settings_come_back_from_what_is_saved() -> None:
    found = Settings(micro_batches=[1, 4], dtype="bfloat16")
    assert found.micro_batches == (1, 4)
    assert Settings.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_constraints_of_any_kind_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(PINS))
    for given in (PINS, tmp_path / "c.json", constraints_of(PINS)):
        assert Settings(constraints=given).constraints == constraints_of(PINS)  # type: ignore[arg-type]
