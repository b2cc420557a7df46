"""Tiny models by name: what the rules are checked on. Every dim divides by 4 where the real ones do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.graph import OperatorGraph

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


# -- plain PyTorch --------------------------------------------------------------------------------


def with_targets(network: nn.Module, x: torch.Tensor, classes: int = 8) -> Made:
    """Rows of logits against random classes."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x, target):
            return F.cross_entropy(self.network(x).flatten(0, -2), target.flatten())

    rows = network(x).shape[:-1]
    return Classifier(), (x, torch.randint(0, classes, rows)), {}, None


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
def regression() -> Made:
    return nn.Linear(16, 4), (torch.randn(8, 16),), {}, lambda y: F.smooth_l1_loss(y, torch.ones(8, 4))


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


@model
def grouped_convolutions() -> Made:
    layers = [
        nn.Conv2d(4, 8, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.SiLU(),
        nn.Conv2d(8, 16, 3, stride=2, groups=4, bias=False),
        nn.GroupNorm(4, 16),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(144, 8),
    ]
    return with_targets(nn.Sequential(*layers), torch.randn(4, 4, 8, 8))


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
def convolutions_in_one_dim() -> Made:
    layers = [
        nn.Conv1d(4, 8, 3),
        nn.BatchNorm1d(8),
        nn.LeakyReLU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.Linear(24, 8),
    ]
    return with_targets(nn.Sequential(*layers), torch.randn(4, 4, 8))


class Attention(nn.Module):
    """``nn.MultiheadAttention``: a fused projection whose thirds must stay apart."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, dropout, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.attend(x, x, x, need_weights=False)[0])


@model
def multihead_attention() -> Made:
    return with_targets(Attention(), torch.randn(4, 8, 16))


@model
def encoder_layer() -> Made:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return with_targets(nn.Sequential(layer, nn.Linear(16, 8)), torch.randn(4, 8, 16))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.layer = kind(16, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@model
def lstm() -> Made:
    return with_targets(Recurrent(nn.LSTM), torch.randn(4, 8, 16))


@model
def gru() -> Made:
    return with_targets(Recurrent(nn.GRU), torch.randn(4, 8, 16))


class Pooled(nn.Module):
    """The hidden state of each row's last token: ``hidden[arange(batch), last]``."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 8)

    def forward(self, ids, last):
        hidden = self.embed(ids)
        return self.head(hidden[torch.arange(ids.shape[0]), last]).logsumexp(-1).sum()


@model
def last_token() -> Made:
    return Pooled(), (torch.randint(0, VOCABULARY, (4, 8)), torch.tensor([7, 2, 5, 0])), {}, None


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
MODELS["bert-dropout"] = lambda: bert_with(0.1)
MODELS["bert-mask"] = lambda: bert_with(0.0, attention_mask=torch.ones(BATCH, SEQUENCE, dtype=torch.long))
MODELS["llama"] = lambda: hugging_face("LlamaForCausalLM", "LlamaConfig", **decoder())
MODELS["t5"] = lambda: hugging_face(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
MODELS["vit"] = lambda: hugging_face("ViTForImageClassification", "ViTConfig", pictures(), **vision())
MODELS["resnet"] = lambda: hugging_face(
    "ResNetForImageClassification",
    "ResNetConfig",
    pictures(),
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
    num_labels=8,
)

CORE = tuple(MODELS)
"""Checked in every test run; what follows is checked with the slow tests."""

MODELS["bert"] = lambda: bert_with(0.0)
MODELS["bert-classes"] = lambda: hugging_face(
    "BertForSequenceClassification",
    "BertConfig",
    {"input_ids": tokens(), "labels": torch.randint(0, 2, (BATCH,))},
    **encoder(),
)

DECODERS = {
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {}),
}
for _name, (_class, _more) in DECODERS.items():
    MODELS[_name] = lambda c=_class, m=_more: hugging_face(f"{c}ForCausalLM", f"{c}Config", **decoder(**m))

ENCODERS = {
    "roberta": ("Roberta", {}),
    "albert": ("Albert", {"embedding_size": 16}),
    "electra": ("Electra", {"embedding_size": 16}),
    "deberta-v2": ("DebertaV2", {}),
    "mpnet": ("MPNet", {}),
}
for _name, (_class, _more) in ENCODERS.items():
    MODELS[_name] = lambda c=_class, m=_more: hugging_face(f"{c}ForMaskedLM", f"{c}Config", **encoder(**m))

PICTURES = {
    "deit": ("DeiT", vision()),
    "beit": ("Beit", vision()),
    "swin": (
        "Swin",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "convnext": ("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}),
    "regnet": ("RegNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}),
}
for _name, (_class, _more) in PICTURES.items():
    MODELS[_name] = lambda c=_class, m=_more: hugging_face(
        f"{c}ForImageClassification", f"{c}Config", pictures(), **{**m, "num_labels": 8}
    )

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
MODELS["gpt-neox"] = lambda: hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **{**encoder(), **_SPECIAL})
MODELS["gpt-neo"] = lambda: hugging_face(
    "GPTNeoForCausalLM",
    "GPTNeoConfig",
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    window_size=4,
    attention_types=[[["global", "local"], 1]],
    max_position_embeddings=32,
    **_SPECIAL,
)
MODELS["gptj"] = lambda: hugging_face(
    "GPTJForCausalLM",
    "GPTJConfig",
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=32,
    rotary_dim=4,
    **_SPECIAL,
)
MODELS["bloom"] = lambda: hugging_face(
    "BloomForCausalLM",
    "BloomConfig",
    vocab_size=VOCABULARY,
    hidden_size=32,
    n_layer=2,
    n_head=4,
    pad_token_id=0,
    **_SPECIAL,
)
MODELS["falcon"] = lambda: hugging_face(
    "FalconForCausalLM",
    "FalconConfig",
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    **_SPECIAL,
)
MODELS["opt"] = lambda: hugging_face(
    "OPTForCausalLM", "OPTConfig", **encoder(ffn_dim=64, word_embed_proj_dim=32)
)
MODELS["distilbert"] = lambda: hugging_face(
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    vocab_size=VOCABULARY,
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=64,
)
MODELS["xlnet"] = lambda: hugging_face(
    "XLNetForSequenceClassification",
    "XLNetConfig",
    {"input_ids": tokens(), "labels": torch.randint(0, 2, (BATCH,))},
    vocab_size=VOCABULARY,
    d_model=32,
    n_layer=2,
    n_head=4,
    d_inner=64,
)
MODELS["bart"] = lambda: hugging_face("BartForConditionalGeneration", "BartConfig", **sequence_to_sequence())
MODELS["marian"] = lambda: hugging_face("MarianMTModel", "MarianConfig", **sequence_to_sequence())
MODELS["whisper"] = lambda: hugging_face(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {"input_features": torch.randn(4, 8, 32), "labels": tokens()},
    **sequence_to_sequence(
        num_mel_bins=8, max_source_positions=16, max_target_positions=16, begin_suppress_tokens=None
    ),
)
MODELS["mamba"] = lambda: hugging_face(
    "MambaForCausalLM",
    "MambaConfig",
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    state_size=4,
    pad_token_id=0,
    **_SPECIAL,
)
MODELS["wav2vec2"] = lambda: hugging_face(
    "Wav2Vec2ForSequenceClassification",
    "Wav2Vec2Config",
    {"input_values": torch.randn(4, 400), "labels": torch.randint(0, 2, (4,))},
    **encoder(),
    conv_dim=[16, 16],
    conv_stride=[5, 2],
    conv_kernel=[10, 3],
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    layerdrop=0.0,
    apply_spec_augment=False,
)
MODELS["segformer"] = lambda: hugging_face(
    "SegformerForImageClassification",
    "SegformerConfig",
    pictures(),
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[7, 3],
    strides=[4, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    num_labels=8,
)
MODELS["mobilenet-v2"] = lambda: hugging_face(
    "MobileNetV2ForImageClassification", "MobileNetV2Config", pictures(), depth_multiplier=0.25, num_labels=8
)
MODELS["clip"] = lambda: hugging_face(
    "CLIPModel",
    "CLIPConfig",
    {"input_ids": tokens(), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True},
    text_config=encoder(bos_token_id=0, eos_token_id=2),
    vision_config=vision(),
    projection_dim=16,
)
MODELS["mixtral"] = lambda: hugging_face(
    "MixtralForCausalLM", "MixtralConfig", **decoder(num_local_experts=4)
)
MODELS["fnet"] = lambda: hugging_face("FNetForMaskedLM", "FNetConfig", **encoder())
BREADTH = tuple(name for name in MODELS if name not in CORE)
