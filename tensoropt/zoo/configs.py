"""Language models by their ``config.json``, from the Hugging Face Hub or a folder, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tensoropt.errors import import_extra
from tensoropt.zoo.hugging_face import LanguageModelLoss
from tensoropt.zoo.registry import Recipe, ZooError, tokens

HUB = "hf:"
CONFIG = "config.json"
_SEQUENCE = 4096
"""The longest default sequence, as configs allow far more than training uses; an assumption."""
_CLASSES = {"ForCausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM",
            "ForMaskedLM": "AutoModelForMaskedLM"}  # fmt: skip
"""Ending of a config's architecture -> the package's class."""


def from_config(name: str) -> Callable[..., Recipe]:
    """Return a builder of a config's model, with the parameters ``batch`` and ``sequence``.

    Args:
        name: ``hf:ID``, a folder with a ``config.json``, or that file; ``HF_HUB_OFFLINE`` holds.

    Raises:
        ZooError: there is no such config, or its architecture is no language model with one input.
        MissingExtraError: ``transformers`` is not installed.
    """
    transformers = import_extra("transformers", "zoo", f"the model {name}")
    place = name.removeprefix(HUB)
    if not name.startswith(HUB) and Path(place).name == CONFIG:
        place = str(Path(place).parent)
    try:
        config = transformers.AutoConfig.from_pretrained(place)
    except Exception as error:  # of the Hub, of the network, of the config itself
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ZooError(
            f"{name}: its {CONFIG} cannot be read ({said}); give hf:ID of a model that can be reached, or a "
            f"folder with its {CONFIG}"
        ) from None
    architecture = (config.architectures or ["?"])[0]
    kind = next((kind for end, kind in _CLASSES.items() if architecture.endswith(end)), None)
    if kind is None:
        raise ZooError(
            f"{name}: {architecture} is not built from its config, which {', '.join(_CLASSES)} are; write a "
            "function that returns (model, args), and give file.py:function"
        )
    longest = min(int(getattr(config, "max_position_embeddings", None) or _SEQUENCE), _SEQUENCE)

    def build(batch: int = 1, sequence: int = longest) -> Recipe:
        # Master weights, as in the zoo; what is computed in is a setting.
        network = getattr(transformers, kind).from_config(config, dtype="float32")
        options = {"use_cache": False} if kind == "AutoModelForCausalLM" else {}
        vocabulary = int(config.vocab_size)
        kwargs = {name: tokens(vocabulary, batch, sequence) for name in ("input_ids", "labels")}
        return LanguageModelLoss(network, **options), (), kwargs

    return build
