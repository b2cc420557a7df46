"""Layers of experts that models write as a dozen operators become one; whatever else reads the order of rows
keeps them as they are. That the graph computes the same is compared as it is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.graph.ir import graph_from_dict, graph_to_dict
from tensoropt.ops.families.experts import GROUPED_PRODUCTS
from tensoropt.ops.families.routed_experts import EXPERTS
from tensoropt.sharding.atoms import refine_graph
from tensoropt.zoo.hugging_face import ModelLoss
from tests.models import Call

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 24, "vocab_size": 64, "max_position_embeddings": 16,
}  # fmt: skip
DEEPSEEK = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
}  # fmt: skip
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": QWEN | {"shared_expert_intermediate_size": 20},
    "Qwen3Moe": QWEN | {"head_dim": 8},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def language_model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name])
    network = getattr(transformers, f"{name}ForCausalLM")(config)
    ids = torch.randint(0, 64, (4, 8))
    return ModelLoss(network, use_cache=False), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_transformers(name):
    model, kwargs = language_model(name)
    graph = capture(model, (), kwargs).graph
    layer, _ = [op for op in graph.operators if op.target == EXPERTS]
    assert not [op for op in graph.operators if op.target in GROUPED_PRODUCTS]
    # The parameters themselves: what stores them in shards gathers them for this operator.
    assert {graph.tensors[weight.name].kind for weight in layer.args[3]} == {"parameter"}
    space = refine_graph(graph).spaces[layer.name]
    ways = {dim.name.split(".")[0] for dim in space.dims if dim.splittable}
    assert ways == {"rows", "experts", "features", "dispatch"}
    again = graph_from_dict(graph_to_dict(graph))
    assert again.operators == graph.operators
    assert again.fingerprint == graph.fingerprint


@pytest.mark.slow
def test_mixed_precision_keeps_the_operator():
    model, kwargs = language_model("Mixtral")
    graph = capture(model, (), kwargs, dtype="bfloat16").graph
    layer, _ = [op for op in graph.operators if op.target == EXPERTS]
    assert {graph.tensors[n].dtype for n in (*layer.inputs(), *layer.outputs)} == {"bfloat16", "int64"}
    assert {graph.tensors[n.name].master_dtype for n in layer.args[3]} == {"float32"}


def layer(more) -> nn.Module:
    """A layer of experts; ``more`` may read its rows as well."""

    def forward(m, x):
        product = torch.ops.transformers.grouped_mm_fallback
        factors, choice = m.router(x).softmax(-1).topk(2)
        ids, order = choice.reshape(-1).sort()
        ends = torch.histc(ids.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        rows = product(x[order // 2], m.up, ends)
        made = product(rows.relu(), m.down, ends) * factors.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        y = made[inverse].view(x.shape[0], 2, 8).sum(1)
        return y.square().sum() + more(ids, rows, made)

    return Call(forward, router=nn.Linear(8, 4), up=(4, 8, 12), down=(4, 12, 8))


READERS = {
    "no other": lambda ids, rows, made: 0,
    "of numbers": lambda ids, rows, made: ids.float().mean(),
    "of rows": lambda ids, rows, made: rows.flip(0).square().sum(),
    "of results": lambda ids, rows, made: made.square().mean(),
}


@pytest.mark.parametrize("name", READERS)
def test_what_else_reads_the_order_of_rows_keeps_it(name):
    pytest.importorskip("transformers.integrations.moe")
    graph = capture(layer(READERS[name]), (torch.randn(6, 8),)).graph
    kept = [op for op in graph.operators if op.target in GROUPED_PRODUCTS]
    noted = any("products of experts" in note for note in graph.notes)
    assert (len(kept), noted) == ((0, False) if name == "no other" else (2, True))
