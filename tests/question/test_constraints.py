"""The file of constraints, and that settings carry it."""

import json

import pytest

from tensoropt import ConstraintError, Settings
from tensoropt.files import DOCUMENT_BYTES
from tensoropt.question.constraints import _load_constraints, constraints_of

YAML = 'pin: [{operators: "a*", axes: {gpu: batch}}]\ntogether: [[a, b]]\n'
DATA = {"pin": [{"operators": "a*", "axes": {"gpu": "batch"}}], "together": [["a", "b"]]}


def test_yaml_and_json_say_the_same(tmp_path):
    (tmp_path / "c.yaml").write_text(YAML)
    (tmp_path / "c.json").write_text(json.dumps(DATA))
    found = _load_constraints(tmp_path / "c.yaml")
    assert found == _load_constraints(tmp_path / "c.json") == constraints_of(DATA)
    assert constraints_of(found) is found
    assert constraints_of(None) is None


def test_settings_keep_the_content():
    settings = Settings(constraints=constraints_of(DATA), micro_batches=(1, 2))
    data = json.loads(json.dumps(settings.to_dict()))
    assert data["constraints"] == DATA
    assert Settings.from_dict(data) == settings
    assert Settings.from_dict({**data, "constraints": None}).constraints is None
    del data["constraints"]  # as explorations of before were saved
    assert Settings.from_dict(data).constraints is None


@pytest.mark.parametrize(("content", "says"), [
    (b"pin: [", "not valid YAML"),
    (b"\xff\xfe\x00", "not valid YAML"),
    (b"", "a mapping with pin"),
    (b"pin: [{operators: a}]", "pin 1: 'axes' gives the dim"),
    (b"#" * (DOCUMENT_BYTES + 1), "larger than 1 MiB"),
])  # fmt: skip
def test_a_file_that_cannot_be_used(tmp_path, content, says):
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ConstraintError, match=says) as caught:
        _load_constraints(file)
    assert "c.yaml" in str(caught.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConstraintError, match="cannot be read"):
        _load_constraints(tmp_path)
