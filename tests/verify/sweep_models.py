"""Models for random strategies: each makes some of the choices possible that strategies draw."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sharding import models as tiny_models

Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
HIDDEN, VOCABULARY = 16, 24


_LM, _MASKED = "ForCausalLM", "ForMaskedLM"
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
MORE: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "qwen2_moe": (
        ("Qwen2Moe", _LM),
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": (
        ("Qwen3Moe", _LM),
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "deepseek_v2": (("DeepseekV2", _LM), _LATENT),
    "deepseek_v3": (("DeepseekV3", _LM), _LATENT),
    "olmoe": (("Olmoe", _LM), {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo": (("Olmo", _LM), {}),
    "granite": (("Granite", _LM), {}),
    "glm4": (("Glm4", _LM), {"head_dim": 8}),
    "smollm3": (("SmolLM3", _LM), {}),
    "gemma2_window": (("Gemma2", _LM), {"head_dim": 8, "sliding_window": 4}),
    "gemma3": (("Gemma3", _LM, "Text"), {"head_dim": 8, "sliding_window": 4}),
    "gpt_oss": (("GptOss", _LM), {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "sliding_window": 4}),
    "mistral_window": (("Mistral", _LM), {"sliding_window": 5}),
    "modernbert": (("ModernBert", _MASKED), {"local_attention": 6, "global_attn_every_n_layers": 2}),
}  # fmt: skip
"""Language models by name: class, and what their configuration has beside the usual sizes."""


def tiny(name: str, batch: int, sequence: int) -> Recipe:
    """A model of ``tests/sharding/models.py``, or of more of them, with its loss inside, on other inputs."""
    with mock.patch.multiple(tiny_models, BATCH=batch, SEQUENCE=sequence):
        if name in MORE:
            (kind, task, *config), settings = MORE[name]
            config = "".join(config)
            sizes = {**tiny_models.decoder(), **settings}
            network, args, kwargs, loss = tiny_models.hugging_face(
                f"{kind}{task}", f"{kind}{config}Config", **sizes
            )
        else:
            network, args, kwargs, loss = tiny_models.MODELS[name.replace("_", "-")]()
    assert loss is None, name
    return network.train(), args, kwargs


class Block(nn.Module):
    """Attention of one kind, and a gated feed-forward with dropout."""

    def __init__(self, kind: str, heads: int, shared: int):
        super().__init__()
        self.kind, self.heads, self.shared = kind, heads, shared
        self.size = HIDDEN // 4
        self.queries = nn.Linear(HIDDEN, heads * self.size)
        self.keys = nn.Linear(HIDDEN, 2 * heads // shared * self.size)
        self.project, self.up = nn.Linear(heads * self.size, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def repeated(self, x: Tensor) -> Tensor:
        """Keys or values of shared heads, once for each head."""
        if self.kind == "expand":
            batch, heads, sequence, size = x.shape
            x = x[:, :, None].expand(batch, heads, self.shared, sequence, size)
            return x.reshape(batch, self.heads, sequence, size)
        if self.kind == "interleave":
            return x.repeat_interleave(self.shared, dim=1)
        return x.repeat(1, self.shared, 1, 1) if self.kind == "repeat" else x

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        normal = self.norm(x)
        q = self.queries(normal).view(batch, sequence, self.heads, -1).transpose(1, 2)
        k, v = (
            self.repeated(part.view(batch, sequence, -1, self.size).transpose(1, 2))
            for part in self.keys(normal).chunk(2, -1)
        )
        places = torch.arange(sequence)
        mask, distance = None, places[:, None] - places[None, :]
        if self.kind == "window":
            mask = (distance >= 0) & (distance < 5)
        elif self.kind == "bias":
            mask = (-distance.abs() * 0.1).to(q.dtype)
        elif self.kind == "cross":
            k, v = k[:, :, : sequence // 2], v[:, :, : sequence // 2]
        causal = mask is None and self.kind not in ("full", "cross")
        dropout = 0.1 if self.kind == "dropout" else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=self.kind == "gqa")
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(x).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * value), 0.2)


class Decoder(nn.Module):
    """Two blocks between a table and a head, which may be one."""

    def __init__(self, kind: str, heads: int, shared: int, sequence: int, tied: bool):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(sequence, HIDDEN)
        self.blocks = nn.ModuleList(Block(kind, heads, shared) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=3)


DECODERS = {
    "causal": {}, "dropout": {}, "window": {"heads": 3}, "bias": {}, "full": {}, "cross": {},
    "tied": {"heads": 5, "tied": True},
    "gqa": {"shared": 2}, "gqa_of_six": {"kind": "gqa", "heads": 6, "shared": 3},
    "expand": {"shared": 4}, "repeat": {"heads": 6, "shared": 2}, "interleave": {"shared": 2},
}  # fmt: skip
"""Decoders by name, which is the kind of their attention unless they say it."""


def decoder(
    kind: str, batch: int, sequence: int, heads: int = 4, shared: int = 1, tied: bool = False
) -> Recipe:
    """A small decoder.

    Args:
        kind: that of its attention.
        shared: the heads of queries for each head of keys.
        tied: whether head and table are one.
    """
    inputs = tuple(torch.randint(0, VOCABULARY, (batch, sequence)) for _ in range(2))
    return Decoder(kind, heads, shared, sequence, tied), inputs, {}


def __getattr__(name: str) -> Any:
    """Return the function that builds the model of a name, whose options are sizes of its inputs."""
    if name in DECODERS:

        def build(batch: int = 4, sequence: int = 12) -> Recipe:
            return decoder(**{"kind": name, "batch": batch, "sequence": sequence, **DECODERS[name]})

    elif name in MORE or name.replace("_", "-") in tiny_models.MODELS:

        def build(batch: int = 4, sequence: int = 12) -> Recipe:
            return tiny(name, batch, sequence)

    else:
        raise AttributeError(name)
    return build
