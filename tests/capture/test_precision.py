"""Mixed precision: which operators compute in bfloat16, what stays float32, what is cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.errors import CaptureError
from tensoropt.graph import Operator, OperatorGraph
from tests.models import Call


class Block(nn.Module):
    """A pre-norm residual block with a hand-written norm, a mask and a loss."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        scores = rms @ rms.transpose(-1, -2)
        mask = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril() == 0
        scores = scores.masked_fill(mask, torch.finfo(torch.float32).min)
        x = x + F.gelu(self.up(torch.softmax(scores, -1) @ rms))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


IDS = torch.arange(12).view(3, 4) % 11


def graph_of(model: nn.Module, *args: torch.Tensor, **more) -> OperatorGraph:
    torch.manual_seed(0)
    return capture(model, args, dtype="bfloat16", **more).graph


def one(graph: OperatorGraph, short: str) -> Operator:
    (op,) = [op for op in graph.operators if op.target.split(".")[1] == short]
    return op


def dtypes(graph: OperatorGraph, short: str) -> set[str]:
    """What the operators of this kind read (floating tensors) and write."""
    found = [op for op in graph.operators if op.target.split(".")[1] == short]
    assert found, short
    names = [n for op in found for n in (*op.inputs(), *op.outputs)]
    return {graph.tensors[n].dtype for n in names} - {"int64", "bool"}


NARROW, WIDE = ("linear", "embedding", "layer_norm", "gelu"), ("rsqrt", "softmax", "cross_entropy_loss")


def test_classes_of_operators():
    graph = graph_of(Block(), IDS)
    assert [dtypes(graph, short) for short in NARROW] == [{"bfloat16"}] * len(NARROW)
    assert [dtypes(graph, short) for short in WIDE] == [{"float32"}] * len(WIDE)
    # The residual stream is narrow.
    read = graph.tensors[one(graph, "layer_norm").inputs()[0]]
    assert (graph.producer[read.name].target, read.dtype) == ("aten.add.Tensor", "bfloat16")


def test_the_kernel_below_softmax_follows_its_operand():
    """As under autocast, which knows ``softmax`` and not the kernel that it calls."""
    model = Call(lambda m, x: torch._softmax(m.up(x), -1, False).square().mean(), up=nn.Linear(8, 8))
    assert dtypes(graph_of(model, torch.randn(4, 8)), "_softmax") == {"bfloat16"}


def test_parameters_are_stored_wide_and_read_narrow():
    tensors = {t.key: t for t in graph_of(Block(), IDS).parameters}
    weight = tensors["up.weight"]
    assert (weight.dtype, weight.stored_dtype, weight.element_bytes, weight.stored_element_bytes) == (
        "bfloat16", "float32", 2, 4,
    )  # fmt: skip
    # The norm's scale meets float32 statistics, so nothing reads it narrow.
    assert (tensors["scale"].dtype, tensors["scale"].master_dtype) == ("float32", None)


def test_inference_needs_no_master():
    graph = capture(nn.Linear(4, 3), (torch.ones(2, 4),), mode="inference", dtype="bfloat16").graph
    assert {t.stored_dtype for t in graph.parameters} == {"bfloat16"}


def test_a_parameter_with_readers_of_both_kinds_is_cast_by_an_operator():
    model = Call(lambda m, x: (x @ m.weight).pow(2).mean() + m.weight.pow(2).sum(), weight=(4, 4))
    graph = graph_of(model, torch.randn(2, 4))
    assert [(t.dtype, t.master_dtype) for t in graph.parameters] == [("float32", None)]
    casts = [op for op in graph.operators if op.target == "aten._to_copy.default"]
    assert graph.parameters[0].name in {op.inputs()[0] for op in casts}


def test_one_cast_serves_all_readers():
    parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    model = Call(lambda m, x: sum(part(x) for part in m.parts).pow(2).mean(), parts=parts)
    graph = graph_of(model, torch.randn(4, 8))
    assert len([op for op in graph.operators if graph.inputs[0] in op.inputs()]) == 1


def test_batch_norm_keeps_its_statistics_wide():
    model = Call(
        lambda m, x: m.norm(m.conv(x)).pow(2).mean(), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)
    )
    graph = graph_of(model, torch.randn(2, 3, 8, 8))
    op = one(graph, "_native_batch_norm_legit_functional")
    read = [graph.tensors[n].dtype for n in op.inputs()]
    assert read == ["bfloat16", "float32", "float32", "float32", "float32"]
    assert graph.tensors[op.outputs[0]].dtype == "bfloat16"
    assert {graph.tensors[v].dtype for b, v in graph.mutations.items() if "running" in b} == {"float32"}


class Masked(nn.Module):
    """Scores and an additive mask: a buffer of the model, or made anew in every call."""

    def __init__(self, kept: bool):
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.kept = kept
        self.register_buffer("mask", self.make())

    @staticmethod
    def make() -> torch.Tensor:
        return torch.full((3, 3), torch.finfo(torch.float32).min).triu(1)

    def forward(self, x):
        y = self.q(x)
        return torch.relu(y @ y.transpose(-1, -2) + (self.mask if self.kept else self.make())).sum()


def test_masks_stay_finite():
    """float32's least number is -inf in bfloat16, and a row of it would be NaN after a softmax."""
    limit = torch.finfo(torch.bfloat16).max
    x = torch.randn(2, 3, 4)
    made = graph_of(Masked(False), x)
    (narrow,) = [v for n, v in made.constants.items() if made.tensors[n].dtype == "bfloat16"]
    assert float(narrow.abs().max()) == limit
    assert one(graph_of(Masked(True), x), "clamp").args[1:] == (-limit, limit)
    assert abs(one(graph_of(Block(), IDS), "masked_fill").args[2]) <= limit


def test_float32_changes_nothing_and_other_types_are_refused():
    model = Block()
    plain = capture(model, (IDS,)).graph
    assert plain.fingerprint == capture(model, (IDS,), dtype="float32").graph.fingerprint
    assert plain.compute_dtype == "float32"
    with pytest.raises(CaptureError, match=r"float16.*float32 or bfloat16"):
        capture(model, (IDS,), dtype="float16")
