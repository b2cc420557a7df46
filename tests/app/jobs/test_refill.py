"""The form filled from a question asks that question again, or says what it cannot hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples_app import FORM, data_url, exploration
from tensoropt_app.jobs.record import Job
from tensoropt_app.jobs.refill import (
    can_refill,
    edited_preset,
    question_of_job,
    question_of_words,
    refill,
)
from tensoropt_app.jobs.request import request_from
from tensoropt_app.jobs.uploads import Uploads

from tensoropt.cluster import load_cluster
from tensoropt.cluster.files import cluster_from
from tensoropt.errors import TensorOptError
from tensoropt.question.question import Question
from tensoropt.report.commands import question_of

PINS = '{"together": [["*attn*"]]}'


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr("tensoropt_app.jobs.uploads.open_dims", lambda path: [])  # what is kept is no model
    return Uploads(tmp_path / "uploads")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 8, "epsilon": 0.5, "max_points": 50, "seed": 3, "memory": "24GiB", "devices": "1,2"},
        {"cluster": "local", "kind": None, "per_node": 3, "inside": None},
        {"nodes": 4, "between": "IB-400G"},
        {
            "kind": "A100-80GB", "per_node": 4, "nodes": 2, "inside": "NVLink3", "between": "IB-200G",
            "price": 2,
        },
        {"planners": ["zero", "megatron"], "mode": "train", "dtype": "bfloat16", "recompute": "never"},
        {"mode": "inference", "optimizer": "sgd", "measure": "never", "micro_batches": "1,2"},
        {"constraints": PINS},
        {"overlap": "none", "process_memory": "yes", "pipelines": "never", "placements": "always"},
        {"method": "elimination", "options": "layers=4&dropout=0.1"},
        {"planners": ["zero"], "memory": "24GiB"},
        {"batch": "auto"},
        {"batch": "8,16", "memory": "24GiB"},
    ],
)  # fmt: skip
def test_a_job_comes_back_as_it_was_asked(uploads: Uploads, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, second = tmp_path / "job", tmp_path / "again"
    folder.mkdir()
    second.mkdir()
    asked = request_from({**FORM, **changes}, {})
    found = refill(asked.question, uploads)
    again = request_from(found.fields, uploads.known(), uploads.clusters())
    assert found.said == ()
    # An edited cluster may come back as the changes to another preset, nearer to it.
    assert replace(again, place=asked.place) == asked
    # What an earlier version kept of a job, the words of its command line, ask the same.
    in_words = question_of_words(asked.arguments(folder))
    assert in_words.model_copy(update={"cluster": asked.question.cluster}) == asked.question
    assert load_cluster(in_words.cluster).fingerprint == load_cluster(asked.question.cluster).fingerprint
    assert refill(in_words, uploads).said == ()
    words = again.arguments(second)
    assert [word.replace(str(second), str(folder)) for word in words] == asked.arguments(folder)
    for file in folder.iterdir():
        assert (second / file.name).read_text() == file.read_text()


def test_an_uploaded_model_and_cluster_come_back(uploads: Uploads, tmp_path: Path) -> None:
    text = b"devices: [T4, {kind: TITAN-RTX, count: 3}]\nlinks: {intra_node: PCIe3}"
    model = uploads.keep(data_url(b"model"), "mine.onnx")
    cluster = uploads.keep_cluster(data_url(text), "mine.yaml")
    more = {"dims": "batch=8, seq=4", "outputs": "y", "loss": "mse"}
    form = {**FORM, "model": model, "cluster": cluster, **more}
    asked = request_from(form, uploads.known(), uploads.clusters())
    assert asked.title.startswith("mine.onnx on mine.yaml")
    words = asked.arguments(tmp_path)
    found = refill(asked.question, uploads).fields
    assert (found["model"], found["dims"], found["outputs"], found["loss"]) == (
        model, "batch=8, seq=4", "y", "mse",
    )  # fmt: skip
    again = request_from(found, uploads.known(), uploads.clusters())
    want, got = load_cluster(words[3]), load_cluster(again.arguments(tmp_path)[3])
    assert (got.fingerprint, got.device_count) == (want.fingerprint, 4)


def test_an_exploration_fills_the_form(uploads: Uploads) -> None:
    found = exploration(
        settings={"micro_batches": [1, 4], "epsilon": 0.01, "max_points": 24, "mode": "train"}
    )
    fields = refill(question_of(found), uploads).fields
    assert (fields["model"], fields["cluster"], fields["per_node"]) == ("zoo:gpt2-tiny", "dgx-h100", "8")
    assert (fields["micro_batches"], fields["epsilon"], fields["max_points"]) == ("1,4", "1", "24")


def test_part_of_a_preset_is_the_preset_with_fewer_devices() -> None:
    part = load_cluster("dgx-h100[2]")
    found = edited_preset(part, part.name)
    assert (found.name, found.per_node, found.nodes) == ("dgx-h100", 2, 1)


def test_a_cluster_of_two_kinds_becomes_a_file(uploads: Uploads) -> None:
    kinds = [{"kind": "T4", "count": 2}, {"kind": "TITAN-RTX", "count": 2}]
    cluster = cluster_from({"devices": kinds, "links": {"intra_node": "PCIe3"}}, name="mine")
    assert edited_preset(cluster, "mine") is None
    fields = refill(Question(model="zoo:mlp", cluster=cluster.to_dict()), uploads).fields
    kept = uploads.clusters()[fields["cluster"]]
    assert (kept.label, kept.kinds) == ("mine.json", ("T4", "TITAN-RTX"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explore", "train.py:build", "--cluster", "dgx-h100", "--out", "x"], "explore train.py:build"),
        (["explore", "/gone/model.onnx", "--cluster", "dgx-h100", "--out", "x"], "not among the uploads"),
        (["explore", "zoo:mlp", "--cluster", "dgx-h100", "--out", "x", "--old"], "another version.*--old"),
        (["recost", "x", "--planners", "zero", "--out", "x"], "start this job again where its result"),
        (["explore", "zoo:mlp", "--cluster", "nowhere", "--out", "x"], "unknown cluster 'nowhere'"),
    ],
)  # fmt: skip
def test_what_the_form_cannot_be_is_said(uploads: Uploads, words: list[str], said: str) -> None:
    job = Job("j", "t", tuple(words))
    with pytest.raises(TensorOptError, match=said):
        refill(question_of_job(job), uploads, job.line)
    assert can_refill(job) == (words[0] == "explore")


def test_what_the_form_has_no_field_for_is_named(uploads: Uploads) -> None:
    words = ["explore", "zoo:mlp", "--cluster", "dgx-h100", "--out", "x", "--headroom", "5%", "--anew"]
    assert set(refill(question_of_words(words), uploads).said) == {"--headroom 5%", "--anew"}
    words = ["explore", "zoo:mlp", "--cluster", "dgx-h100", "--planners", "all", "--memory", "8GiB,24GiB"]
    words += ["--out", "x"]
    found = refill(question_of_words(words), uploads)
    assert found.said == ("--memory 8GiB,24GiB",)
    assert len(found.fields["planners"]) > 10
