"""Models by their config: whatever class of the package computes a loss, or a sentence why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tensoropt.cluster import load_cluster
from tensoropt.question.compute_dtype import dtype_of
from tensoropt.question.model_source import ModelSourceError, default_batch, load_model, with_sequence

pytest.importorskip("transformers")
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**LAYERS, "vocab_size": 128, "max_position_embeddings": 32}
PATCHES = {**LAYERS, "image_size": 32, "patch_size": 8}
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BOTH = {
    "d_model": 32, "vocab_size": 128, "max_position_embeddings": 32, "decoder_start_token_id": 3,
    "pad_token_id": 0,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDES.items()},
}  # fmt: skip
DECODER = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TEXT, "num_key_value_heads": 2}
T5 = {
    "num_layers": 2, "num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 64, "vocab_size": 128,
    "n_positions": 32, "decoder_start_token_id": 0,
}  # fmt: skip
CLIP = {
    "text_config": {**TEXT, "max_position_embeddings": 16},
    "vision_config": PATCHES,
    "projection_dim": 32,
}
PYRAMID = {
    "hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8,
}  # fmt: skip
SOUND = {**LAYERS, "num_mel_bins": 16, "max_length": 64}
SPECTRA = {**BOTH, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 16}


@pytest.fixture
def folder(tmp_path):
    def write(config: dict[str, Any] = DECODER, **change: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(("kind", "architecture", "config", "inputs"), [
    ("qwen2", "Qwen2ForCausalLM", DECODER, {"input_ids": (2, 32), "labels": (2, 32)}),
    ("roberta", "RobertaForMaskedLM", {**TEXT, "max_position_embeddings": 34}, {"input_ids": (2, 32)}),
    ("bert", "BertForTokenClassification", TEXT, {"labels": (2, 32)}),
    ("bert", "BertForSequenceClassification", {**TEXT, "num_labels": 1}, {"labels": (2,)}),
    ("bert", "BertForMultipleChoice", TEXT, {"input_ids": (2, 4, 32), "labels": (2,)}),
    ("bert", "BertForQuestionAnswering", TEXT, {"start_positions": (2,), "end_positions": (2,)}),
    ("bert", "BertForPreTraining", TEXT, {"labels": (2, 32), "next_sentence_label": (2,)}),
    ("t5", "T5ForConditionalGeneration", T5, {"input_ids": (2, 32), "labels": (2, 32)}),
    ("bart", "BartForConditionalGeneration", BOTH, {"input_ids": (2, 32), "labels": (2, 32)}),
    ("whisper", "WhisperForConditionalGeneration", SPECTRA,
     {"input_features": (2, 16, 64), "labels": (2, 16)}),
    ("vit", "ViTForImageClassification", PATCHES, {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
    ("segformer", "SegformerForSemanticSegmentation", PYRAMID, {"labels": (2, 224, 224)}),
    ("clip", "CLIPModel", CLIP, {"input_ids": (2, 16), "pixel_values": (2, 3, 32, 32)}),
    ("audio-spectrogram-transformer", "ASTForAudioClassification", SOUND, {"input_values": (2, 64, 16)}),
])  # fmt: skip
def test_it_computes_a_loss_of_made_up_inputs(folder, kind, architecture, config, inputs):
    loaded = load_model(folder(config, model_type=kind, architectures=[architecture]), batch=2)
    assert {name: loaded.kwargs[name].shape for name in inputs} == inputs
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    loss = loaded.model(**loaded.kwargs)
    assert loss.shape == ()
    assert loss.isfinite()


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": "x"}, "cannot be read"),
    ({"architectures": ["Qwen2ForCausalLMs"]}, "is no class of transformers .*'Qwen2ForCausalLM'"),
    ({"architectures": ["Qwen2Model"]}, "computes no loss; write Qwen2ForCausalLM or .* into its"),
    ({"model_type": "detr", "architectures": ["DetrForObjectDetection"]}, "labels of an unsupported kind"),
    ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}, "image placeholders"),
    ({"model_type": "pix2struct", "architectures": ["Pix2StructForConditionalGeneration"]},
     "reads flattened_patches"),
])  # fmt: skip
def test_what_cannot_be_built_is_refused(folder, change, words):
    with pytest.raises(ModelSourceError, match=words):
        load_model(folder(**change))


def test_it_has_a_batch_and_no_weights_and_a_sequence_where_it_reads_one(folder):
    source = with_sequence(f"{folder()}/config.json", 16)
    assert default_batch(source) == 1
    loaded = load_model(source, device="meta", batch=3)
    assert loaded.kwargs["labels"].shape == (3, 16)
    assert next(loaded.model.parameters()).is_meta
    vit = folder(PATCHES, model_type="vit", architectures=["ViTForImageClassification"])
    with pytest.raises(ModelSourceError, match="has no option 'sequence'"):
        load_model(f"{vit}?sequence=8")


def test_it_has_adapters_where_its_architecture_has_them(folder):
    pytest.importorskip("peft")
    loaded = load_model(folder(), device="meta", lora="r=4")
    trained = {name.split(".")[-4] for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    assert dtype_of(loaded.source, [load_cluster("dgx-h100")])[0] == "bfloat16"
