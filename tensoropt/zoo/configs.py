"""Models of the ``transformers`` package from a ``config.json`` of the Hugging Face Hub or of a folder, with
random weights.

A class can be built if it computes a loss and if :data:`_INPUTS` can make all of its inputs from the config.
The ending of the class's name decides the labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensoropt.errors import import_extra, suggest
from tensoropt.zoo.hugging_face import ModelLoss
from tensoropt.zoo.registry import Recipe, ZooError, tokens

HUB = "hf:"
_CONFIG = "config.json"
_SEQUENCE, _IMAGE, _WAVE, _CHOICES = 4096, 224, 160_000, 4
"""The largest default of the sequence length (many configs allow far more than anybody trains on); default
side of an image in pixels; default number of samples of a recording (10 s at 16 kHz); number of answers per
multiple-choice question. All are assumptions."""
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
_VOCABULARY, _LABELS = "vocab_size", "num_labels"
_TARGETS: Mapping[str, tuple[str, str | int]] = {
    "ForCausalLM": ("tokens", _VOCABULARY),
    "LMHeadModel": ("tokens", _VOCABULARY),
    "ForMaskedLM": ("tokens", _VOCABULARY),
    "ForConditionalGeneration": ("tokens", _VOCABULARY),
    "EncoderDecoderModel": ("tokens", _VOCABULARY),
    "MTModel": ("tokens", _VOCABULARY),
    "ForPreTraining": ("tokens", 2),
    "ForTokenClassification": ("tokens", _LABELS),
    "ForMultipleChoice": ("samples", _CHOICES),
    "ForNextSentencePrediction": ("samples", 2),
    "Classification": ("samples", _LABELS),
    "ForSemanticSegmentation": ("pixels", _LABELS),
}
"""Ending of a class's name -> (what each label belongs to, number of classes or the config's field of it)."""
_INSTEAD = "write a function that returns (model, args), and give file.py:function"


def from_config(name: str) -> Callable[..., Recipe]:
    """Return a function that builds the model of a config. It has the parameters ``batch`` and, if the model
    reads tokens, ``sequence``.

    Args:
        name: ``hf:ID``, a folder with a ``config.json``, or that file; ``HF_HUB_OFFLINE`` is respected.

    Raises:
        ZooError: there is no such config, or its architecture has no loss or unsupported inputs.
        MissingExtraError: ``transformers`` is not installed.
    """
    transformers = import_extra("transformers", "zoo", f"the model {name}")
    place = name.removeprefix(HUB)
    if not name.startswith(HUB) and Path(place).name == _CONFIG:
        place = str(Path(place).parent)
    try:
        config = transformers.AutoConfig.from_pretrained(place)
    except Exception as error:  # of the Hub, of the network, of the config itself
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ZooError(
            f"{name}: its {_CONFIG} cannot be read ({said}); give hf:ID of a model that can be reached, or a "
            f"folder with its {_CONFIG}"
        ) from None
    architecture = (config.architectures or ["?"])[0]
    network = getattr(transformers, architecture, None)
    try:
        return builder(network, config) if network else _refuse_unknown(architecture, transformers)
    except ZooError as refusal:
        raise ZooError(f"{name}: {architecture} {refusal}") from None


def builder(network: Any, config: Any) -> Callable[..., Recipe]:
    """Return a function that builds a model of the class ``network`` of ``transformers``.

    Raises:
        ZooError: unsupported inputs or labels; the caller puts the class's name before the message.
    """
    taken = inspect.signature(network.forward).parameters
    head = next((row for end, row in _TARGETS.items() if network.__name__.endswith(end)), None)
    known = [name for name in _INPUTS if name in taken]
    _check(network, config, taken, known, head)
    options = {name: value for name, value in (("use_cache", False), ("return_loss", True)) if name in taken}

    longest = min(_size(config, *_POSITIONS, usual=_SEQUENCE), _SEQUENCE)
    if longest > 4 and (longest - 2).bit_count() == 1:
        longest -= 2  # models like RoBERTa reserve two positions

    def build(batch: int = 1, sequence: int = longest) -> Recipe:
        inputs = {name: _INPUTS[name](config, batch, sequence) for name in known}
        if head == _TARGETS["ForMultipleChoice"]:
            inputs = {name: tokens(_size(config, _VOCABULARY), batch, _CHOICES, sequence) for name in known}
        if "labels" in taken and head is not None:
            shape = {"tokens": (batch, sequence), "samples": (batch,), "pixels": (batch, *_image(config))}
            classes = head[1] if isinstance(head[1], int) else _size(config, head[1])
            # One class means regression, with a squared error.
            labels = tokens(classes, *shape[head[0]])
            inputs["labels"] = labels if classes > 1 else labels.float()
        # Master weights, as in the zoo; the compute dtype is a setting.
        model = network._from_config(config, dtype=torch.float32)
        return ModelLoss(model, **options), (), inputs

    def build_without(batch: int = 1) -> Recipe:
        return build(batch, 0)

    reads_tokens = "input_ids" in known or (head is not None and head[0] == "tokens" and "labels" in taken)
    return build if reads_tokens else build_without


def _check(network: Any, config: Any, taken: Mapping[str, Any], known: list[str], head: Any) -> None:
    """Raise :class:`ZooError` for a model class that computes no loss, or whose forward (with parameters
    ``taken``) needs inputs that are not ``known``, labels of an unsupported kind (``head`` is None), or texts
    with placeholders of images or audio."""
    if not {"labels", "start_positions", "return_loss"} & set(taken):
        import transformers

        stem = network.__name__.removesuffix("Model")
        does = [n for n in dir(transformers) if n.startswith(f"{stem}For") and n.endswith(tuple(_TARGETS))]
        name = " or ".join(does[:4]) or "one that does"
        raise ZooError(f'computes no loss; write {name} into its "architectures", or {_INSTEAD}')
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [n for n in (*needed[1:], network.main_input_name) if n not in (*known, "labels")]
    if needed:
        raise ZooError(f"reads {needed[0]}, whose shape its config does not give; {_INSTEAD}")
    if "labels" in taken and head is None:
        raise ZooError(f"has labels of an unsupported kind; {_INSTEAD}")
    places = [n for n in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
              if getattr(config, n, None) is not None]  # fmt: skip
    if places:
        raise ZooError(f"reads texts with {places[0][:5]} placeholders, made by its processor; {_INSTEAD}")


def _refuse_unknown(architecture: str, transformers: Any) -> Any:
    names = [name for name in dir(transformers) if name.endswith(tuple(_TARGETS))]
    raise ZooError(f"is no class of transformers {transformers.__version__}; {suggest(architecture, names)}")


def _size(config: Any, *names: str, usual: int | None = None) -> Any:
    """Return the first of the fields ``names`` that a config, or one nested in it, has; else ``usual``. Raise
    :class:`ZooError` if ``usual`` is None, too."""
    inner = [getattr(config, part, None) for part in getattr(config, "sub_configs", ())]
    for one in (config, *inner):
        for name in names:
            if (value := getattr(one, name, None)) is not None:
                return value
    if usual is None:
        raise ZooError(f"has no {' or '.join(names)} in its config; {_INSTEAD}")
    return usual


def _image(config: Any) -> tuple[int, int]:
    size = _size(config, "image_size", usual=_IMAGE)
    if isinstance(size, int):
        return size, size
    height, width = size.values() if isinstance(size, Mapping) else size
    return int(height), int(width)


def _pixels(config: Any, batch: int, _: int) -> Tensor:
    """Return images, or videos if the config has a number of frames."""
    frames = _size(config, "num_frames", usual=0)
    channels = _size(config, "num_channels", "in_channels", usual=3)
    return torch.randn(batch, *([frames] if frames else []), channels, *_image(config))


def _spectra(config: Any, batch: int, _: int) -> Tensor:
    """Return spectrograms as Whisper reads them, with two frames per position of the encoder."""
    return torch.randn(batch, _size(config, "num_mel_bins"), 2 * _size(config, "max_source_positions"))


def _wave(config: Any, batch: int, _: int) -> Tensor:
    """Return waveforms, or spectrograms if the config has a number of mel bins."""
    bins = _size(config, "num_mel_bins", usual=0)
    return torch.randn(batch, *([_size(config, "max_length"), bins] if bins else [_WAVE]))


_INPUTS: Mapping[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": lambda config, batch, sequence: tokens(_size(config, _VOCABULARY), batch, sequence),
    "pixel_values": _pixels,
    "input_features": _spectra,
    "input_values": _wave,
    "start_positions": lambda _, batch, sequence: tokens(sequence, batch),
    "end_positions": lambda _, batch, sequence: tokens(sequence, batch),
    "next_sentence_label": lambda _, batch, __: tokens(2, batch),
    "sentence_order_label": lambda _, batch, __: tokens(2, batch),
}
"""Name of an input -> function of (config, batch, sequence) that returns random values."""
