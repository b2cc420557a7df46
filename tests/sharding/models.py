"""Tiny models by name. Every dim divides by 4 where the real ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.graph import OperatorGraph
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tests.models import Call

VOCABULARY, BATCH, SEQUENCE = 57, 4, 8
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]
MODELS: dict[str, Callable[[], Made]] = {}


def model(function: Callable[[], Made]) -> Callable[[], Made]:
    MODELS[function.__name__.replace("_", "-")] = function
    return function


def make(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def graph_of(name: str) -> OperatorGraph:
    """The model's graph; captured once per process, because capturing is most of what a test costs."""
    network, args, kwargs, loss = make(name)
    return capture(network, args, kwargs, loss=loss).graph


def grouped_model(model: nn.Module, *args: Any, loss: Any = torch.sum, mode: Any = "train") -> GroupGraph:
    return group_operators(refine_graph(capture(model, args, loss=loss, mode=mode).graph))


@cache
def grouped(name: str) -> GroupGraph:
    return group_operators(refine_graph(graph_of(name)))


# -- plain PyTorch --------------------------------------------------------------------------------


def with_targets(network: nn.Module, x: torch.Tensor, classes: int = 8) -> Made:
    """Rows of logits against random classes."""

    def forward(m, x, target):
        return F.cross_entropy(m.network(x).flatten(0, -2), target.flatten())

    rows = network(x).shape[:-1]
    return Call(forward, network=network), (x, torch.randint(0, classes, rows)), {}, None


@model
def perceptron() -> Made:
    layers = [
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, 8, bias=False),
        nn.GELU(),
        nn.Linear(8, 8),
    ]
    return with_targets(nn.Sequential(*layers), torch.randn(8, 16))


@model
def vgg() -> Made:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    head = [
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(32, 8),
    ]
    return with_targets(nn.Sequential(*layers, *head), torch.randn(4, 3, 16, 16))


class Shuffle(nn.Module):
    """Channels ``group * n + i`` become ``i * groups + group``; 4 x 6 and 6 x 4 are no common chain."""

    def forward(self, x):
        return x.unflatten(1, (4, 6)).transpose(1, 2).flatten(1, 2)


@model
def channel_shuffle() -> Made:
    layers = [
        nn.Conv2d(4, 24, 1),
        nn.Conv2d(24, 24, 1, groups=4),
        Shuffle(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.Conv2d(24, 48, 1, groups=4),
        nn.ReLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(48, 8),
    ]
    return with_targets(nn.Sequential(*layers), torch.randn(4, 4, 4, 4))


@model
def multihead_attention() -> Made:
    """``nn.MultiheadAttention``: a fused projection whose thirds must stay apart."""
    attend = nn.MultiheadAttention(16, 4, batch_first=True)
    network = Call(
        lambda m, x: m.head(m.attend(x, x, x, need_weights=False)[0]), attend=attend, head=nn.Linear(16, 8)
    )
    return with_targets(network, torch.randn(4, 8, 16))


@model
def lstm() -> Made:
    layer = nn.LSTM(16, 8, num_layers=2, batch_first=True)
    network = Call(lambda m, x: m.head(m.layer(x)[0]), layer=layer, head=nn.Linear(8, 8))
    return with_targets(network, torch.randn(4, 8, 16))


@model
def encoder_layer() -> Made:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return with_targets(nn.Sequential(layer, nn.Linear(16, 8)), torch.randn(4, 8, 16))


# -- transformers ---------------------------------------------------------------------------------


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))


def hugging_face(name: str, config: str, inputs: dict[str, Any] | None = None, **settings: Any) -> Made:
    """A language model on random tokens that are their own labels, unless ``inputs`` says otherwise."""
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    ids = tokens()
    network = getattr(library, name)(getattr(library, config)(**settings))
    return network, (), inputs or {"input_ids": ids, "labels": ids}, None


def encoder(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**sizes, "intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, **more}


def decoder(**more: Any) -> dict[str, Any]:
    return encoder(num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **more)


def pictures(classes: int = 8) -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, classes, (4,))}


def vision(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return {**sizes, "image_size": 32, "patch_size": 8, "num_labels": 8, **more}


def sequence_to_sequence(**more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    special = {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "forced_eos_token_id": 2}
    return {**sizes, **special, **more}


def gpt2_with(dropout: float) -> Made:
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **sizes, **rates, bos_token_id=0, eos_token_id=0)


def bert_with(dropout: float, **inputs: Any) -> Made:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    ids = tokens()
    given = {"input_ids": ids, "labels": ids, **inputs}
    return hugging_face("BertForMaskedLM", "BertConfig", given, **encoder(**rates))


MODELS["gpt2"] = lambda: gpt2_with(0.0)
MODELS["gpt2-dropout"] = lambda: gpt2_with(0.1)
MODELS["bert-mask"] = lambda: bert_with(0.0, attention_mask=torch.ones(BATCH, SEQUENCE, dtype=torch.long))
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        name: (network, "ForCausalLM", decoder(**more))
        for name, network, more in (
            ("llama", "Llama", {}), ("mistral", "Mistral", {}), ("qwen2", "Qwen2", {}),
            ("qwen3", "Qwen3", {"head_dim": 8}), ("phi", "Phi", {}), ("gemma2", "Gemma2", {"head_dim": 8}),
            ("olmo2", "Olmo2", {}), ("cohere", "Cohere", {}), ("stablelm", "StableLm", {}),
            ("starcoder2", "Starcoder2", {}), ("mixtral", "Mixtral", {"num_local_experts": 4}),
        )
    },
    "gpt-neox": ("GPTNeoX", "ForCausalLM", encoder() | ENDS),
    "opt": ("OPT", "ForCausalLM", encoder(ffn_dim=64, word_embed_proj_dim=32)),
    "albert": ("Albert", "ForMaskedLM", encoder(embedding_size=16)),
    "gptj": ("GPTJ", "ForCausalLM", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4,
    } | ENDS),
    "falcon": ("Falcon", "ForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    } | ENDS),
    "t5": ("T5", "ForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "vit": ("ViT", "ForImageClassification", vision()),
    "swin": ("Swin", "ForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4, "num_labels": 8,
    }),
    "convnext": ("ConvNext", "ForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32, "num_labels": 8,
    }),
    "resnet": ("ResNet", "ForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
        "num_labels": 8,
    }),
    "whisper": ("Whisper", "ForConditionalGeneration", sequence_to_sequence(
        num_mel_bins=8, max_source_positions=16, max_target_positions=16, begin_suppress_tokens=None
    )),
}  # fmt: skip


def made(network: str, task: str, settings: dict[str, Any]) -> Made:
    inputs = pictures() if task == "ForImageClassification" else None
    if network == "Whisper":
        inputs = {"input_features": torch.randn(4, 8, 32), "labels": tokens()}
    return hugging_face(network + task, f"{network}Config", inputs, **settings)


MODELS |= {name: partial(made, *network) for name, network in NETWORKS.items()}
