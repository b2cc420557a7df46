"""What can be chosen about an exploration, said whole or one by one."""

import json

import pytest

from tensoropt.api import _settings_of
from tensoropt.errors import TensorOptError
from tensoropt.question.constraints import constraints_of
from tensoropt.question.settings import Settings, settings_fields

PINS = {"pin": [{"operators": "a*", "axes": {"gpu": "batch"}}]}


def test_one_by_one_and_whole_are_the_same():
    chosen = {"optimizer": "sgd", "micro_batches": [1, 2], "epsilon": 0.0}
    whole = Settings(optimizer="sgd", micro_batches=(1, 2), epsilon=0.0)
    assert _settings_of(None, chosen) == whole
    assert _settings_of(whole, {}) is whole
    assert _settings_of(None, {}) == Settings()
    for memory, size in (("24GiB", 24 * 2**30), (1e9, 1e9), (None, None)):
        assert _settings_of(None, {"memory": memory}).memory_bytes == size


def test_settings_are_written_in_the_order_that_saved_explorations_have():
    written = json.dumps(Settings(epsilon=0, memory_bytes=2**33).to_dict())
    assert written == (
        '{"mode": "train", "optimizer": "adam", "micro_batches": "auto", "memory_bytes": 8589934592, '
        '"epsilon": 0, "max_points": null, "method": "auto", '
        '"dtype": "auto", "recompute": "auto", "overlap": "default", '
        '"constraints": null, "measure": "all", "process_memory": true, "pipelines": "auto", '
        '"placements": "auto", "expert_imbalance": 1.0, "first": false}'
    )


def test_settings_of_another_version_are_refused_with_a_sentence():
    with pytest.raises(TensorOptError, match=r"'wisdom' is not a setting.*another version; explore again"):
        Settings.from_dict({**Settings().to_dict(), "wisdom": 3})
    # What does not say whether process memory was counted counts tensors.
    kept = Settings.from_dict({"mode": "inference"})
    assert kept == Settings(mode="inference", process_memory=False)


@pytest.mark.parametrize(("chosen", "said"), [
    ({"dtype": "int3"}, "unknown dtype 'int3'; use auto, float32 or bfloat16"),
    ({"pipelines": "some"}, "unknown pipelines 'some'; use auto, always or never"),
    ({"method": "dp"}, "unknown method 'dp'; use auto, ldp or elimination"),
    ({"expert_imbalance": 0.5}, "expert_imbalance 0.5 is not at least 1; 1.2 says that the busiest rank"),
    ({"max_points": "few"}, "max_points 'few' is not valid: Input should be a valid integer"),
    ({"micro_batches": [2, 0]}, "micro-batch counts [2, 0] must be at least 1"),
    ({"micro_batches": ()}, "no micro-batch count to search; use at least one"),
    ({"max_points": 1}, "max_points 1 leaves no frontier; use at least 2"),
    ({"optimizer": "lion"}, "unknown optimizer 'lion'; use sgd, momentum, adam, adam_fused"),
])  # fmt: skip
def test_what_means_nothing_is_said_with_what_does(chosen, said):
    with pytest.raises(TensorOptError) as error:
        Settings(**chosen)
    assert str(error.value).startswith(said)


VALUES = {
    "micro_batches": (1, 4), "memory_bytes": 24.0 * 2**30, "epsilon": 0.005, "max_points": 24,
    "constraints": None, "process_memory": True, "first": True,
    "expert_imbalance": 1.25,
}  # fmt: skip


@pytest.mark.parametrize("setting", list(settings_fields()), ids=lambda setting: setting.name)
def test_what_is_written_is_read_again(setting):
    for value in setting.choices or (VALUES[setting.name],):
        if value is not None and not isinstance(value, bool):
            assert setting.read(setting.write(value)) == value
    assert setting.help
    assert setting.option(setting.default) == []


@pytest.mark.parametrize("name", ["epsilon", "memory_bytes"])
def test_what_is_given_twice_is_named(name):
    with pytest.raises(TensorOptError, match=rf"{name} is given twice, as {name}= and in settings="):
        _settings_of(Settings(), {name: 0.5})
    with pytest.raises(TensorOptError, match="give one of them"):
        _settings_of(None, {"memory": "24GiB", "memory_bytes": 1.0})


def test_what_is_no_setting_is_refused_as_python_does():
    with pytest.raises(TypeError, match="'epsilom' is not a setting; there are mode, optimizer"):
        _settings_of(None, {"epsilom": 0.5})


def test_constraints_of_any_kind_are_read(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(PINS))
    for given in (PINS, tmp_path / "c.json", constraints_of(PINS)):
        assert Settings(constraints=given).constraints == constraints_of(PINS)  # type: ignore[arg-type]
