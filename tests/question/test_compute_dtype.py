"""The dtype that a question is answered in, if none is given."""

import json

import pytest

from tensoropt import Settings, cli, explore, load_cluster, load_model
from tensoropt.question.compute_dtype import dtype_of, with_dtype
from tensoropt.question.question import Question
from tensoropt.question.zoo_table import listed

OTHERS = """alexnet amoebanet clip deeplab inception lenet mlp resnet two-tower unet vgg wide-resnet"""


def test_language_models_are_those_that_read_tokens_alone():
    for name, entry in listed().items():
        assert entry.language_model is not name.startswith(tuple(OTHERS.split())), name


@pytest.mark.parametrize(("source", "clusters", "dtype", "why"), [
    ("zoo:gpt2", "dgx-h100", "bfloat16", "float32 can be chosen"),
    ("zoo:llama3-8b?sequence=64", "dgx-a100,dgx-h100", "bfloat16", "language models"),
    ("zoo:gpt2", "dgx-v100", "float32", "V100-32GB has no bfloat16"),
    ("zoo:gpt2", "dgx-h100,dgx-v100", "float32", "V100-32GB has no bfloat16"),
    ("zoo:gpt2", "cpu:2", "float32", ""),
    ("zoo:resnet50", "dgx-h100", "float32", ""),
    ("model.onnx", "dgx-h100", "float32", ""),
    ("", "dgx-h100", "float32", ""),
])  # fmt: skip
def test_auto_is_bfloat16_for_language_models_on_gpus_that_have_it(source, clusters, dtype, why):
    on = [load_cluster(name) for name in clusters.split(",")]
    found, reason = dtype_of(source, on)
    assert found == dtype
    assert why in reason
    assert bool(why) == bool(reason)
    assert with_dtype(Settings(), source, on).dtype == dtype
    for given in ("float32", "bfloat16"):
        assert with_dtype(Settings(dtype=given), source, on).dtype == given


def test_a_question_keeps_auto_until_its_clusters_are_known():
    question = Question(model="zoo:gpt2", cluster="dgx-h100")
    assert "--dtype" not in question.words("out")
    computing = question.computing_on([load_cluster("dgx-h100")])
    assert computing.settings.dtype == computing.capture_facts["dtype"] == "bfloat16"
    assert "--dtype float32" in computing.model_copy(update={"settings": Settings(dtype="float32")}).line("x")


QUICK = {
    "micro_batches": (1,), "recompute": "never", "epsilon": 0.1, "placements": "never", "measure": "never",
}  # fmt: skip


@pytest.mark.slow
def test_python_and_the_command_line_compute_in_the_same(tmp_path, capfd, monkeypatch):
    model = load_model("zoo:gpt-mini?layers=1&sequence=8", device="meta")
    found = explore(model, cluster="dgx-h100[2]", **QUICK)
    assert found.settings["dtype"] == "bfloat16" == found.plan(0).compute_dtype
    assert explore(model, cluster="dgx-h100[2]", dtype="float32", **QUICK).settings["dtype"] == "float32"

    words = "explore zoo:gpt-mini?layers=1&sequence=8 --micro-batches 1 --recompute never --epsilon 0.1"
    words += " --placements never --measure never --cluster dgx-h100[2]"
    out = tmp_path / "out"
    assert cli.main([*words.split(), "--out", str(out)]) == 0
    assert "computes in bfloat16" in capfd.readouterr().err
    assert json.loads((out / "exploration.json").read_text())["settings"]["dtype"] == "bfloat16"
    assert cli.main([*words.split(), "--also-on", "dgx-v100[2]", "--out", str(tmp_path / "both")]) == 0
    assert "V100-32GB has no bfloat16" in capfd.readouterr().err
