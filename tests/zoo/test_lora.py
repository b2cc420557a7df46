"""Adapters of low rank: which layers have them, what is frozen, and what a training of them takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensoropt
from tensoropt import Plan, TensorOptError
from tensoropt.exploration.answer import answer
from tensoropt.ops.quantised import SCHEMES, QuantisedLinear, WeightBytes, _dequantised
from tensoropt.question.model_source import load_model, with_lora, with_sequence
from tensoropt.report.owners import point_owners
from tensoropt.report.table import summary_lines
from tensoropt.zoo.lora import Lora, adapters_words, with_adapters

pytest.importorskip("peft")
R = 4
QUICK = {"placements": "never", "micro_batches": [1], "recompute": "never"}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_what_is_written_is_read():
    assert Lora.of("r=16") == Lora(16)
    found = Lora.of("r=8, alpha=32,dropout=0.05,targets=q_proj+v_proj")
    assert found == Lora(8, 32, 0.05, ("q_proj", "v_proj"))
    assert Lora.of("r=8,base=nf4-double").base == "nf4-double"


@pytest.mark.parametrize(("text", "message"), [
    ("16", "'16' is no KEY=VALUE; write r=16,alpha=32"),
    ("rank=16", "there is no key 'rank'"),
    ("alpha=32", "has no rank; write r=16"),
    ("r=4,r=8", "'r' is given twice"),
    ("r=many", "lora: 'many'"),
    ("r=0", "have to be at least 1"),
    ("r=4,dropout=1", "between 0 and 1"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(TensorOptError, match=message):
        with_lora("zoo:llama-tiny", text)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_of_the_zoo_has_those_of_its_architecture(device):
    loaded = load_model("zoo:llama-tiny", device=device, lora=f"r={R}")
    assert loaded.source == f"zoo:llama-tiny?lora=r={R}"
    adapters = trained(loaded.model)
    assert all(".lora_" in name and p.device.type == device for name, p in adapters.items())
    # Queries of 64 and values of 32 features from 64, in two layers.
    assert sum(p.numel() for p in adapters.values()) == 2 * R * ((64 + 64) + (64 + 32))
    assert type(loaded.model.network).__name__ == "PeftModelForCausalLM"


def test_every_process_builds_the_same():
    first, second = (load_model("zoo:gpt2-tiny?layers=1", seed=3, lora="r=2,alpha=4").model for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert {name.split(".")[-4] for name in trained(first)} == {"c_attn"}
    assert first.network.peft_config["default"].lora_alpha == 4


def test_options_stand_side_by_side():
    source = with_sequence(with_lora("zoo:gpt2-tiny?layers=1", "r=2,targets=c_fc+c_proj"), 8)
    loaded = load_model(source, batch=3)
    assert loaded.kwargs["input_ids"].shape == (3, 8)
    assert {name.split(".")[-4] for name in trained(loaded.model)} == {"c_fc", "c_proj"}
    assert load_model(source, device="meta", batch=2).kwargs["labels"].shape == (2, 8)


class Mixed(nn.Module):
    """Linear layers by several names, one of which attention reads the weights of."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.attention(x, x, x, need_weights=False)[0])


def test_any_module_has_them_on_all_linear_layers_that_are_called():
    model = with_adapters(Mixed(), Lora(2))
    assert sum(p.numel() for p in trained(model).values()) == 2 * 2 * (8 + 16)
    model(torch.randn(2, 3, 8)).sum().backward()
    assert all(p.grad is not None for p in trained(model).values())


BUILD = """
import torch
from tests.zoo.test_lora import Mixed

def build(batch=4):
    return Mixed(), (torch.zeros(batch, 3, 8),), {}, lambda y: y.square().mean()
"""


def test_a_function_that_builds_a_model_needs_to_know_nothing_of_them(tmp_path):
    (tmp_path / "net.py").write_text(BUILD)
    loaded = load_model(f"{tmp_path}/net.py:build", batch=2, lora="r=2,targets=0")
    assert loaded.model(*loaded.args).shape == ()
    assert {name.split(".")[-4] for name in trained(loaded.model)} == {"0"}


def test_layers_that_are_not_there_are_refused_with_those_that_are():
    with pytest.raises(TensorOptError, match=r"LlamaForCausalLM .*are called down_proj, .*targets=down_proj"):
        load_model("zoo:llama-tiny", lora="r=2,targets=query")
    with pytest.raises(TensorOptError, match="nothing: it has none"):
        with_adapters(nn.LayerNorm(3), Lora(2))
    with pytest.raises(TensorOptError, match="not the layers that adapters attach to"):
        with_lora("net.onnx", "r=2")
    with pytest.raises(TensorOptError, match="gives others; give one"):
        with_lora("zoo:llama-tiny?lora=r=2", "r=4")


def test_adapters_are_recognised_whoever_put_them_there():
    both = [("q.lora_A.default.weight", (4, 64)), ("q.lora_B.default.weight", (64, 4))]
    assert adapters_words(both) == "LoRA r4"
    assert adapters_words([("q.lora_A.x.weight", (4, 64)), ("v.lora_A.x.weight", (8, 64))]) == "LoRA r4, r8"
    assert adapters_words([("q.lora_A.x.weight", (4, 64)), ("head.weight", (8, 64))]) == ""
    assert adapters_words([]) == ""
    assert adapters_words([("q.lora_A.default.weight", (4, 64))], {"nf4"}) == "LoRA r4 on nf4"


WIDE = "zoo:llama-tiny?hidden=128&inner=256"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_linear_layers_but_the_output_are_stored_in_bytes(scheme):
    model = load_model(WIDE, lora=f"r={R},base={scheme}").model.network
    plain = load_model(WIDE, lora=f"r={R}").model.network
    layers = {name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert len(layers) == 2 * 7
    assert {name.endswith(".base_layer") for name in layers if "q_proj" in name} == {True}
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    for name in layers:  # the weights that the model would have
        layer, weight = model.get_submodule(name), plain.get_parameter(f"{name}.weight")
        stored = WeightBytes(layer.codes, layer.scales, layer.nested, layer.offset)
        off = (_dequantised(stored, scheme, torch.float32) - weight).abs().max()
        assert float(off) < 0.2 * float(weight.abs().max())
    assert {*trained(model)} == {*trained(plain)}


def test_what_lies_transposed_or_is_shared():
    gpt2 = load_model("zoo:gpt2-tiny?layers=1&hidden=64", lora=f"r={R},base=nf4")
    assert sum(isinstance(module, QuantisedLinear) for module in gpt2.model.modules()) == 4
    gpt2.model(*gpt2.args, **gpt2.kwargs).backward()
    assert all(p.grad is not None for p in trained(gpt2.model).values())
    mixed = with_adapters(Mixed(), Lora(2, base="int8"))
    assert sum(isinstance(module, QuantisedLinear) for module in mixed.modules()) == 2


def test_weights_that_blocks_do_not_divide_are_refused():
    with pytest.raises(TensorOptError, match=r"base=nf4: .*down_proj: .* per 64 .* 176 inputs .*; take int8"):
        load_model("zoo:llama-tiny", lora=f"r={R},base=nf4")


@pytest.mark.slow
def test_names_and_memory_are_those_of_bytes():
    """QLoRA: half a byte and the scale of 64 for each number, two bytes for the embedding and the output."""
    loaded = load_model(f"{WIDE}&layers=1", device="meta", lora=f"r={R},base=nf4")
    found = tensoropt.explore(loaded, cluster="dgx-h100[2]", **QUICK)
    assert all(name.endswith(f" · LoRA r{R} on nf4") for name in found.names)
    plain = load_model(f"{WIDE}&layers=1", device="meta").model
    linear = sum(p.numel() for name, p in plain.named_parameters() if "proj" in name)
    norms = sum(p.numel() for name, p in plain.named_parameters() if "norm" in name)
    rest = sum(p.numel() for p in plain.parameters()) - linear - norms
    assert found.model.parameters == linear + norms + rest + found.model.trained
    whole = next(i for i, name in enumerate(found.names) if name.startswith("DP 2 · LoRA"))
    stored = point_owners(found, whole).at().at.parameters
    assert stored == linear * (0.5 + 4 / 64) + 2 * rest + 4 * (norms + found.model.trained)


@pytest.fixture(scope="module")
def explored():
    loaded = load_model("zoo:llama-tiny", device="meta", lora=f"r={R}")
    return tensoropt.explore(loaded, cluster="dgx-h100[2]", **QUICK)


def test_names_and_answers_say_so(explored):
    assert all(name.endswith(f" · LoRA r{R}") for name in explored.names)
    assert f"LoRA r{R}," in answer(explored).sentence()
    count = 2 * R * ((64 + 64) + (64 + 32))
    assert f"parameters, {count:,} of them trained (LoRA r{R})" in summary_lines(explored)[0]
    again = Plan.model_validate_json(explored.plan(0).model_dump_json(by_alias=True))
    assert (again.model.trained, again.model.adapters) == (count, f"LoRA r{R}")


def test_memory_is_that_of_frozen_weights_and_of_adapters_that_are_trained(explored):
    """Two bytes for each frozen weight, sixteen for each that Adam trains in mixed precision; four for
    those of norms, which are multiplied in float32."""
    whole = [i for i, name in enumerate(explored.names) if name.startswith("DP 2 · LoRA")]
    at = point_owners(explored, whole[0]).at().at
    adapters = explored.model.trained
    norms = (2 * 2 + 1) * 64
    frozen = explored.model.parameters - adapters - norms
    assert (at.parameters, at.gradients) == (2 * frozen + 4 * (norms + adapters), 4 * adapters)
    assert at.optimizer == 8 * adapters
