"""Of equal blocks two are traced, the graph is the one of a trace of each, and what differs is found."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from tensoropt import zoo
from tensoropt.capture import capture, exporting
from tensoropt.capture.blocks import TracedBlocks, tracing

X = torch.randn(4, 8)


class Gate(nn.Module):
    """A block around a layer; ``function(block, x, ...)`` is what it computes."""

    def __init__(self, index: int, function, **held):
        super().__init__()
        self.index, self.function, self.layer = index, function, nn.Linear(8, 8)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def plain(block, x):
    return x + torch.relu(block.layer(x))


class Stack(nn.Module):
    """``around(stack, x)`` calls the blocks."""

    def __init__(self, blocks, around=None):
        super().__init__()
        self.blocks, self.around = nn.ModuleList(blocks), around
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.scale  # so that what goes into every block needs a gradient
        if self.around is not None:
            return self.around(self, x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def stack(function=plain, around=None, count=6, **held) -> Stack:
    return Stack([Gate(i, function, **held) for i in range(count)], around)


def described(graph):
    constants = [(n, tuple(c.shape), c.dtype) for n, c in graph.constants.items()]
    # Objects of a model's own stay as the last run of its code left them: only the first run changes them.
    notes = [note for note in graph.notes if not note.startswith("forward changes ")]
    return (
        graph.fingerprint,
        [repr(op) for op in graph.operators],
        [(name, repr(tensor)) for name, tensor in graph.tensors.items()],
        (graph.inputs, graph.outputs, notes, graph.aliases, graph.mutations),
        constants,
    )


@pytest.fixture
def traced(monkeypatch):
    """Capture a model and say (how many calls of blocks were traced, how many there were).

    The graph is compared with the one of every call traced.
    """

    def of(model, args=(X,), **options) -> tuple[int, int]:
        tries: list[TracedBlocks] = []

        class Watched(TracedBlocks):
            def __init__(self, *given):
                super().__init__(*given)
                tries.append(self)

        with monkeypatch.context() as patch:
            patch.setattr(exporting, "TracedBlocks", Watched)
            graph = capture(model, args, **options).graph
        with monkeypatch.context() as patch:
            patch.setattr(tracing, "repeated_blocks", lambda *_: [])
            one_by_one = capture(model, args, **options).graph
        assert described(graph) == described(one_by_one)
        return len(tries[-1].traced), len(tries[-1].called)

    return of


# -- alike --------------------------------------------------------------------------------------


def test_blocks_with_tied_and_shared_parameters(traced):
    """Each layer has a parameter of its own and one that all share; two layers are tied."""
    shared = nn.Parameter(torch.randn(8))
    model = stack(lambda b, x: b.layer(x) * b.scale, scale=shared)
    assert traced(model) == (2, 6)
    model.blocks[4].layer.weight = model.blocks[1].layer.weight
    assert traced(model) == (2, 6)


@pytest.mark.slow
def test_a_tensor_that_one_block_has_under_two_names_is_no_two_tensors(traced):
    model = stack(lambda b, x: b.layer(x) + b.other(x), count=4)
    for block in model.blocks:
        block.other = nn.Linear(8, 8)
    model.blocks[3].other.weight = model.blocks[3].layer.weight
    assert traced(model) == (2, 3)


def gate(block, x, flag):
    return torch.tanh(block.layer(x)) if flag else block.layer(x)


def shapes(stack, x):
    for i, block in enumerate(stack.blocks):
        x = block(x if i < 3 else x[:2])
    return x.sum()


def one_tensor_twice(stack, x):
    y = x * 2
    return sum(b(x, y if i % 2 else x) for i, b in enumerate(stack.blocks)).sum()


def dictionaries(stack, x):
    for block in stack.blocks:
        out = block(x)
        assert out["attention"] is None
        assert out["mask"] is x
        x = out["x"]
    return x.sum()


def first_result(stack, x):
    for block in stack.blocks:
        x, _ = block(x)
    return x.sum()


def skipping(block, x, skips):
    skips.append(x * 2)
    return block.layer(x)


def skips(stack, x):
    given = []
    for block in stack.blocks:
        x = block(x, given)
    assert len(given) == len(stack.blocks)
    return (x + sum(given)).sum()


OUTER = []
"""What blocks read, or write, past their arguments."""


def handing_out(block, x):
    OUTER.append(block.layer(x).relu())
    return block.layer(x)


def counting(block, x):
    OUTER.append(1)
    return block.layer(x) * len(OUTER)


def from_outside(given, result=lambda x: x.sum()):
    def around(stack, x):
        OUTER[:] = given(x)
        for block in stack.blocks:
            x = block(x)
        return result(x)

    return around


CALLS = {
    "alike": (plain, None, (2, 6)),
    "flags": (gate, lambda s, x: sum(b(x, flag=i % 2 == 0) for i, b in enumerate(s.blocks)).sum(), (4, 6)),
    "none": (gate, lambda s, x: sum(b(x, flag=None) for b in s.blocks).sum(), (2, 6)),
    "other shapes": (plain, shapes, (4, 6)),
    "one tensor twice": (lambda b, x, y: b.layer(x) * y, one_tensor_twice, (4, 6)),
    "dictionaries": (lambda b, x: {"x": plain(b, x), "attention": None, "mask": x}, dictionaries, (2, 6)),
    "unread result": (lambda b, x: (plain(b, x), b.layer(x).exp()), first_result, (2, 6)),
    "random": (lambda b, x: torch.dropout(b.layer(x), 0.1, b.training), None, (2, 6)),
    # An index may differ where no code reads it: ``stack`` gives each one its own.
    "index": (lambda b, x: b.layer(x) / (b.index + 1), None, (6, 6)),
    "index in a branch": (lambda b, x: b.layer(x) if b.index % 2 else b.layer(x).tanh(), None, (6, 6)),
    "index by vars": (lambda b, x: b.layer(x) * (vars(b)["index"] + 1), None, (6, 6)),
    "index by __dict__": (lambda b, x: b.layer(x) * (b.__dict__["index"] + 1), None, (6, 6)),
    "appended": (skipping, skips, (0, 0)),
    "handed out": (handing_out, from_outside(lambda x: [], lambda x: x.sum() + sum(OUTER).sum()), (0, 0)),
    "read outside": (lambda b, x: b.layer(x) + OUTER[0], from_outside(lambda x: [x * 3]), (0, 0)),
    # Which shows in the second block.
    "counted outside": (counting, from_outside(lambda x: []), (0, 0)),
}
"""Of six blocks what each computes, how they are called, (how many are traced, of how many calls)."""
SLOW = {"other shapes", "unread result", "appended", "index by vars", "index by __dict__"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CALLS])
def test_calls_that_are_alike_are_traced_twice(traced, name):
    function, around, found = CALLS[name]
    assert traced(stack(function, around)) == found


def test_blocks_of_an_inference(traced):
    assert traced(stack(), mode="inference") == (2, 6)


def test_paths_of_modules_are_those_of_the_module_that_was_called():
    graph = capture(stack(), (X,)).graph
    linears = [op for op in graph.operators if op.target.startswith("aten.linear")]
    assert [op.module for op in linears] == [f"blocks.{i}.layer" for i in range(6)]
    read = [graph.tensors[p].key for op in linears for p in op.inputs() if graph.tensors[p].key]
    assert read == [f"blocks.{i}.layer.{what}" for i in range(6) for what in ("weight", "bias")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers", "found"), [("gpt2-tiny", 4, (2, 4)), ("moe-mini", 2, (2, 2))])
def test_gpt2_and_a_mixture_of_experts(traced, name, layers, found):
    """As ``transformers`` writes them, and with routers, sparse layers and their counts."""
    bundle = zoo.build(name, device="meta", layers=layers)
    assert traced(bundle.model, bundle.args, kwargs=dict(bundle.kwargs)) == found


# -- not alike ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_dropout_that_differs(traced):
    model = stack(lambda b, x: b.drop(b.layer(x)))
    for i, block in enumerate(model.blocks):
        block.drop = nn.Dropout(0.1 if i < 4 else 0.5)
    assert traced(model) == (4, 6)


def test_layers_of_other_shapes_or_with_hooks(traced):
    model = stack(lambda b, x: b.layer(x).relu() if b.hooked is None else b.layer(x), hooked=None)
    model.blocks[2].layer = nn.Linear(8, 8, bias=False)
    model.blocks[3].layer.register_forward_hook(lambda module, args, out: out * 2)
    assert traced(model) == (2, 4)


@pytest.mark.slow
def test_norms_that_count_what_they_see_are_no_blocks(traced):
    model = stack(lambda b, x: b.norm(b.layer(x)))
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(8)
    assert traced(model) == (0, 0)
    assert traced(model.eval(), mode="inference") == (2, 6)


def setting(block, x):
    block.last = 3
    return block.layer(x)


def changing(block, x):
    x.add_(1)
    return block.layer(x)


def sharing(block, x):
    block.shared.calls += 1
    return block.layer(x) * block.shared.calls


def appending(block, x):
    block.history.append(1)
    return block.layer(x) * len(block.history)


def buffered(block, x):
    block.seen.add_(1)
    return block.layer(x) + block.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        setting, changing, sharing, appending, buffered,
        lambda b, x: x[:, :4].repeat(1, 2) + b.layer(x).add_(1), lambda b, x: x.view(4, 8),
    ],
)  # fmt: skip
def test_blocks_whose_trace_stands_for_no_other_one(traced, function):
    """Each is traced by itself wherever that matters; the fixture compares the graphs."""

    def around(s, x):
        shared.calls = 0
        for block in s.blocks:
            block.history.clear()
            x = block(x.clone())
        return x.sum()

    shared = types.SimpleNamespace(calls=0)
    model = stack(function, around, shared=shared)
    for block in model.blocks:
        block.history = []
        block.register_buffer("seen", torch.zeros(8))
    traced(model)


@pytest.mark.slow
def test_inside_blocks_that_are_traced_one_by_one_smaller_ones_are_found(traced):
    """The outer blocks change what they are given; the inner ones do not."""

    def outer(b, x):
        x.add_(1)
        for part in b.parts:
            x = part(x)
        return x

    model = stack(outer, lambda s, x: sum(b(x.clone()) for b in s.blocks).sum(), count=3)
    for block in model.blocks:
        block.parts = nn.ModuleList([Gate(0, plain), Gate(1, plain)])
    assert traced(model) == (2, 6)


def test_a_block_that_refuses_gives_the_models_own_reason():
    def gate(b, x):
        return b.layer(x) if x.sum() > 0 else x

    with pytest.raises(exporting.CaptureError, match=r"test_blocks\.py:\d+ .*value of a tensor"):
        capture(stack(gate), (X,))


def test_classes_are_as_before_afterwards():
    before = dict(vars(Gate))
    capture(stack(lambda b, x: b.layer(x) * b.index), (X,))
    assert dict(vars(Gate)) == before
