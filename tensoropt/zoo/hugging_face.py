"""Language models of the ``transformers`` package, an optional extra, with random weights."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torch import Tensor, nn

from tensoropt.zoo.registry import Recipe, register, require_at_least, require_multiple, tokens

_GPT2 = "Radford et al., Language Models are Unsupervised Multitask Learners, 2019"
_GPT3 = "Brown et al., Language Models are Few-Shot Learners, 2020 (table 2.1)"
_BERT = "Devlin et al., BERT, NAACL 2019"
_LLAMA = "Grattafiori et al., The Llama 3 Herd of Models, 2024 (table 3)"
_MIXTRAL = "Jiang et al., Mixtral of Experts, 2024 (table 1)"


_TINY: dict[str, Any] = {
    "size": "laptop", "batch": 4, "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 512, "sequence": 32,
}  # fmt: skip
_of_package = partial(register, size="paper", requires="transformers")
_gpt2 = partial(_of_package, paper=_GPT2, batch=8)
_bert = partial(_of_package, paper=_BERT, batch=8)
_llama = partial(_of_package, paper=_LLAMA, batch=1)
_mixtral = partial(_of_package, paper=_MIXTRAL, batch=1)


class ModelLoss(nn.Module):
    """A model of ``transformers`` that returns only its loss, so that no logits stay in memory."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__()
        self.network = network
        self._options = options

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the model's scalar loss; labels of -100 are ignored."""
        return self.network(**inputs, **self._options).loss

    def save_pretrained(self, folder: str | os.PathLike[str], **settings: Any) -> None:
        """Save the model in the format of ``transformers``, or only its adapters if it has adapters."""
        self.network.save_pretrained(folder, **settings)  # type: ignore[operator]


def _language_model(network: nn.Module, vocabulary: int, batch: int, sequence: int, **options: Any) -> Recipe:
    kwargs = {"input_ids": tokens(vocabulary, batch, sequence), "labels": tokens(vocabulary, batch, sequence)}
    return ModelLoss(network, **options), (), kwargs


def _require_rotary_heads(heads: int, key_value_heads: int, hidden: int) -> None:
    require_multiple(key_value_heads, "equally many heads share each key and value", heads=heads)
    require_multiple(2 * heads, f"each of {heads} attention heads rotates pairs of it", hidden=hidden)


@_gpt2("gpt2-demo", size="laptop", batch=16, layers=4, hidden=320, heads=8, vocabulary=8192, sequence=64)
@_gpt2("gpt2-tiny", **_TINY)
@_gpt2("gpt2-tiny-dropout", dropout=0.1, **_TINY)
@_gpt2("gpt2")
@_gpt2("gpt2-medium", layers=24, hidden=1024, heads=16)
@_gpt2("gpt2-large", layers=36, hidden=1280, heads=20)
@_gpt2("gpt2-xl", layers=48, hidden=1600, heads=25)
@_gpt2("gpt3-6.7b", paper=_GPT3, layers=32, hidden=4096, heads=32, sequence=2048)
@_gpt2("gpt3-175b", paper=_GPT3, layers=96, hidden=12288, heads=96, sequence=2048)
def _build_gpt2(
    batch: int,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    sequence: int = 1024,
    dropout: float = 0.0,
) -> Recipe:
    """GPT-2 (and GPT-3) decoder, tied embedding and head, language-model loss."""
    require_multiple(heads, f"{heads} attention heads share it", hidden=hidden)
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, n_positions=sequence,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1,
    )  # fmt: skip
    network = transformers.GPT2LMHeadModel(config)
    network.loss_type = "ForCausalLM"  # the package guesses it from the class name and warns for this one
    return _language_model(network, vocabulary, batch, sequence, use_cache=False)


@_bert("bert-tiny", **_TINY)
@_bert("bert-base")
@_bert("bert-large", layers=24, hidden=1024, heads=16)
def _build_bert(
    batch: int,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    sequence: int = 512,
    dropout: float = 0.0,
) -> Recipe:
    """BERT encoder, masked-language-model loss."""
    require_multiple(heads, f"{heads} attention heads share it", hidden=hidden)
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocabulary,
        intermediate_size=4 * hidden, max_position_embeddings=sequence,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return _language_model(transformers.BertForMaskedLM(config), vocabulary, batch, sequence)


@_llama("llama-tiny", key_value_heads=2, inner=176, **_TINY)
@_llama("llama3-8b")
@_llama("llama3-70b", layers=80, hidden=8192, heads=64, inner=28672)
@_llama("llama3-405b", layers=126, hidden=16384, heads=128, inner=53248)
def _build_llama(
    batch: int,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    key_value_heads: int = 8,
    inner: int = 14336,
    vocabulary: int = 128256,
    sequence: int = 8192,
) -> Recipe:
    """Llama 3 decoder with grouped-query attention, language-model loss."""
    _require_rotary_heads(heads, key_value_heads, hidden)
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=key_value_heads, intermediate_size=inner, vocab_size=vocabulary,
        max_position_embeddings=sequence, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config)
    return _language_model(network, vocabulary, batch, sequence, use_cache=False)


@_mixtral("mixtral-tiny", key_value_heads=2, inner=96, experts=4, **_TINY)
@_mixtral("mixtral-8x7b")
def _build_mixtral(
    batch: int,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    key_value_heads: int = 8,
    inner: int = 14336,
    experts: int = 8,
    chosen: int = 2,
    vocabulary: int = 32000,
    sequence: int = 4096,
) -> Recipe:
    """Mixtral decoder: a mixture of experts in every layer, language-model loss."""
    _require_rotary_heads(heads, key_value_heads, hidden)
    require_at_least(chosen, f"a token goes to {chosen} of them", experts=experts)
    require_multiple(8, "bfloat16 rows have to be multiples of 16 bytes", hidden=hidden, inner=inner)
    import transformers

    config = transformers.MixtralConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=key_value_heads, intermediate_size=inner, vocab_size=vocabulary,
        num_local_experts=experts, num_experts_per_tok=chosen, max_position_embeddings=sequence,
    )  # fmt: skip
    network = transformers.MixtralForCausalLM(config)
    return _language_model(network, vocabulary, batch, sequence, use_cache=False)
