"""The sizes of language models from their ``config.json``, as Hugging Face publishes them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tensoropt.errors import TensorOptError, suggest
from tensoropt.estimate.sizes import LAYER, RMS, TransformerSizes

LARGEST_BYTES = 1 << 20
"""No larger file is read: a ``config.json`` has a few kilobytes. An assumption."""


_TIMEOUT_S = 3.0
"""How long the Hugging Face Hub may take to answer; an assumption."""


class ConfigError(TensorOptError, ValueError):
    """A config whose model cannot be estimated: it lacks a size, or is of a kind that is not known."""


@dataclass(frozen=True)
class Config:
    """The content of a ``config.json``, whose sizes are checked when they are read."""

    data: Mapping[str, Any]
    name: str

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of these sizes that it has.

        Raises:
            ConfigError: it has none, or it is no whole number of at least ``least``.
        """
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{self.name}: {key} is {value!r}, and has to be a whole number of {least:,} or more"
                )
            return value
        if default is None:
            raise ConfigError(f"{self.name} has no {' or '.join(keys)}; give the model's own config.json")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """Return a switch."""
        value = self.data.get(key)
        return default if value is None else bool(value)


_ALL_BIASES = ("qkv", "out", "feed")


def _decoder(config: Config, **differing: Any) -> TransformerSizes:
    """Return the sizes of a Llama, and of what differs from it in ``differing``."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    attention = ("qkv", "out") if config.flag("attention_bias", False) else ()
    feed = ("feed",) if config.flag("mlp_bias", False) else ()
    sizes: dict[str, Any] = {
        "layers": config.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "key_heads": config.size("num_key_value_heads", default=heads),
        "head_dim": config.size("head_dim", default=max(1, hidden // heads)),
        "inner": config.size("intermediate_size"),
        "vocabulary": config.size("vocab_size"),
        "activation": str(config.data.get("hidden_act") or config.data.get("hidden_activation") or "silu"),
        "norm": RMS,
        "biases": (*attention, *feed),
        "tied": config.flag("tie_word_embeddings", False),
        "longest": config.size("max_position_embeddings", default=0, least=0),
    }
    return TransformerSizes(**{**sizes, **differing})


def _qwen2(config: Config) -> TransformerSizes:
    return _decoder(config, biases=("qkv",))


def _qwen3(config: Config) -> TransformerSizes:
    return _decoder(config, head_norms=True)


def _gemma(config: Config) -> TransformerSizes:
    return _decoder(config, tied=config.flag("tie_word_embeddings", True))


def _gemma3(config: Config) -> TransformerSizes:
    return _decoder(config, tied=config.flag("tie_word_embeddings", True), norms=4, head_norms=True)


def _mixtral(config: Config) -> TransformerSizes:
    return _decoder(
        config, experts=config.size("num_local_experts"), chosen=config.size("num_experts_per_tok")
    )


def _qwen_experts(config: Config, **differing: Any) -> TransformerSizes:
    layers, every = config.size("num_hidden_layers"), config.size("decoder_sparse_step", default=1)
    dense = set(config.data.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(layers) if (layer + 1) % every}
    return _decoder(
        config,
        inner=config.size("moe_intermediate_size"),
        experts=config.size("num_experts", "num_local_experts"),
        chosen=config.size("num_experts_per_tok"),
        dense_layers=len(dense),
        dense_inner=config.size("intermediate_size"),
        **differing,
    )


def _qwen2_experts(config: Config) -> TransformerSizes:
    shared = config.size("shared_expert_intermediate_size")
    biases = ("qkv",) if config.flag("qkv_bias", True) else ()
    return _qwen_experts(config, shared_inner=shared, biases=biases)


def _qwen3_experts(config: Config) -> TransformerSizes:
    return _qwen_experts(config, head_norms=True)


def _gpt2(config: Config) -> TransformerSizes:
    hidden, heads = config.size("n_embd"), config.size("n_head")
    return TransformerSizes(
        layers=config.size("n_layer"), hidden=hidden, heads=heads, key_heads=heads,
        head_dim=max(1, hidden // heads), inner=config.size("n_inner", default=4 * hidden),
        vocabulary=config.size("vocab_size"), gated=False,
        activation=str(config.data.get("activation_function") or "gelu_new"), norm=LAYER,
        biases=_ALL_BIASES, positions=config.size("n_positions"),
        tied=config.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _bert(config: Config) -> TransformerSizes:
    heads = config.size("num_attention_heads")
    return _decoder(
        config, gated=False, norm=LAYER, biases=_ALL_BIASES, head_product=True, longest=0, key_heads=heads,
        positions=config.size("max_position_embeddings"),
        token_types=config.size("type_vocab_size", default=2),
        tied=config.flag("tie_word_embeddings", True),
        activation=str(config.data.get("hidden_act") or "gelu"),
    )  # fmt: skip


FAMILIES: Mapping[str, Callable[[Config], TransformerSizes]] = {
    "llama": _decoder,
    "mistral": _decoder,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _decoder,
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_experts,
    "qwen3_moe": _qwen3_experts,
    "gpt2": _gpt2,
    "bert": _bert,
}
"""The sizes in a config, by its ``model_type``."""


def sizes_of(data: object, name: str = "the config") -> TransformerSizes:
    """Return the sizes in the content of a ``config.json``.

    Args:
        name: what an error calls it.

    Raises:
        ConfigError: it is no config, is of a kind that is not known, or lacks a size.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name} is no config.json of a language model: it has no fields")
    kind = str(data.get("model_type") or "")
    nested = data.get("text_config")
    if kind not in FAMILIES and isinstance(nested, Mapping):
        raise ConfigError(
            f"{name} is of the kind '{kind}', which reads more than text; what it takes is not estimated. "
            "Its text model alone is: give the content of its text_config as a file"
        )
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        hint = f"; {suggest(kind, FAMILIES)}" if kind else ""
        raise ConfigError(
            f"{name} is of the kind '{kind or 'without model_type'}', for which there is no arithmetic yet "
            f"({known} have one){hint}. Explore it as a Python model"
        )
    config = Config(data, name)
    sizes = FAMILIES[kind](config)
    if sizes.heads % sizes.key_heads:
        raise ConfigError(
            f"{name}: {sizes.heads} attention heads cannot share {sizes.key_heads} key heads evenly"
        )
    if sizes.chosen > sizes.experts:
        raise ConfigError(f"{name}: a token goes to {sizes.chosen} of {sizes.experts} experts")
    return sizes


def read_config(path: Path) -> Any:
    """Return the content of a ``config.json``.

    Raises:
        ConfigError: it cannot be read; the message says why.
    """
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"'{path}' is larger than 1 MiB, so it is no config.json")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read as a config.json: {error}") from None


def download_config(name: str) -> Any:
    """Return the config of a model on the Hugging Face Hub, from the cache or over the network.

    Raises:
        ConfigError: the package ``huggingface_hub`` is not installed, or finds no such config; the message
            says what to give instead.
    """
    instead = "give the path of its config.json instead"
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"'{name}': huggingface_hub is not installed, which finds it; {instead}") from None
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return read_config(Path(hf_hub_download(name, "config.json", local_files_only=True)))
        # Tried first, as the package tries five times and takes half a minute.
        host = urlsplit(constants.ENDPOINT).hostname or ""
        socket.create_connection((host, 443), _TIMEOUT_S).close()
        return read_config(Path(hf_hub_download(name, "config.json")))
    except (HfHubHTTPError, ValueError) as error:
        why = str(error).partition("\n")[0][:160]
    except OSError:
        why = "the Hugging Face Hub cannot be reached from here, and its config is not in the cache"
    raise ConfigError(f"'{name}': {why}; {instead}")
