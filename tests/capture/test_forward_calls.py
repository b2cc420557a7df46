"""What forward makes lies where the model does, with its values; what no plan can hold is refused.

A model may branch on what is the same at every call; decoders of ``transformers`` take their flag then.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensoropt.capture import capture, rebuild
from tensoropt.errors import CaptureError
from tests.models import Call

TOKENS = 12
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
BERT = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "LlamaForCausalLM": ("LlamaConfig", SIZES),
    "MistralForCausalLM": ("MistralConfig", SIZES | {"sliding_window": 4}),
    "Qwen3ForCausalLM": ("Qwen3Config", SIZES | {"head_dim": 4}),
    "BertForMaskedLM": ("BertConfig", BERT),
    "OPTForCausalLM": ("OPTConfig", BERT | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
}


class Attention(TorchFunctionMode):
    """What every call of attention is given: shapes, whether no mask, the flags."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            q, k = args[:2]
            flags = (bool(kwargs.get("is_causal")), bool(kwargs.get("enable_gqa")))
            self.calls.append((tuple(q.shape), tuple(k.shape), kwargs.get("attn_mask") is None, *flags))
        return func(*args, **kwargs)


def attention_of(graph):
    found = []
    for op in graph.operators:
        if op.target == "aten.scaled_dot_product_attention.default":
            q, k = (graph.tensors[name].shape for name in op.inputs()[:2])
            given = dict(zip(("q", "k", "v", "mask", "dropout", "causal"), op.args, strict=False))
            flags = (bool(given.get("causal")), bool(op.kwargs.get("enable_gqa")))
            found.append((q, k, given.get("mask") is None, *flags))
    return found


def family(name, **inputs):
    transformers = pytest.importorskip("transformers")
    config, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    ids = torch.randint(3, 32, (2, TOKENS))
    return model, {"input_ids": ids, "labels": ids, **inputs}


SLOW = ("Qwen3ForCausalLM", "OPTForCausalLM")
"""Grouped queries as of Llama, and a causal mask as of GPT-2."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES]
)
def test_attention_of_transformers_is_that_of_eager_mode(name):
    model, call = family(name)
    with Attention() as eager:
        model(**call)
    assert eager.calls
    assert attention_of(capture(model, (), call).graph) == eager.calls
    with torch.device("meta"):
        shadow, call = family(name)
    assert attention_of(capture(shadow, (), call).graph) == eager.calls


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_mask_that_depends_on_an_input_stays(name):
    given = torch.arange(TOKENS).expand(2, -1) if name == "position_ids" else torch.ones(2, TOKENS).long()
    model, call = family("LlamaForCausalLM", **{name: given})
    graph = capture(model, (), call).graph
    assert {(masked, causal) for *_, masked, causal, _ in attention_of(graph)} == {(False, False)}


def branches(question):
    """A model that takes the branch that ``question`` says of its positions."""

    def forward(m, x):
        y = m.a(x)
        return y.sin().sum() if question(torch.arange(x.shape[1]), x) else y.cos().sum()

    return net(forward)


@pytest.mark.parametrize(
    ("question", "taken"),
    [
        (lambda positions, x: (positions.diff() == 1).all(), "sin"),
        (lambda positions, x: positions[-1].item() > 5, "cos"),
        (lambda positions, x: torch.ones_like(positions).float().mean() == 1, "sin"),
        (lambda positions, x: int(positions.max()) == 3, "sin"),
    ],
)
def test_branches_on_what_is_always_the_same(question, taken):
    graph = capture(branches(question), (torch.randn(3, 4),)).graph
    assert [op.target for op in graph.operators if taken in op.target]


def changed(positions, x):
    positions[0] = 7
    return positions[0] == 0


@pytest.mark.parametrize(
    "question",
    [
        lambda positions, x: torch.rand_like(positions.float()).sum() > 0,
        lambda positions, x: torch.randint(0, 2, (1,)).sum() > 0,
        changed,
    ],
)
def test_branches_on_other_values_are_refused(question):
    with pytest.raises(CaptureError):
        capture(branches(question), (torch.randn(3, 4),))


def net(forward):
    return Call(forward, a=nn.Linear(4, 4))


def _labels(m, x):
    return nn.functional.cross_entropy(m.a(x), torch.arange(4))


def _positions(m, x):
    near = torch.arange(4)[:, None] >= torch.arange(4)[None]
    return (m.a(x) * torch.zeros(4, 4).masked_fill(near, 2.0)).sum() + torch.linspace(0, 1, 3).sum()


def _values(m, x):
    return (m.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.as_tensor([[5.0]])).sum()


def _named_device(m, x):
    return (m.a(x.to("cpu")) * torch.ones(4, device="cpu")).cpu().sum()


def _data(m, x):
    return (m.a(x) * m.a(x).data.exp()).sum()


@pytest.mark.parametrize("forward", [_labels, _positions, _values, _named_device, _data])
def test_constants_have_their_values_wherever_the_model_is_captured(forward):
    model, x = net(forward), torch.randn(4, 4)
    with torch.device("meta"):
        empty = net(forward)
    graph = capture(empty, (x.to("meta"),)).graph
    assert graph.operators == capture(model, (x,)).graph.operators
    assert not any(value.is_meta for value in graph.constants.values())
    found = rebuild(graph, model)(x)
    torch.testing.assert_close(found, model(x))


def test_seeding_in_forward_is_noted_and_does_not_touch_the_scripts_numbers():
    def forward(m, x):
        torch.manual_seed(3)
        return m.a(x).sum()

    model = net(forward)
    before = torch.get_rng_state()
    graph = capture(model, (torch.zeros(4, 4),)).graph
    assert any("seeds the random numbers" in note for note in graph.notes)
    assert torch.equal(before, torch.get_rng_state())
