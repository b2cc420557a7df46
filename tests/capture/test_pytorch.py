"""PyTorch models become operator graphs: what is kept, folded, renamed, refused.

Only what lies between parameters and the loss gets gradients, and random numbers stay random.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.fidelity import in_double
from tensoropt.capture.pytorch import COUNT
from tensoropt.errors import CaptureError
from tests.models import Call
from tests.sharding.calls import graph_of_call
from tests.sharding.graph_check import check_graph


def test_scores_that_only_choose_get_no_gradient():
    """Only the weights of what they chose are differentiable."""

    def router(m, x):
        scores = m.gate(x)
        chosen = (scores.sigmoid() + 1.0).topk(2, -1).indices
        return m.layer(x).gather(1, chosen).square().sum() + scores.float().mean()

    model = Call(router, gate=nn.Linear(8, 4), layer=nn.Linear(8, 4))
    graph = capture(model, (torch.randn(6, 8),)).graph
    with_gradient = {op.target: graph.tensors[op.outputs[0]].requires_grad for op in graph.operators}
    assert not any(with_gradient[f"aten.{kind}.default"] for kind in ("sigmoid", "topk"))
    assert all(with_gradient[f"aten.{kind}.default"] for kind in ("linear", "gather", "mean"))


def test_random_numbers_are_drawn_at_every_step():
    """Gumbel noise depends on no input, but is no constant either; memory nobody wrote to is zero."""
    graph = graph_of_call("gumbel")
    assert [op.target for op in graph.operators if "exponential" in op.target] == ["aten.exponential.default"]
    assert all(not value.any() for value in graph.constants.values())
    report = check_graph(graph, parts=(2, 4))
    assert not report.mismatches, str(report)
    assert not report.unknown


def test_double_precision_keeps_every_operator():
    class Casts(nn.Linear):
        def forward(self, x):
            return super().forward(x).float().softmax(-1, dtype=torch.float32).half().float().mean()

    graph = capture(Casts(4, 4), (torch.randn(2, 4),)).graph
    wide = in_double(graph)
    assert [op.name for op in wide.operators] == [op.name for op in graph.operators]
    assert {t.dtype for t in graph.tensors.values()} == {"float32", "float16"}
    assert {t.dtype for t in wide.tensors.values()} == {"float64"}
    assert not any(name in str([op.args for op in wide.operators]) for name in ("float32", "float16"))


def test_experts_are_counted_in_floats() -> None:
    """As transformers counts numbers off the CPU."""
    model = Call(lambda m, ids: (torch.histc(ids.int(), bins=4, min=0, max=3) * m.scale).sum(), scale=4)
    graph = capture(model.to("meta"), (torch.randint(0, 4, (8,)),)).graph
    (count,) = [op for op in graph.operators if op.target == COUNT]
    assert {graph.tensors[n].dtype for n in (*count.inputs(), *count.outputs)} == {"float32"}
    (cast,) = [graph.producer[n] for n in count.inputs()]
    assert cast.kwargs["dtype"].name == "float32"


def targets(graph) -> list[str]:
    return [op.target.removeprefix("aten.").removesuffix(".default") for op in graph.operators]


def kinds(graph, kind: str) -> list:
    return [t for t in graph.tensors.values() if t.kind == kind]


X = torch.randn(4, 8)


# -- losses and outputs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "rebuilt"),
    [
        (lambda loss, y: loss, "loss"),
        (lambda loss, y: (loss, y), ("loss", None)),
        (lambda loss, y: [y, loss], [None, "loss"]),
        (lambda loss, y: {"logits": y, "loss": loss}, {"logits": None, "loss": "loss"}),
    ],
)
def test_only_the_loss_is_kept_in_training(returned, rebuilt):
    """Logits that nothing reads would stay alive until the end of the step."""

    def forward(m, x):
        y = x * m.w
        return returned(y.sum(), y.exp())

    captured = capture(Call(forward, w=8), (X,))
    assert targets(captured.graph) == ["mul.Tensor", "sum"]
    assert captured.returned.rebuild("loss") == rebuilt


def test_inference_keeps_all_outputs():
    captured = capture(Call(lambda m, x: (x * m.w, {"b": x.exp()}), w=8), (X,), mode="inference")
    assert len(captured.graph.outputs) == 2
    assert not captured.graph.training
    assert not any(t.requires_grad for t in captured.graph.tensors.values())
    assert captured.returned is None


# -- inputs ---------------------------------------------------------------------------------------


IDS = torch.randint(0, 6, (4,))
INPUTS = {
    # Labels and token ids are often the same tensor; export would merge them.
    "passed twice": (lambda m, x, y: F.cross_entropy(F.embedding(x, m.v), y), (IDS, IDS), {}, ["0", "1"]),
    "not read": (lambda m, x, unused, y: (x * m.w + y).sum(), (X, X + 1, X + 2), {}, ["0", "1", "2"]),
    "by keyword, beside plain values": (
        lambda m, x, scale, flag: (x * m.w * scale).sum() if flag else x.sum(),
        (), {"x": X, "scale": 2.0, "flag": True}, ["0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_keep_their_places(name):
    function, args, kwargs, keys = INPUTS[name]
    graph = capture(Call(function, w=8, v=(6, 6)), args, kwargs).graph
    assert [graph.tensors[name].key for name in graph.inputs] == keys


# -- parameters and buffers -----------------------------------------------------------------------


def test_tied_weights_are_one_parameter_with_an_alias():
    def forward(m, ids):
        return F.cross_entropy(m.head(m.embed(ids)).flatten(0, 1), ids.flatten())

    model = Call(forward, embed=nn.Embedding(6, 8), head=nn.Linear(8, 6, bias=False))
    model.head.weight = model.embed.weight
    graph = capture(model, (torch.randint(0, 6, (2, 3)),)).graph
    (weight,) = graph.parameters
    assert {weight.key, *graph.aliases} == {"embed.weight", "head.weight"}
    assert set(graph.aliases.values()) == {weight.key}
    assert len(graph.consumers[weight.name]) == 2


def test_frozen_and_unused_parameters():
    def forward(m, x):
        return (x * m.w * m.v).sum()

    model = Call(forward, w=8, v=8, unused=3)
    model.v.requires_grad_(False)
    graph = capture(model, (X,)).graph
    assert {t.key: t.requires_grad for t in graph.parameters} == {"w": True, "v": False}
    assert any("1 parameters are not used by the loss: unused" in note for note in graph.notes)


def test_batch_norm_updates_its_buffers_in_training():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    graph = capture(model, (X,), loss=lambda y: y.square().sum()).graph
    keys = {graph.tensors[name].key for name in graph.mutations}
    assert keys == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for before, after in graph.mutations.items():
        assert graph.tensors[before].kind == "buffer"
        assert graph.tensors[after].shape == graph.tensors[before].shape
    graph = capture(model, (X,), mode="inference").graph
    assert (dict(graph.mutations), len(kinds(graph, "buffer"))) == ({}, 2)


# -- what is folded and renamed -------------------------------------------------------------------


def test_a_causal_mask_is_one_constant_at_its_smallest_shape():
    def forward(m, x):
        positions = torch.arange(8)
        mask = (positions[:, None] >= positions[None, :])[None, None].expand(4, 2, 8, 8)
        return torch.where(mask, x * m.w, -1.0).sum()

    graph = capture(Call(forward, w=8), (torch.randn(4, 2, 8, 8),)).graph
    (mask,) = kinds(graph, "constant")
    assert mask.shape == (4, 2, 8, 8)
    assert graph.constants[mask.name].shape == (1, 1, 8, 8)
    assert targets(graph) == ["mul.Tensor", "where.ScalarOther", "sum"]


def test_a_tensor_held_by_the_code_is_a_constant():
    weight = torch.rand(8)
    model = Call(lambda m, x: nn.functional.cross_entropy(x * m.w, torch.arange(4), weight), w=8)
    graph = capture(model, (X,)).graph
    (name,) = (n for n, value in graph.constants.items() if value.shape == weight.shape)
    assert torch.equal(graph.constants[name], weight)
    assert not kinds(graph, "buffer")  # no state dict has it


def test_equal_constants_are_one():
    def forward(m, x):
        return (x * torch.arange(8) * m.w * torch.arange(0, 8)).sum()

    graph = capture(Call(forward, w=8), (X,)).graph
    assert len(kinds(graph, "constant")) == 1
    assert len(graph.constants) == 1


def test_pieces_of_constants_are_constants():
    def forward(m, x):
        first, second = torch.arange(16.0).split(8)
        return (x * m.w * first + second).sum()

    graph = capture(Call(forward, w=8), (X,)).graph
    assert {tuple(value.tolist()) for value in graph.constants.values()} == {
        tuple(map(float, range(8))),
        tuple(map(float, range(8, 16))),
    }
    assert targets(graph) == ["mul.Tensor", "mul.Tensor", "add.Tensor", "sum"]


WITHOUT = {
    "clone": lambda m, x: (x.clone().contiguous() * m.w).sum(),
    "type_as": lambda m, x: (x.type_as(m.w) * m.w).sum(),
    "same shape": lambda m, x: (x.view(4, 8).expand(4, 8)[:, :] * m.w).sum(),
    "dropout of nothing": lambda m, x: (F.dropout(x, 0.0) * m.w).sum(),
    "concatenation with nothing": lambda m, x: (torch.cat([x, x[:, 8:]], 1) * m.w).sum(),
    "same dtype": lambda m, x: (x.float() * m.w).sum(),
    "what only an assertion reads": lambda m, x: torch._check(x.int().max().item() < 9) or (x * m.w).sum(),
    "what has no gradient anyway is not detached": lambda m, x: (x.detach() * m.w).sum(),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_changes_nothing_is_no_operator(name):
    assert targets(capture(Call(WITHOUT[name], w=8), (X,)).graph) == ["mul.Tensor", "sum"]


def test_filling_reads_nothing_but_a_shape():
    """Shifted labels of encoder-decoders are written in place into ``new_zeros``."""

    def forward(m, ids):
        shifted = ids.new_zeros(ids.shape)
        shifted[:, 1:] = ids[:, :-1].clone()
        shifted[:, 0] = 2
        return F.embedding(shifted, m.w).sum()

    ids = torch.randint(0, 6, (4, 8))
    graph = capture(Call(forward, w=(6, 8)), (ids,)).graph
    assert targets(graph) == ["slice.Tensor", "slice_scatter", "select_scatter", "embedding", "sum"]
    assert all(graph.constants[t.name].numel() == 1 for t in kinds(graph, "constant"))


INDICES = {
    # How masks are looked up by code written for ``vmap``.
    "whole dims": (lambda: (torch.arange(4)[:, None, None], torch.arange(8)[None, None, :]), X, "view"),
    "whole dims of another size": (
        lambda: (torch.arange(8)[:, None], torch.arange(4)[None, :]),
        torch.randn(8, 4),
        "view",
    ),
    "backwards": (lambda: (torch.arange(4).flip(0)[:, None], torch.arange(8)[None, :]), X, "index.Tensor"),
    "transposed": (lambda: (torch.arange(4)[None, :], torch.arange(4)[:, None]), X, "index.Tensor"),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_counts_over_whole_dims_is_a_view_and_others_stay(name):
    index, x, first = INDICES[name]
    graph = capture(Call(lambda m, x: (x[index()] * m.w).sum(), w=1), (x,)).graph
    assert targets(graph) == [first, "mul.Tensor", "sum"]
    assert name != "whole dims" or graph.operators[0].args[1] == [4, 1, 8]


# -- where operators come from --------------------------------------------------------------------


def test_operators_know_their_module_and_line():
    model = Call(lambda m, x: m.inner(x).sum(), inner=nn.Sequential(nn.Linear(8, 4)))
    (linear,) = [op for op in capture(model, (X,)).graph.operators if "linear" in op.target]
    assert linear.module == "inner.0"
    assert "test_pytorch.py" in linear.source
    assert "m.inner(x).sum()" in linear.source


# -- inputs changed in place ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_an_input_changed_in_place_is_no_output(mode):
    def forward(m, x):
        x.add_(1)
        return (x * m.w).sum()

    graph = capture(Call(forward, w=8), (X.clone(),), mode=mode).graph
    assert [graph.tensors[n].shape for n in graph.outputs] == [()]
    assert "changes its input" in graph.notes[0]


# -- refusals -----------------------------------------------------------------------------------------

LINEAR = nn.Linear(8, 8)
REFUSED = [
    (lambda x: x, {}, r"function is not a torch\.nn\.Module"),
    (
        nn.Sequential(LINEAR, nn.Linear(8, 8, device="meta")),
        {},
        r"0\.weight on cpu and 1\.weight on meta.*on one",
    ),
    (LINEAR, {"args": ()}, r"missing 1 required.*args and kwargs"),
    (LINEAR, {"loss": lambda y: y}, r"loss= returns a tensor of shape \(4, 8\).*scalar"),
    (LINEAR, {"loss": None}, r"a tensor of shape \(4, 8\) without a scalar.*pass loss="),
    (Call(lambda m, x: None, w=8), {"loss": None}, "returns nothing without a scalar"),
    (nn.Linear(8, 8).requires_grad_(False), {}, "no trained parameter"),
]


@pytest.mark.parametrize(("model", "more", "pattern"), REFUSED)
def test_what_cannot_be_captured_at_all(model, more, pattern):
    with pytest.raises(CaptureError, match=pattern):
        capture(model, **{"args": (X,), "loss": torch.sum} | more)


# -- values that are checked --------------------------------------------------------------------


def test_values_are_taken_to_be_finite_and_the_graph_says_so():
    def forward(m, x):
        y = x * m.w
        if not torch.isfinite(y).all():
            y = torch.clamp(y, -1.0, 1.0)
        if torch.isinf(y).any() or y.isnan().any():
            y = y * 0.0
        return y.sum()

    graph = capture(Call(forward, w=8), (X,)).graph
    assert targets(graph) == ["mul.Tensor", "sum"]
    assert len(graph.notes) == 2  # one per line that asks
    assert all("test_pytorch.py" in note and "finite" in note for note in graph.notes)


def test_other_questions_about_values_are_still_refused():
    with pytest.raises(CaptureError, match="value of a tensor"):
        capture(Call(lambda m, x: x.sum() if torch.isfinite(x).sum() > 3 else m.w.sum(), w=8), (X,))


def test_distributions_do_not_validate_while_they_are_exported():
    def forward(m, x):
        return -torch.distributions.StudentT(3.0 + m.w.exp(), x, m.w.exp()).log_prob(x + 1.0).mean()

    before = torch.distributions.Distribution._validate_args
    capture(Call(forward, w=8), (X,))
    assert torch.distributions.Distribution._validate_args is before


def test_masks_are_folded_at_the_size_in_which_they_differ() -> None:
    """A billion equal entries, which nobody could write out here."""

    def masked(m, x):
        place = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        mask = (place[:, :, None] >= place[:, None, :]) & (place[:, None, :] >= 0)
        return (x * m.scale * mask[:, 0, :]).sum()

    with torch.device("meta"):
        found = capture(Call(masked, scale=1), (torch.empty(65536, 4096),))
    [mask] = [v for v in found.graph.constants.values() if v.dtype == torch.bool]
    assert mask.numel() <= 4096


@pytest.mark.parametrize("copy", [torch.clone, torch.Tensor.contiguous], ids=["clone", "contiguous"])
def test_a_copy_is_kept_for_what_reads_memory_as_it_lies(copy):
    """Pairs of permuted numbers are no complex numbers until they are copied."""

    def turned(m, x):
        pairs = (x * m.w).permute(0, 2, 1).unflatten(-1, (3, 2)).contiguous()
        pairs = copy(pairs, memory_format=torch.contiguous_format)
        return torch.view_as_real(torch.view_as_complex(pairs) * 1j).square().sum()

    graph = capture(Call(turned, w=(8,)), (torch.randn(4, 6, 8),)).graph
    assert [op.target for op in graph.operators].count("aten.clone.default") == 1
    assert not check_graph(graph).mismatches


def test_a_conjugate_is_resolved_before_its_parts_are_viewed():
    def conjugated(m, x):
        return torch.view_as_real(torch.fft.rfft(x * m.w).conj().resolve_conj()).square().sum()

    assert not check_graph(capture(Call(conjugated, w=(8,)), (torch.randn(4, 8),)).graph).mismatches
