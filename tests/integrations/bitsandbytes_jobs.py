"""Adapters beside layers of bitsandbytes, as people of transformers and peft make them, trained by a plan."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import tensoropt

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "int8": {"load_in_8bit": True},
}
BATCH, SEQUENCE, VOCABULARY = 4, 12, 64


def save_model(folder: Path) -> None:
    """Write a small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def loaded(folder: str, dtype: torch.dtype, **chosen: Any) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**chosen), device_map={"": "cpu"}, dtype=dtype
    )
    return model


def build(folder: str, kind: str) -> nn.Module:
    """The model with quantised layers, and adapters beside two of them."""
    return with_adapters(loaded(folder, torch.float32, **KINDS[kind]))


def prepared(folder: str, again: bool) -> nn.Module:
    """The same in bfloat16, as peft prepares it; ``again``: with its layers computed again in backward."""
    model = loaded(folder, torch.bfloat16, **KINDS["nf4"], bnb_4bit_compute_dtype=torch.bfloat16)
    return with_adapters(prepare_model_for_kbit_training(model, use_gradient_checkpointing=again))


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config).train()
    return adapted


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}


def step(rank, world, folder, kind, plan, saved):
    """How far losses and gradients by a plan are from those of bitsandbytes itself in one process; then the
    adapters, as they were saved."""
    plain, model = build(folder, kind), tensoropt.parallelize(build(folder, kind), plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    far: dict[str, float] = {"loss": 0.0, "gradients": 0.0}
    for _ in range(3):
        losses = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(**batch())
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            loss.backward()
            losses.append(float(loss))
        own = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
        ours = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}
        assert ours.keys() == own.keys()
        apart = max(float((ours[name] - own[name]).abs().max()) for name in own)
        far["loss"] = max(far["loss"], abs(losses[0] - losses[1]))
        far["gradients"] = max(far["gradients"], apart)
        for optimizer in optimizers:
            optimizer.step()
    tensoropt.save_pretrained(model, saved)
    written = load_file(Path(saved) / "adapter_model.safetensors")
    names = {key: value for key, value in plain.state_dict().items() if ".lora_" in key}
    wanted = {key.replace(".default", ""): value for key, value in names.items()}
    assert written.keys() == wanted.keys()
    return far | {"saved": max(float((written[key] - wanted[key]).abs().max()) for key in wanted)}
