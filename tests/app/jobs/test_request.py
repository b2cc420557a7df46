"""Forms become questions of the command line, or a sentence; and questions become forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from onnx_app import model_file
from samples_app import FORM, data_url
from tensoropt_app.jobs.manager import written
from tensoropt_app.jobs.request import DTYPES, RequestError, cluster_of, devices_text, form_of, request_from
from tensoropt_app.jobs.uploads import Uploads

from tensoropt.cli.arguments import question_option
from tensoropt.cli.parser import parser
from tensoropt.cluster import list_clusters, load_cluster
from tensoropt.question.question import Question
from tensoropt.question.settings import settings_fields


@pytest.fixture
def uploads(tmp_path):
    return Uploads(tmp_path / "uploads")


def words(uploads: Uploads, **changes: Any) -> list[str]:
    return written(request_from({**FORM, **changes}, uploads).question, uploads.folder.parent)


def options(uploads: Uploads, **changes: Any) -> Any:
    return parser().parse_args(words(uploads, **changes))


def asked(line: str) -> Question:
    """The question of a command line."""
    found: Question = question_option(parser().parse_args(["explore", *line.split(), "--out", "out/x"]))
    return found


def test_a_form_asks_what_the_command_line_asks(uploads):
    for changes, line in (
        ({}, "zoo:gpt2-tiny --cluster dgx-h100"),
        ({"batch": "8", "dtype": "bfloat16"}, "zoo:gpt2-tiny --cluster dgx-h100 --batch 8 --dtype bfloat16"),
        ({"batch": "8,16"}, "zoo:gpt2-tiny --cluster dgx-h100 --batch 8,16"),
        ({"model": "zoo:gpt2-tiny?layers=4"}, "zoo:gpt2-tiny?layers=4 --cluster dgx-h100"),
        ({"model": "meta-llama/Llama-3.2-1B"}, "hf:meta-llama/Llama-3.2-1B --cluster dgx-h100"),
        ({"model": "hf:t5-small"}, "hf:t5-small --cluster dgx-h100"),
        ({"model": "llama3-8b", "sequence": "2048"}, "zoo:llama3-8b --cluster dgx-h100 --sequence 2048"),
        ({"devices": "dgx-h100x4"}, "zoo:gpt2-tiny --cluster dgx-h100x4"),
        ({"devices": "8xRTX-4090"}, "zoo:gpt2-tiny --cluster rtx-4090x2"),
        ({"more": "--micro-batches 1,2 --max-points 50 --memory 24GiB --seed 3 --mode inference"},
         "zoo:gpt2-tiny --cluster dgx-h100 --micro-batches 1,2 --max-points 50 --memory 24GiB --seed 3 "
         "--mode inference"),
        ({"more": "--planners zero,megatron --optimizer=sgd --no-process-memory"},
         "zoo:gpt2-tiny --cluster dgx-h100 --planners zero,megatron --optimizer sgd --no-process-memory"),
        ({"more": "--devices 2,4"}, "zoo:gpt2-tiny --cluster dgx-h100 --devices 2,4"),
    ):  # fmt: skip
        assert request_from({**FORM, **changes}, uploads).question == asked(line), changes


def test_every_setting_can_be_given_with_more_options(uploads):
    for setting in settings_fields():
        for value in setting.choices if setting.name != "dtype" else ():
            found = options(uploads, more=f"--{setting.flag} {value}")
            assert str(getattr(found, setting.key)) == str(value)
    for dtype in DTYPES:
        assert options(uploads, dtype=dtype).dtype == dtype


def test_an_upload_is_named_by_its_label_only(uploads, tmp_path):
    model_file(tmp_path / "x.onnx")
    field, label = uploads.keep_any(data_url((tmp_path / "x.onnx").read_bytes()), "mine.onnx")
    assert (field, label) == ("model", "mine.onnx")
    request = request_from({**FORM, "model": label, "more": "--dim batch=8 --loss mse"}, uploads)
    ((path, _),) = uploads.known().values()
    assert request.question.model == str(path)
    assert request.title == "mine.onnx on dgx-h100 · batch=8 · loss mse"
    assert (request.question.dims, request.question.loss) == ({"batch": 8}, "mse")
    with pytest.raises(RequestError, match="choose a listed model"):
        request_from({**FORM, "model": str(path)}, uploads)
    for name in ("batch", "sequence"):
        with pytest.raises(RequestError, match="leave this empty") as found:
            request_from({**FORM, "model": label, name: "16", "more": "--dim batch=8"}, uploads)
        assert found.value.field == name


@pytest.mark.parametrize(("changes", "field", "said"), [
    ({"model": "train.py:build"}, "model", "runs no Python files"),
    ({"model": "os:getcwd"}, "model", "runs no Python files"),
    ({"model": "/etc/passwd"}, "model", "choose a listed model"),
    ({"model": None}, "model", "choose a listed model"),
    ({"model": "gpt2-tiny?layer=2"}, "model", "'gpt2-tiny' has no option 'layer'; did you mean 'layers'"),
    ({"devices": "/etc/passwd"}, "devices", "choose devices from the list"),
    ({"devices": "8xGTX-9"}, "devices", "not a known kind of device"),
    ({"devices": "dgx-h100x999"}, "devices", "the limit here is 1,024"),
    ({"devices": None}, "devices", "choose devices"),
    ({"batch": "-1"}, "batch", "whole number"),
    ({"batch": "2.5"}, "batch", "neither a number"),
    ({"batch": "8,0"}, "batch", "batch of 0"),
    ({"sequence": "-1"}, "sequence", "whole number"),
    ({"more": "--out /etc"}, "more", "'--out' is not an option here"),
    ({"more": "--constraints /etc/passwd"}, "more", "'--constraints' is not an option here"),
    ({"more": "-h"}, "more", "'-h' is not an option here"),
    ({"more": "--ou /etc"}, "more", "'--ou' is not an option here"),
    ({"more": "--optimizer best"}, "more", "--optimizer is one of sgd, momentum, adam"),
    ({"more": "--max-points 1"}, "more", "max"),
    ({"more": "--micro-batches 1,3", "batch": "8"}, "more", "3 micro-batches do not divide the batch"),
    ({"more": "--memory 'lots"}, "more", "a quote is not closed"),
    ({"more": "--memory lots"}, "more", "24GiB"),
    ({"more": "x" * 3000}, "more", "at most 2,000"),
    ({"more": "--also-on /etc/passwd"}, "more", "choose devices from the list"),
    ({"more": "--planners best"}, "more", "unknown planner 'best'"),
])  # fmt: skip
def test_what_cannot_be_started_is_said_at_its_field(uploads, changes, field, said):
    with pytest.raises(RequestError, match=said) as found:
        words(uploads, **changes)
    assert found.value.field == field


def test_what_is_typed_is_never_a_file_of_this_machine(uploads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("devices: [{kind: T4, count: 2}]\nlinks: {intra_node: PCIe3}\n")
    (tmp_path / "config.json").write_text("{}")
    for changes in ({"devices": "mine.yaml"}, {"devices": "./mine.yaml"}, {"more": "--also-on mine.yaml"},
                    {"model": "config.json"}, {"model": "."}):  # fmt: skip
        with pytest.raises(RequestError):
            words(uploads, **changes)


NET = "def build(batch=8):\n    return None\n"


def test_a_function_of_an_own_file_is_a_model_below_the_folder_of_the_dashboard(tmp_path):
    own = tmp_path / "project"
    own.mkdir()
    (own / "train.py").write_text(NET)
    (tmp_path / "outside.py").write_text(NET)
    uploads = Uploads(tmp_path / "uploads", own)
    request = request_from({**FORM, "model": "train.py:build?layers=2", "batch": "16"}, uploads)
    assert request.question.model == f"{own / 'train.py'}:build?layers=2"
    assert request.title == "train.py:build?layers=2 on dgx-h100 · batch 16"
    assert request_from({**FORM, "model": f"{own}/train.py:build"}, uploads).label == "train.py:build"
    (own / "theirs.py").write_text(NET)
    (own / "theirs.py").chmod(0o666)
    (own / "link.py").symlink_to(tmp_path / "outside.py")
    for model, said in (
        ("../outside.py:build", "only files below"),
        (f"{tmp_path}/outside.py:build", "only files below"),
        ("link.py:build", "only files below"),
        ("theirs.py:build", "other users can change"),
        ("gone.py:build", "there is no file"),
        ("train:build", r"write file\.py:function"),
        ("train.py", r"write file\.py:function"),
    ):
        with pytest.raises(RequestError, match=said):
            request_from({**FORM, "model": model}, uploads)
    # A form is filled from it only where it could be started.
    assert form_of(request.question, uploads)[0]["model"] == "train.py:build?layers=2"
    with pytest.raises(RequestError, match="runs no Python files"):
        form_of(request.question, Uploads(tmp_path / "uploads"))


def test_every_preset_can_be_named_and_counts_of_its_devices_find_it():
    uploads = Uploads.__new__(Uploads)
    uploads.clusters = dict  # type: ignore[method-assign]
    for name in list_clusters():
        if not name.endswith("xN"):
            assert cluster_of(name, uploads) == name
    for count, kind, name in ((8, "H100-80GB", "dgx-h100"), (4, "h100-80gb", "dgx-h100[4]"),
                              (16, "H100-80GB", "dgx-h100x2"), (3, "Nothing", "")):  # fmt: skip
        assert devices_text(count, kind) == name
        assert not name or load_cluster(name).device_count == count


@pytest.mark.parametrize("line", [
    "zoo:gpt2-tiny --cluster dgx-h100",
    "zoo:gpt2-tiny?layers=4&sequence=64 --cluster dgx-h100[2] --batch 8 --dtype bfloat16 --seed 3",
    "hf:meta-llama/Llama-3.2-1B --cluster dgx-h100x2 --batch 8,16 --epsilon 0 --memory 24GiB",
    "zoo:mlp --cluster cpu:2 --planners zero,megatron --no-process-memory",
    "zoo:mlp --cluster cpu:2 --devices 1,2",
])  # fmt: skip
def test_a_form_is_filled_from_a_question_and_asks_it_again(uploads, line):
    question = asked(line)
    fields, left_out = form_of(question, uploads)
    assert left_out == ()
    again = request_from(fields, uploads).question
    length = {"model": ""}  # a sequence may stand behind the name or in its own field
    assert again.model_copy(update=length) == question.model_copy(update=length)
    for part in ("layers=4", "sequence=64"):
        assert (part in again.model) == (part in question.model)


def test_a_cluster_of_a_file_is_kept_with_the_job(uploads, tmp_path):
    text = "devices: [{kind: RTX-4090, count: 2}]\nlinks: {intra_node: PCIe4}\n"
    field, label = uploads.keep_any(data_url(text), "mine.yaml")
    assert (field, label) == ("devices", "mine.yaml")
    request = request_from({**FORM, "devices": label}, uploads)
    assert request.title == "gpt2-tiny on mine.yaml"
    assert load_cluster(written(request.question, tmp_path)[3]).device_count == 2
    assert json.loads((tmp_path / "cluster.json").read_text())["name"] == "mine"
    assert form_of(request.question, uploads)[0]["devices"] in ("mine.yaml", "mine.json")


def test_jobs_that_time_this_machine_run_alone(uploads):
    assert request_from({**FORM, "devices": "local"}, uploads).measures
    assert request_from({**FORM, "devices": "cpu:2"}, uploads).measures
    assert not request_from(FORM, uploads).measures


def test_a_title_says_what_is_not_as_usual(uploads):
    def title(**changes: Any) -> str:
        return request_from({**FORM, **changes}, uploads).title

    assert title(batch="8", dtype="bfloat16") == "gpt2-tiny on dgx-h100 · batch 8 · bfloat16"
    assert title(more="--planners zero --micro-batches 1,2").endswith("1,2 micro-batches · beside zero")
    assert title(more="--devices 1,2").endswith("on 1,2 devices")
