"""Models by their config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.question.compute_dtype import dtype_of
from tensoropt.question.model_source import ModelSourceError, default_batch, load_model, with_sequence

pytest.importorskip("transformers")
CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
    "max_position_embeddings": 32, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("end", ["", "/config.json"])
def test_a_model_is_built_from_its_config(folder, end):
    loaded = load_model(f"{folder}{end}", batch=2)
    assert loaded.kwargs["input_ids"].shape == (2, 32)
    assert {p.dtype for p in loaded.model.parameters()} == {
        p.dtype for p in load_model("zoo:mlp").model.parameters()
    }
    assert loaded.model(**loaded.kwargs).isfinite()


def test_it_has_a_batch_a_sequence_and_no_weights(folder):
    source = with_sequence(str(folder), 16)
    assert default_batch(source) == 1
    loaded = load_model(source, device="meta", batch=3)
    assert loaded.kwargs["labels"].shape == (3, 16)
    assert next(loaded.model.parameters()).is_meta


def test_it_has_adapters_where_its_architecture_has_them(folder):
    pytest.importorskip("peft")
    loaded = load_model(str(folder), device="meta", lora="r=4")
    trained = {name.split(".")[-4] for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    assert dtype_of(loaded.source, [load_cluster("dgx-h100")])[0] == "bfloat16"


def test_it_computes_as_language_models_do(folder):
    assert dtype_of(str(folder), [load_cluster("dgx-h100")])[0] == "bfloat16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "is not built"),
        ({"model_type": "x"}, "cannot be read"),
    ],
)
def test_what_cannot_be_built_is_refused(folder, change, words):
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ModelSourceError, match=words):
        load_model(str(folder))
