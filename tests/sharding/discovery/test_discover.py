"""Operators nobody wrote a rule for: what running them in pieces finds, and what it must refuse."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import warnings

import pytest
import torch
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.errors import MeasurementError
from tensoropt.ops import registry
from tensoropt.ops.layouts import PARTIAL
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.discovery import discover as discovery
from tensoropt.sharding.discovery.discover import Discovery, Split, discover, signature
from tests.models import Call
from tests.sharding.calls import graph_of_call
from tests.sharding.graph_check import check_graph, missing_splits
from tests.sharding.rule_check import _distribute, difference

LIBRARY = "tensoropt_discovery_tests"
_counter = itertools.count()


def operator(fake=lambda x, *_: torch.empty_like(x)):
    """A decorator that registers an operator of PyTorch's, with what it gives for tensors without values."""

    def registered(function):
        made = torch.library.custom_op(f"{LIBRARY}::{function.__name__}", mutates_args=())(function)
        made.register_fake(fake)
        return made

    return registered


@operator()
def row_softplus(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Every row against its own largest value: rows split, columns do not."""
    return torch.nn.functional.softplus(x - x.amax(-1, keepdim=True)) * w


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _row_backward(ctx, grad):
    with torch.enable_grad():
        x, w = (v.detach().requires_grad_() for v in ctx.saved_tensors)
        y = torch.nn.functional.softplus(x - x.amax(-1, keepdim=True)) * w
    return torch.autograd.grad(y, (x, w), grad)


row_softplus.register_autograd(_row_backward, setup_context=_keep)


@operator(lambda x: (x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])))
def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and mean over the rows of a matrix."""
    return x.sum(0), x.mean(0)


def _rows(ctx, inputs, output):
    ctx.rows = inputs[0].shape[0]


moments.register_autograd(
    lambda ctx, a, b: (a + b / ctx.rows).expand(ctx.rows, *a.shape), setup_context=_rows
)


@operator()
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@operator()
def counting(x: torch.Tensor) -> torch.Tensor:
    """Depends on how often it was called."""
    return x + next(_counter)


@operator()
def bad_gradient(x: torch.Tensor) -> torch.Tensor:
    """Element-wise forward, but its gradient mixes the rows."""
    return x * 2


bad_gradient.register_autograd(
    lambda ctx, grad: grad + grad.sum(0, keepdim=True), setup_context=lambda ctx, inputs, output: None
)


@operator()
def pairs(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring rows change places: halves recombine, single rows do not."""
    return x.view(-1, 2, x.shape[1]).flip(1).reshape(x.shape)


@operator(lambda x, rows: x.new_empty((2 * x.shape[0], x.shape[1]) if rows else 2 * x.numel()))
def doubled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Every row twice, or every element of all rows: pieces lie one behind the other in a longer dim."""
    return x.repeat_interleave(2, 0) if rows else x.flatten().repeat_interleave(2)


@operator(lambda x, w: torch.empty_like(x, dtype=torch.complex64))
def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A discrete Fourier transform of every row: sums of another order in every run of pieces."""
    return torch.fft.fft(x.double()).to(torch.complex64) * torch.exp(1j * w)


_ENDINGS = {"hangs": lambda: time.sleep(3600), "crashes": os.abort}


@operator()
def fatal(x: torch.Tensor, ending: str) -> torch.Tensor:
    """Never returns where it computes."""
    _ENDINGS[ending]()
    return x.clone()


@operator()
def undefined(x: torch.Tensor) -> torch.Tensor:
    """Depends on all of its operand, and is NaN for any."""
    return torch.sqrt(-1.0 - x.square()) * x.sum()


@operator(lambda x: x.new_empty(4, 8))
def whole_sized(x: torch.Tensor) -> torch.Tensor:
    """Every element by itself, with a fake kernel that knows the whole model's sizes."""
    return x.relu().clone()


@whole_sized.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(4, 8)


whole_sized.register_autograd(lambda ctx, grad: grad.clone())


def graph_of(function, x: torch.Tensor | None = None, mode: str = "train"):
    model = Call(lambda m, x: function(x * m.scale, m.weight), scale=8, weight=8)
    x = torch.randn(4, 8) if x is None else x
    return capture(model, (x,), loss=lambda y: y.square().sum(), mode=mode).graph


def found(graph, name: str) -> Discovery:
    (op,) = [op for op in graph.operators if name in op.target]
    return discover(op, graph)


def found_in(name: str, function, *operands: torch.Tensor, **parameters) -> Discovery:
    """What is found of the one operator of this name in a function's graph."""
    return found(capture(Call(function, **parameters), operands, loss=torch.sum).graph, name)


BY_ROWS, BY_COLUMNS = Split((0, None), (0,)), Split((1,), (1,))
FOUND = {
    "row_softplus": (row_softplus, "train", (BY_ROWS,)),
    # Gradients decide, too.
    "bad_gradient": (lambda x, w: bad_gradient(x) * w, "train", (BY_COLUMNS,)),
    # Views elsewhere could cut any atom of a loop, so that halves alone are not enough.
    "pairs": (lambda x, w: pairs(x) * w, "inference", (BY_COLUMNS,)),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_splits_a_custom_operator(name):
    function, mode, splits = FOUND[name]
    assert found(graph_of(function, mode=mode), name).splits == splits


def test_sums_and_means():
    graph = graph_of(lambda x, w: moments(x)[0] * w + moments(x)[1])
    splits = {discover(op, graph).splits for op in graph.operators if "moments" in op.target}
    assert splits == {(Split((0,), (-1, -3)), Split((1,), (0, 0)))}


def test_what_is_found_is_used_and_right():
    for function in (row_softplus, lambda x, w: moments(x)[0] * w + moments(x)[1]):
        atoms = refine_graph(graph_of(function))
        assert atoms.discovered
        report = check_graph(atoms, thorough=True)
        assert not report.mismatches, str(report)
        assert not report.unknown
        assert report.discovered


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: noisy(x) * w, "different results"),
        (lambda x, w: counting(x) * w, "different results"),
        (lambda x, w: undefined(x) * w, "nothing but NaN"),
    ],
    ids=["random", "stateful", "undefined"],
)
def test_what_cannot_be_relied_on_is_refused(function, reason):
    graph = graph_of(function, mode="inference")
    discovery = found(graph, LIBRARY)
    assert reason in discovery.refused
    assert not discovery.splits


def test_a_fake_kernel_with_sizes_of_its_own_is_named():
    """Costs of a part would rest on it."""
    graph = graph_of(lambda x, w: whole_sized(x) * w)
    memory = Memory()
    atoms = refine_graph(graph, memory)
    assert not memory  # it is tried again, perhaps after it was mended
    (op,) = [op for op in graph.operators if "whole_sized" in op.target]
    assert not any(dim.splittable for dim in atoms.spaces[op.name].dims)
    assert atoms.lost()[op.target] == (
        "for operands of 2x8 its fake kernel gives 4x8, where the operator itself gives 2x8; take the sizes "
        "from the operands in register_fake"
    )


def test_factors_split_by_the_matrices_of_a_batch():
    """Pivots are rows of a matrix, from 1; a kernel that is given others writes out of bounds."""

    def solved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        matrices = x.view(6, 4, 4) + 4 * torch.eye(4)
        factors, pivots = torch.linalg.lu_factor(matrices)
        lower = torch.lu_unpack(factors, pivots)[1] + torch.linalg.cholesky(matrices @ matrices.mT)
        return torch.linalg.lu_solve(factors, pivots, matrices) + lower * w.sum()

    atoms = refine_graph(graph_of(solved, torch.randn(12, 8)))
    assert not atoms.lost()
    report = check_graph(atoms, thorough=True)
    assert not report.mismatches, str(report)
    assert not report.unknown
    assert {target.split(".")[1] for target in report.discovered} == {
        "linalg_lu_factor", "linalg_lu_solve", "linalg_cholesky",
    }  # fmt: skip


def test_what_reads_integers_is_tried_apart(monkeypatch):
    """PyTorch's own operators use them as addresses, not always with a check."""

    def died(*_: object) -> None:
        raise MeasurementError("the process that tried it died")

    monkeypatch.setattr(discovery, "call_in_fork", died)
    assert found(graph_of_call("embedding-bag-max"), "embedding_bag").refused == (
        "tried on small tensors, the process that tried it died"
    )
    assert not found(graph_of_call("softmax"), "softmax").refused


@pytest.mark.parametrize("rows", [0, 1])
def test_a_dim_that_grows_is_not_the_loop_that_was_cut(rows):
    """Pieces of 24 rows that give 48 recombine, but no loop has both sizes."""
    graph = graph_of(lambda x, w: doubled(x, rows) * (w if rows else w.sum()), mode="inference")
    splits = found(graph, "doubled").splits
    assert splits == ((Split((1,), (1,)),) if rows else ())
    atoms = refine_graph(graph)
    assert not check_graph(atoms, thorough=True).mismatches


def test_complex_results_are_compared_with_their_rounding():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = graph_of(lambda x, w: turned(x, w).abs(), mode="inference")
        assert found(graph, "turned").splits == (Split((0, None), (0,)),)
        report = check_graph(refine_graph(graph), thorough=True)
    assert not report.mismatches, str(report)


def test_complex_pieces_that_differ_are_told_apart():
    atoms, whole = ((4,), (8,)), torch.randn(4, 8, dtype=torch.complex64)
    generator = torch.Generator().manual_seed(0)
    for layout in ((0,), (PARTIAL,)):
        pieces = _distribute(whole, atoms, layout, (2,), generator)
        assert difference(whole, pieces, atoms, layout, (2,), 1e-4) is None
        wrong = {at: piece + 1e-2j for at, piece in pieces.items()}
        assert difference(whole, wrong, atoms, layout, (2,), 1e-4)[0] == "value"
        real = {at: piece.real for at, piece in pieces.items()}
        assert difference(whole, real, atoms, layout, (2,), 1e-4)[0] == "value"


class Memory(dict):
    def get(self, key, kind):
        return super().get((kind, key))

    def put(self, key, record, kind):
        self[kind, key] = record


def test_findings_are_kept_and_checked_again():
    graph = graph_of(row_softplus)
    (op,) = [op for op in graph.operators if "row_softplus" in op.target]
    memory = Memory()
    assert discover(op, graph, memory) == discover(op, graph)
    ((key, record),) = memory.items()
    assert key == ("discovery", signature(op, graph))
    assert Discovery.from_record(record) == discover(op, graph)
    memory[key] = {"splits": [[[1, 0], [1]]], "linear": True}  # as after the operator's code has changed
    assert discover(op, graph, memory) == discover(op, graph)
    assert memory[key] == record


@pytest.mark.parametrize(("ending", "reason"), [("hangs", "did not end within 1 s"), ("crashes", "died")])
def test_an_operator_that_never_returns_is_kept_whole_and_named(ending, reason, monkeypatch):
    monkeypatch.setattr(discovery, "_TRIAL_S", 1.0)
    graph = graph_of(lambda x, w: fatal(x, ending) * w, mode="inference")
    memory = Memory()
    atoms = refine_graph(graph, memory)
    (op,) = [op for op in graph.operators if "fatal" in op.target]
    assert reason in atoms.lost()[op.target]
    assert not any(dim.splittable for dim in atoms.spaces[op.name].dims)
    monkeypatch.setattr(discovery, "call_in_fork", None)  # what is kept is not tried again
    assert discover(op, graph, memory) == atoms.discovered[op.name]


def test_what_reads_beyond_a_piece_is_not_split():
    """By strides: a piece that is a view of the whole would let it read the whole."""

    def strided(m, x):
        return torch.as_strided(x * m.w, (2, 1, 1, 2), (1, 7, 7, 1), 0)

    assert found_in("as_strided", strided, torch.randn(16), w=(16,)).splits == ()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_random_operands_do_not_show_is_not_split(reduction):
    """A loss of targets that are 1 or -1 is 0 for all others, on a part as on the whole."""

    def call(m, x, y, target):
        return F.cosine_embedding_loss(x * m.w, y, target, reduction=reduction)

    operands = torch.randn(4, 6), torch.randn(4, 6), torch.ones(4)
    discovery = found_in("cosine_embedding_loss", call, *operands, w=(6,))
    assert not discovery.linear
    assert all(split.writes == (0,) for split in discovery.splits)
    assert bool(discovery.splits) == (reduction == "none")


@pytest.mark.parametrize(("function", "dim"), [(torch.nansum, 1), (torch.nanmean, 1), (torch.nanmean, 0)])
def test_what_leaves_out_nan_passes_no_partial_sums(function, dim):
    found = found_in("aten.nan", lambda m, x: function(x * m.w, dim), torch.randn(4, 6), w=(6,))
    # Parts of a row with unequal numbers of NaN have means of unequal weights.
    assert len(found.splits) == (2 if function is torch.nansum else 1)
    assert not found.linear


def test_a_loop_of_thousands_is_not_tried_in_single_elements():
    begin = time.perf_counter()
    found = found_in("special_i0e", lambda m, x: torch.special.i0e(x * m.w), torch.randn(2, 5000), w=(5000,))
    assert len(found.splits) == 2
    assert time.perf_counter() - begin < 10.0


# -- rules beside discovery -----------------------------------------------------------------------

QUICK = ("softmax", "layer-norm", "sum", "permute", "split", "cat", "gated")


def missing_splits_of(name: str) -> list[str]:
    graph = graph_of_call(name)
    return [line for op in graph.operators for line in missing_splits(op, graph)]


@pytest.mark.parametrize("name", QUICK)
def test_rules_split_what_discovery_can_split(name):
    assert not missing_splits_of(name)


def test_a_rule_that_leaves_out_a_split_is_found(monkeypatch):
    def lazy(b):
        rows = b.loops(b.output().shape[:1])
        b.read(b.arg(0), [*rows, None, None])
        b.write([*rows, None, None])

    changed = dataclasses.replace(registry._BY_TARGET["aten.softmax.int"], rule=lazy)
    monkeypatch.setitem(registry._BY_TARGET, "aten.softmax.int", changed)
    assert any("aten.softmax.int" in line for line in missing_splits_of("softmax"))
