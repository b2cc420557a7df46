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


class Router(nn.Module):
    """Scores choose, but only the weights of what they chose are differentiable."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        scores = self.gate(x)
        chosen = (scores.sigmoid() + 1.0).topk(2, -1).indices
        return self.layer(x).gather(1, chosen).square().sum() + scores.float().mean()


def test_scores_that_only_choose_get_no_gradient():
    graph = capture(Router(), (torch.randn(6, 8),)).graph
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


class Counts(nn.Module):
    """Counts numbers as transformers does off the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (torch.histc(numbers.int(), bins=4, min=0, max=3) * self.scale).sum()


def test_experts_are_counted_in_floats() -> None:
    graph = capture(Counts().to("meta"), (torch.randint(0, 4, (8,)),)).graph
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


def test_a_scalar_output_is_the_loss():
    captured = capture(Call(lambda m, x: (x * m.w).sum(), w=8), (X,))
    assert targets(captured.graph) == ["mul.Tensor", "sum"]
    assert captured.graph.tensors[captured.graph.outputs[0]].shape == ()
    assert captured.returned.rebuild("loss") == "loss"


@pytest.mark.parametrize(
    ("returned", "rebuilt"),
    [
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


def test_a_loss_without_gradient_is_no_loss():
    with pytest.raises(CaptureError, match="depends on no trained parameter"):
        capture(Call(lambda m, x: x.sum(), w=8), (X,))


def test_loss_function():
    captured = capture(nn.Linear(8, 4), (X,), loss=lambda y: y.square().mean())
    assert targets(captured.graph) == ["linear", "square", "mean"]


def test_the_mode_of_the_model_is_given_back():
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(), nn.Dropout())
    model[1].eval()
    graph = capture(model, (X,), loss=torch.sum).graph
    assert [m.training for m in model.modules()] == [True, True, False, True]
    assert "dropout" in targets(graph)
    assert "dropout" not in targets(capture(model, (X,), mode="inference").graph)


# -- inputs ---------------------------------------------------------------------------------------


def test_a_tensor_passed_twice_stays_two_inputs():
    """Labels and token ids are often the same tensor; export would merge them."""
    ids = torch.randint(0, 6, (4,))
    model = Call(lambda m, x, y: F.cross_entropy(F.embedding(x, m.w), y), w=(6, 6))
    graph = capture(model, (ids, ids)).graph
    assert len(graph.inputs) == 2
    assert [graph.tensors[name].key for name in graph.inputs] == ["0", "1"]


def test_an_input_nothing_reads_is_kept_in_its_place():
    graph = capture(Call(lambda m, x, unused, y: (x * m.w + y).sum(), w=8), (X, X + 1, X + 2)).graph
    assert [graph.tensors[name].key for name in graph.inputs] == ["0", "1", "2"]


def test_keyword_inputs_and_plain_values():
    model = Call(lambda m, x, scale, flag: (x * m.w * scale).sum() if flag else x.sum(), w=8)
    graph = capture(model, (), {"x": X, "scale": 2.0, "flag": True}).graph
    assert len(graph.inputs) == 1


# -- parameters and buffers -----------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


def test_tied_weights_are_one_parameter_with_an_alias():
    graph = capture(Tied(), (torch.randint(0, 6, (2, 3)),)).graph
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


def test_gradients_flow_only_where_parameters_are():
    graph = capture(Call(lambda m, x: (x.exp() * m.w.detach() + m.w).sum(), w=8), (X,)).graph
    flow = {op.target.split(".")[1]: graph.tensors[op.outputs[0]].requires_grad for op in graph.operators}
    assert flow["exp"] is False
    assert flow["mul"] is False
    assert flow["add"] is True


def test_batch_norm_updates_its_buffers():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    graph = capture(model, (X,), loss=lambda y: y.square().sum()).graph
    keys = {graph.tensors[name].key for name in graph.mutations}
    assert keys == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for before, after in graph.mutations.items():
        assert graph.tensors[before].kind == "buffer"
        assert graph.tensors[after].shape == graph.tensors[before].shape


def test_statistics_that_a_second_call_of_a_norm_reads_have_no_gradient():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            first, second = self.norm(self.layer(x)), self.norm(self.layer(-x))
            return (first * second).mean() + (first - self.norm.running_mean).square().mean()

    graph = capture(Twice(), (X,)).graph
    norms = [op for op in graph.operators if op.target.startswith("aten._native_batch_norm")]
    assert len(norms) == 2
    for op in norms:
        result, *statistics = (graph.tensors[name].requires_grad for name in op.outputs)
        assert result
        assert not any(statistics)


def test_batch_norm_in_inference_changes_nothing():
    graph = capture(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), (X,), mode="inference").graph
    assert not graph.mutations
    assert len(kinds(graph, "buffer")) == 2


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


def test_random_numbers_are_not_folded():
    graph = capture(Call(lambda m, x: (x * m.w * torch.rand(8)).sum(), w=8), (X,)).graph
    assert "rand" in targets(graph)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (x.clone().contiguous() * m.w).sum(),
        lambda m, x: (x.type_as(m.w) * m.w).sum(),
        lambda m, x: (x.view(4, 8).expand(4, 8)[:, :] * m.w).sum(),
        lambda m, x: (F.dropout(x, 0.0) * m.w).sum(),
        lambda m, x: (torch.cat([x, x[:, 8:]], 1) * m.w).sum(),
        lambda m, x: (x.float() * m.w).sum(),
    ],
    ids=["clone", "type_as", "same-shape", "dropout-of-nothing", "cat-with-nothing", "same-dtype"],
)
def test_what_changes_nothing_is_no_operator(function):
    assert targets(capture(Call(function, w=8), (X,)).graph) == ["mul.Tensor", "sum"]


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


def test_numbers_that_only_assertions_read_are_left_out():
    """``transformers``' XLM asserts that lengths fit."""

    def forward(m, ids):
        torch._check(ids.max().item() < 6)
        return F.embedding(ids, m.w).sum()

    graph = capture(Call(forward, w=(6, 8)), (torch.randint(0, 6, (4, 8)),)).graph
    assert targets(graph) == ["embedding", "sum"]


def test_an_index_that_counts_over_whole_dims_is_a_view():
    """How masks are looked up by code written for ``vmap``."""

    def forward(m, x):
        return (x[torch.arange(4)[:, None, None], torch.arange(8)[None, None, :]] * m.w).sum()

    graph = capture(Call(forward, w=8), (X,)).graph
    assert targets(graph) == ["view", "mul.Tensor", "sum"]
    assert graph.operators[0].args[1] == [4, 1, 8]


@pytest.mark.parametrize(
    "index",
    [
        lambda: (torch.arange(8)[:, None], torch.arange(4)[None, :]),
        lambda: (torch.arange(4).flip(0)[:, None], torch.arange(8)[None, :]),
        lambda: (torch.arange(4)[None, :], torch.arange(4)[:, None]),
    ],
    ids=["half-a-dim", "backwards", "transposed"],
)
def test_other_indices_stay_indices(index):
    x = torch.randn(8, 4) if index()[0].numel() == 8 else X
    graph = capture(Call(lambda m, x: (x[index()] * m.w).sum(), w=1), (x,)).graph
    counts = [len(i.flatten()) for i in index()]
    expected = "view" if counts == list(x.shape) and index()[0].flatten()[0] == 0 else "index.Tensor"
    assert targets(graph)[0] == expected


# -- the meta device ------------------------------------------------------------------------------


def test_models_on_the_meta_device_are_captured():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 14, 1 << 16), nn.ReLU(), nn.LayerNorm(1 << 16))
        x = torch.empty(8, 1 << 14)
    graph = capture(model, (x,), loss=torch.sum).graph
    assert sum(t.bytes for t in graph.parameters) > 1 << 32
    assert targets(graph) == ["linear", "relu", "layer_norm", "sum"]


def test_constants_made_in_forward_have_values_on_the_meta_device():
    with torch.device("meta"):
        model = Call(lambda m, x: (x * torch.arange(8, device=x.device) * m.w).sum(), w=8)
        x = torch.empty(4, 8)
    graph = capture(model, (x,)).graph
    (constant,) = graph.constants.values()
    assert not constant.is_meta


# -- where operators come from --------------------------------------------------------------------


def test_operators_know_their_module_and_line():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 4))

        def forward(self, x):
            return self.inner(x)

    graph = capture(Block(), (X,), loss=torch.sum).graph
    (linear,) = [op for op in graph.operators if "linear" in op.target]
    assert linear.module == "inner.0"
    assert linear.source.endswith("(return self.inner(x))")
    assert {t.key for t in graph.parameters} == {"inner.0.weight", "inner.0.bias"}


# -- regions without gradients, inputs changed in place -----------------------------------------------


def test_no_gradient_flows_out_of_a_no_grad_region():
    """Export wraps the region; decomposition alone would let gradients through."""

    def forward(m, x):
        with torch.no_grad():
            y = F.linear(x, m.w)
        return F.linear(x + y, m.w).sum()

    graph = capture(Call(forward, w=(8, 8)), (X,)).graph
    assert targets(graph) == ["linear", "detach", "add.Tensor", "linear", "sum"]
    assert not graph.tensors[graph.operators[1].outputs[0]].requires_grad
    # What needs no gradient anyway is not detached.
    positions = capture(Call(lambda m, x: (x.detach() * m.w).sum(), w=8), (X,)).graph
    assert targets(positions) == ["mul.Tensor", "sum"]


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_an_input_changed_in_place_is_no_output(mode):
    def forward(m, x):
        x.add_(1)
        return (x * m.w).sum()

    graph = capture(Call(forward, w=8), (X.clone(),), mode=mode).graph
    assert [graph.tensors[n].shape for n in graph.outputs] == [()]
    assert "changed in place" in graph.notes[0]


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "pattern"),
    [
        (lambda m, x: x * m.w, r"a tensor of shape \(4, 8\) without a scalar.*pass loss="),
        (lambda m, x: None, "returns nothing without a scalar"),
    ],
)
def test_a_refused_model_is_told_why_and_what_helps(forward, pattern):
    with pytest.raises(CaptureError, match=pattern):
        capture(Call(forward, w=8), (X,))


def test_what_cannot_be_captured_at_all():
    with pytest.raises(CaptureError, match=r"function is not a torch\.nn\.Module"):
        capture(lambda x: x, (X,))
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    with pytest.raises(CaptureError, match=r"0\.weight on cpu and 1\.weight on meta.*on one"):
        capture(mixed, (X,), loss=torch.sum)
    with pytest.raises(CaptureError, match=r"missing 1 required.*args and kwargs"):
        capture(nn.Linear(8, 8), (), loss=torch.sum)
    with pytest.raises(CaptureError, match=r"loss= returns a tensor of shape \(4, 8\).*scalar"):
        capture(nn.Linear(8, 8), (X,), loss=lambda y: y)
    with pytest.raises(CaptureError, match="no trained parameter"):
        capture(nn.Linear(8, 8).requires_grad_(False), (X,), loss=torch.sum)


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

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            place = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            mask = (place[:, :, None] >= place[:, None, :]) & (place[:, None, :] >= 0)
            return (x * self.scale * mask[:, 0, :]).sum()

    with torch.device("meta"):
        found = capture(Masked(), (torch.empty(65536, 4096),))
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
