"""The models of torchtitan as they are explored: they return their loss, and mask documents by a tensor.

torchtitan's trainer computes the loss of what a model returns, and builds the masks of FlexAttention and
varlen attention outside of it; ``torch.export`` follows neither.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.errors import PlanError, import_extra

for _package in ("torchtitan", "torchtitan.trainer"):  # which imports all that it needs
    import_extra(_package, "torchtitan", "tensoropt.integrations.torchtitan")

from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.tools.utils import set_default_dtype  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class MaskedAttention(Module):
    """Attention under a mask that is a tensor, in the place of FlexAttention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Return (batch, length, heads, width) for queries, keys and values of this shape."""
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return attended.transpose(1, 2)


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return which tokens each token attends to: itself and earlier ones of its document, which begins where
    the positions are 0 (``torchtitan.models.common.attention.get_document_mask_mod``).

    Args:
        positions: of tokens in their documents, (batch, length).

    Returns:
        Booleans, (batch, 1, length, length): the last dim is that of keys.
    """
    documents = (positions == 0).long().cumsum(1)
    places = torch.arange(positions.shape[1], device=positions.device)
    earlier = places[:, None] >= places[None, :]
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


class _ReturnsLoss:
    """What a decoder becomes: called with its targets, it returns the mean loss of those that count."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens, positions, document_mask(positions))  # type: ignore[misc]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX)


def explored_spec(spec: ModelSpec | None) -> ModelSpec:
    """Return a copy of a model's specification whose attention is masked by a tensor.

    Raises:
        PlanError: its trainer would do more between tokens and loss than a decoder's.
    """
    model = None if spec is None else spec.model
    own = isinstance(model, Decoder.Config) and model._owner.get_attention_masks
    if spec is None or own is not Decoder.get_attention_masks:
        raise PlanError(
            "plans are for torchtitan's decoders with causal attention within documents, but model_spec is "
            f"{'missing' if spec is None else spec.name}; write the loop of this model with "
            "tensoropt.parallelize"
        )
    model = copy.deepcopy(spec.model)
    kinds = (FlexAttention.Config, VarlenAttention.Config)
    for _, _, holder, name in [found for kind in kinds for found in model.traverse(kind)]:
        setattr(holder, name, MaskedAttention.Config())
    return replace(spec, model=model)


def explored_model(config: Trainer.Config, spec: ModelSpec) -> nn.Module:
    """Return the decoder that returns its loss, on the default device, without weights."""
    loss = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    if type(loss) is not CrossEntropyLoss.Config:
        raise PlanError(
            f"a plan's model returns its cross entropy, but loss is {type(loss).__qualname__}; use "
            "CrossEntropyLoss.Config(), or write the loop with tensoropt.parallelize"
        )
    spec.model.update_from_config(config=config)
    with set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model: nn.Module = spec.model.build()
    kind = type(model)
    model.__class__ = type(kind.__name__, (_ReturnsLoss, kind), {})
    return model


def draw(module: nn.Module) -> None:
    """Set the weights and buffers of one module as torchtitan does (``init_weights=`` of
    :func:`tensoropt.parallelize`)."""
    if isinstance(module, Module):
        module._init_self_parameters()
        module._init_self_buffers()


def explored(config: Trainer.Config) -> tuple[nn.Module, tuple[Any, ...], dict[str, torch.Tensor]]:
    """Return what ``tensoropt explore file.py:function`` takes, for a configuration of torchtitan: the model
    with its initial weights, and a call of it with ``local_batch_size`` rows of ``seq_len`` tokens.

    Raises:
        PlanError: its model is no decoder, or its loss no cross entropy.
    """
    spec = explored_spec(config.model_spec)
    model = explored_model(config, spec)
    with torch.no_grad():
        model.apply(draw)
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens = torch.randint(spec.model.vocab_size, shape)
    positions = torch.arange(shape[1]).repeat(shape[0], 1)
    return model, (), {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": positions}
