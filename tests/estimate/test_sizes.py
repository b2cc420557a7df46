"""The sizes in a config are those of the model that ``transformers`` builds of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tensoropt.estimate.hugging_face import FAMILIES, ConfigError, download_config, read_config, sizes_of
from tensoropt.estimate.known import figures, known_model
from tensoropt.zoo import ZooModel
from tensoropt.zoo.figures import figures as counted
from tensoropt.zoo.hugging_face import ModelLoss
from tensoropt.zoo.registry import tokens

transformers = pytest.importorskip("transformers")

VOCABULARY, SEQUENCE = 512, 32
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases": (
        "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128},
    ),
    "qwen2_moe with a dense layer": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "decoder_sparse_step": 2}),
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": SEQUENCE}),
    "bert": ("BertConfig", {"max_position_embeddings": SEQUENCE}),
}  # fmt: skip


def tiny(name: str, batch: int = 8) -> tuple[dict[str, Any], ZooModel]:
    """Return the config of a family at a tiny size, and its model on the meta device."""
    kind, differing = CONFIGS[name]
    sizes = {"vocab_size": VOCABULARY} if kind == "GPT2Config" else _SIZES
    config = getattr(transformers, kind)(**{**sizes, **differing})
    config.attention_dropout = 0.0
    auto = "AutoModelForMaskedLM" if name == "bert" else "AutoModelForCausalLM"
    with torch.device("meta"):
        network = getattr(transformers, auto).from_config(config)
        read = {
            "input_ids": tokens(VOCABULARY, batch, SEQUENCE),
            "labels": tokens(VOCABULARY, batch, SEQUENCE),
        }
    cached = {} if name == "bert" else {"use_cache": False}
    model = ModelLoss(network, **cached).train()
    return config.to_dict(), ZooModel(name=name, model=model, args=(), kwargs=read)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_counted(name: str) -> None:
    data, built = tiny(name)
    assert sum(sizes_of(data).parameters) == built.parameter_count


def test_every_family_is_among_them() -> None:
    assert {name.partition(" ")[0] for name in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("name", [name for name, row in figures()["models"].items() if "config" in row])
def test_models_of_the_zoo_have_the_parameters_that_were_counted(name: str) -> None:
    known = known_model(name)
    assert known.parameters == counted()[name].parameters
    assert known.batch == counted()[name].batch


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no config.json"),
        ({"model_type": "llama"}, "has no hidden_size"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({}, "without model_type"),
        ({"model_type": "gemma3", "text_config": {}}, "text_config as a file"),
        ({**_SIZES, "model_type": "llama", "hidden_size": "64"}, "hidden_size is '64'"),
        ({**_SIZES, "model_type": "llama", "num_hidden_layers": 0}, "1 or more"),
        ({**_SIZES, "model_type": "llama", "num_key_value_heads": 3}, "cannot share 3"),
        (
            {**_SIZES, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 of 2 experts",
        ),
    ],
)
def test_a_config_that_is_none_is_refused_with_the_rule(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sizes_of(data)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as a config"):
        read_config(file)
    file.write_text(" " * (1 << 20) + "{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_config(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        known_model(tmp_path / "missing.json")
    file.write_text(json.dumps({**_SIZES, "model_type": "llama"}), encoding="utf-8")
    assert known_model(str(file)).name == tmp_path.name
    assert known_model(tmp_path).parameters == known_model(file).parameters


def test_without_a_network_the_remedy_is_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("no network in a test")

    monkeypatch.setattr("socket.create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"cannot be reached.*give the path of its config\.json"):
        download_config("nobody/nothing")
