"""A question is the same on the command line, as JSON and in a job."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from tensoropt_app.views.point import settings_facts

from tensoropt import Settings, TensorOptError, load_cluster
from tensoropt.cli.arguments import question_option
from tensoropt.cli.parser import parser
from tensoropt.plan.facts_table import Fact
from tensoropt.question.question import Question, read_batches
from tensoropt.report.commands import explore_line
from tests.app.support.samples_app import exploration

GIB = 2.0**30
LINES = [
    "explore zoo:mlp --cluster dgx-h100 --out x",
    "explore zoo:mlp --cluster dgx-h100x2[4] --batch 8 --mode inference --optimizer sgd --micro-batches 1,2 "
    "--memory 24GiB --epsilon 0 --max-points 50 --headroom 5% --seed 3 --anew --out 'a b'",
    "explore zoo:mlp --cluster local:2 --dtype bfloat16 --recompute never --overlap none --measure never "
    "--no-process-memory --method ldp --first --pipelines always --placements never --expert-imbalance 1.25 "
    "--devices 1,2 --out x",
    "explore m.onnx --cluster dgx-h100 --dim batch=8 --dim x[0]=4 --output y --loss mse --devices auto --out "
    "x",
    "explore net.py:net --cluster two.yaml --also-on dgx-a100,mine.yaml --out x",
    "explore zoo:mlp --cluster dgx-h100 --batch auto --memory 24GiB --out x",
    "explore zoo:gpt2?sequence=8192 --cluster dgx-h100 --batch 8,12,4 --out x",
    "explore zoo:mlp --cluster dgx-h100 --planners zero,optcnn --memory 8GiB,24GiB --out x",
    "explore zoo:mlp --cluster dgx-h100 --planners all --out x",
]


def parsed(words: list[str]) -> Question:
    question: Question = question_option(parser().parse_args(words))
    return question


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_a_question_and_back(line):
    first = shlex.split(line)
    question = parsed(first)
    assert Question.of(json.loads(json.dumps(question.data()))) == question
    words = question.words(first[-1])
    assert parsed(words) == question
    assert sorted(words) == sorted(first)
    assert question.line(first[-1]) == shlex.join(["tensoropt", *words])


def test_a_question_about_several_batches_is_one_about_each():
    question = parsed(["explore", "zoo:mlp", "--cluster", "dgx-h100", "--batch", "8,16,8", "--out", "x"])
    assert (question.batch, question.batches) == (None, (8, 16))
    assert question.at(16).words("x")[4:6] == ["--batch", "16"]
    assert (read_batches(" 1000000 "), read_batches("8, 8")) == ({"batch": 1000000}, {"batch": 8})


@pytest.mark.parametrize(("text", "message"), [
    ("8x", "neither a number, nor a list such as 8,16,32, nor auto"),
    ("", "neither a number"),
    ("8,0", "has a batch of 0; give at least 1"),
])  # fmt: skip
def test_batches_that_are_none_are_refused(text, message):
    with pytest.raises(TensorOptError, match=message):
        read_batches(text)


def test_a_sequence_is_an_option_of_the_model():
    words = ["explore", "zoo:gpt2", "--sequence", "8192", "--cluster", "dgx-h100", "--out", "x"]
    assert parsed(words).model == "zoo:gpt2?sequence=8192"


def test_constraints_are_part_of_it(tmp_path):
    pins = {"together": [["*attn*"]]}
    file = tmp_path / "pins.json"
    file.write_text(json.dumps(pins))
    line = f"explore zoo:mlp --cluster dgx-h100 --constraints {file} --out x"
    question = parsed(line.split())
    file.unlink()
    again = Question.of(json.loads(json.dumps(question.data())))
    assert again.settings == Settings(constraints=pins)
    assert again.words("x")[-4:] == ["--constraints", str(file), "--out", "x"]
    assert f"constraints {file}" in again.in_effect(load_cluster("dgx-h100"), again.settings, None)


def test_a_cluster_without_a_name_is_its_content():
    cluster = load_cluster("dgx-h100x2[4]")
    described = {"devices": [{"kind": "T4", "count": 2}], "links": {"intra_node": "PCIe3"}}
    for content, count in ((cluster.to_dict(), 4), (described, 2)):
        question = Question.of(json.loads(json.dumps(Question(model="zoo:mlp", cluster=content).data())))
        assert load_cluster(question.cluster).device_count == count
        assert question.words("x", "there.json")[:4] == ["explore", "zoo:mlp", "--cluster", "there.json"]


def test_headroom_is_of_the_cluster_that_is_explored():
    within = Settings(memory_bytes=70 * GIB)
    question = Question(model="zoo:mlp", cluster="dgx-h100", headroom="25%", settings=within)
    for name in ("dgx-h100", "dgx-a100"):
        cluster = load_cluster(name)
        expected = min(70 * GIB, 0.75 * cluster.memory_bytes)
        assert question.settings_on(cluster) == Settings(memory_bytes=expected)


def test_all_in_effect_is_said_in_one_line():
    question = Question(model="zoo:mlp", cluster="dgx-h100")
    line = question.in_effect(load_cluster("dgx-h100"), question.settings, "out/mlp")
    assert line.startswith("exploring with model zoo:mlp, batch the model's own, seed 0, cluster dgx-h100 (")
    for said in ("mode train", "memory no limit", "epsilon 0.001", "constraints none", "process-memory yes"):
        assert f", {said}," in line
    assert line.endswith("out out/mlp")


@pytest.mark.parametrize(("data", "said"), [
    ({"model": "zoo:mlp"}, "not written by this version (cluster"),
    ({"model": "zoo:mlp", "cluster": "x", "wish": 1}, "not written by this version (wish"),
    ({"model": "zoo:mlp", "cluster": "x", "settings": {"dtype": "int3"}}, "unknown dtype 'int3'"),
    ({"model": "zoo:mlp", "cluster": "x", "settings": {"wisdom": 3}}, "made by another version"),
    ([], "not written by this version (it"),
])  # fmt: skip
def test_what_is_no_question_is_refused(data, said):
    with pytest.raises(TensorOptError) as error:
        Question.of(data)
    assert said in str(error.value)


def test_what_was_chosen_is_shown_with_an_exploration_and_in_its_command():
    found = replace(exploration(), settings={"max_points": 7})
    assert Fact("points kept", "7") in settings_facts(found)
    assert "--max-points 7" in explore_line(found, "x")
