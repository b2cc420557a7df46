"""The captured graph computes what the model computes: loss, every gradient, buffers after the step.

A model is as it was after its code has run.

A model is captured alike wherever its tensors lie.

The way back: a captured graph rebuilt as a module computes what its model computes.

Python's and numpy's random numbers: the same in every process, and noted.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import WithLoss, capture, rebuild
from tensoropt.capture.fidelity import (
    EagerStep,
    can_compare,
    check_numbers,
    check_structure,
    eager_step,
    shadowed,
)
from tensoropt.capture.steps import DRAWN, unchanged
from tensoropt.errors import CaptureError
from tensoropt.question.model_source import load_model
from tests.models import Call


class Everything(nn.Module):
    """In-place updates, a counted buffer, several outputs, a constant that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.linear(x)
        y[:, 1:] *= 2
        mask = torch.tril(torch.ones(6, 6)) + torch.zeros(4, 6, 6)
        return {"y": y.relu_(), "z": mask @ y.unsqueeze(-1) * self.calls}


def test_inference_with_several_outputs() -> None:
    model, x = Everything().eval(), torch.randn(4, 6)
    captured = capture(model, (x,), mode="inference")
    module = rebuild(captured.graph, model)
    found = module(x)
    model.calls.zero_()
    expected = model(x)
    torch.testing.assert_close(found, tuple(expected.values()))
    assert float(module.calls) == 1.0


def test_a_model_without_data_cannot_be_rebuilt() -> None:
    with torch.device("meta"):
        model = Everything().eval()
        captured = capture(model, (torch.randn(4, 6),), mode="inference")
    captured.graph.constants.clear()  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="meta device"):
        rebuild(captured.graph, model)


X = torch.randn(4, 8)


DROPS = {
    "random": lambda model: random.random() < 0.5,
    "randint": lambda model: random.randint(0, 1) == 0,
    "numpy": lambda model: np.random.rand() < 0.5,
    "own": lambda model: model.generator.random() < 0.5,
}


def drawn(drop):
    """Layers that are dropped by a function."""

    def forward(m, x):
        for layer in m.layers:
            if not drop(m):
                x = x + layer(x)
        return x.mean()

    model = Call(forward, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(12)))
    model.generator = np.random.default_rng(3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", DROPS)
def test_every_capture_draws_the_same_and_says_so(kind):
    model, graphs = drawn(DROPS[kind]), []

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), model.generator.bit_generator.state

    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        before = states()
        graphs.append(capture(model, (X,)).graph)
        assert before == states()
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert DRAWN in graphs[0].notes


def test_no_note_where_nothing_is_drawn():
    assert capture(drawn(lambda model: False), (X,)).graph.notes == ()


def test_a_model_file_is_seeded(tmp_path):
    """Whatever its function draws with, every rank builds the same model."""
    file = tmp_path / "drawn.py"
    file.write_text(
        "import random, numpy, torch\n"
        "def build():\n"
        "    layer = torch.nn.Linear(2, 2)\n"
        "    layer.drawn = random.random(), float(numpy.random.rand())\n"
        "    return layer, (torch.ones(1, 2),)\n"
    )
    state = random.getstate()
    models = [load_model(f"{file}:build", seed=seed).model.drawn for seed in (5, 5, 6)]
    assert models[0] == models[1] != models[2]
    assert random.getstate() == state


class Busy(nn.Module):
    """Counts, remembers and keeps statistics."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.layer(x)
        return self.drop(self.norm(self.last)).square().mean()


def test_attributes_are_the_same_objects_again():
    model, x = Busy(), torch.randn(8, 4)
    seen = model.seen
    with unchanged(model, values=True):
        model(x)
        model.more = torch.ones(1)
        assert model.calls == 1
    assert model.seen is seen
    assert not hasattr(model, "more")
    assert int(model.norm.num_batches_tracked) == 0


def test_a_capture_computes_and_leaves_no_trace():
    """Not even where it counts, remembers and draws the numbers of a dropout, with the same ones for both."""
    model, x = Busy(), torch.randn(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    graph = capture(model, (x,)).graph
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    assert (model.calls, model.seen) == (0, [])
    assert not hasattr(model, "last")

    assert not any("another" in note or "compared" in note for note in graph.notes)


class Keeps(nn.Module):
    """Tied weights, a buffer, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.arange(8.0))
        self.plain = torch.arange(8.0) * 2

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shift = torch.arange(8.0, device=x.device) + self.plain
        return (self.second(self.first(x) * self.scale.exp()) + shift - y).square().mean()


def batch(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)


def with_stored_values() -> Keeps:
    """Parameters on the meta device, and all else with its value."""
    with torch.device("meta"):
        model = Keeps()
    model.scale, model.plain = torch.arange(8.0), torch.arange(8.0) * 2
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_without_values_change_nothing(device: str) -> None:
    """Not even constants that are made from what the model stores; the model stays as it was."""
    wanted = capture(Keeps(), batch()).graph
    model = with_stored_values()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers()), "plain": model.plain}
    found = capture(model, batch(device)).graph
    assert found.fingerprint == wanted.fingerprint
    assert found.aliases == wanted.aliases
    assert [p.requires_grad for p in found.parameters] == [p.requires_grad for p in wanted.parameters]
    assert found.constants.keys() == wanted.constants.keys()
    assert len(found.constants) >= 2
    assert all(torch.equal(value, wanted.constants[name]) for name, value in found.constants.items())
    after = {**dict(model.named_parameters()), **dict(model.named_buffers()), "plain": model.plain}
    assert all(after[name] is value for name, value in before.items())
    assert model.second.weight is model.first.weight


def test_a_shadow_is_taken_away_after_an_error() -> None:
    model = Keeps()
    weight = model.first.weight

    def fail() -> None:
        with shadowed(model) as stored:
            assert model.first.weight.is_meta
            assert model.first.weight is model.second.weight
            assert model.plain.is_meta
            assert stored["first.weight"] is weight
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.first.weight is weight
    assert not model.plain.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_without_data_may_be_given_another_type(dtype):
    """Its buffers are cast in forward: a constant without data has none in another type either."""

    def rotary():
        def forward(m, x):
            angles = m.frequencies.float().expand(1, 8).to(x.device)
            return (m.a(x) * angles.cos().to(x.dtype)).float().sum()

        model = Call(forward, a=nn.Linear(8, 8))
        model.register_buffer("frequencies", torch.arange(8.0), persistent=False)
        return model.to(dtype)

    with torch.device("meta"):
        model = rotary()
    graph = capture(model, (torch.empty(4, 8, dtype=dtype, device="meta"),)).graph
    assert graph.operators == capture(rotary(), (torch.ones(4, 8, dtype=dtype),)).graph.operators


# -- what a capture itself compares -----------------------------------------------------------------


def changed(graph, kind, **changes):
    """The graph with the first operator of a kind changed."""
    (first, *_) = (op for op in graph.operators if op.target == kind)
    operators = tuple(replace(op, **changes) if op is first else op for op in graph.operators)
    return replace(graph, operators=operators)


def two_layers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    return model, x, capture(model, (x,), loss=lambda out: out.square().mean()).graph


def test_another_loss_and_other_gradients_are_refused():
    model, x, graph = two_layers()
    subject = WithLoss(model, lambda out: out.square().mean())
    assert check_numbers(subject, (x,), {}, graph, model) == ()
    lie = changed(graph, "aten.tanh.default", target="aten.sin.default")
    with pytest.raises(CaptureError, match="another loss than the model itself"):
        check_numbers(subject, (x,), {}, lie, model)

    def hooked(m, x):
        loss = subject(x)
        # No tensor's hook, so that nothing but the numbers shows it.
        loss.grad_fn.register_prehook(lambda grads: tuple(g * 3 for g in grads))
        return loss

    with pytest.raises(CaptureError, match=r"another gradient of [02]\.(weight|bias) than .*grad_fn"):
        check_numbers(Call(hooked, model=model), (x,), {}, graph, model)


def test_another_buffer_is_refused_by_name():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    subject = WithLoss(model, lambda out: out.square().mean())
    graph = capture(model, (x,), loss=subject.loss).graph
    assert check_numbers(subject, (x,), {}, graph, model) == ()
    mutations = {name: new for name, new in graph.mutations.items() if "running_var" not in name}
    with pytest.raises(CaptureError, match=r"another value of the buffer 1\.running_var than"):
        check_numbers(subject, (x,), {}, replace(graph, mutations=mutations), model)


def test_a_lost_gradient_is_refused_by_name():
    _, _, graph = two_layers()
    step = EagerStep(frozenset({"0.weight", "0.bias", "2.weight", "2.bias"}))
    assert check_structure(graph, step, "") == ()
    tensors = {
        name: replace(tensor, requires_grad=False) if (tensor.key or "").startswith("0.") else tensor
        for name, tensor in graph.tensors.items()
    }
    with pytest.raises(CaptureError, match=r"loses the gradient of 0\.bias, 0\.weight, which the model"):
        check_structure(replace(graph, tensors=tensors), step, "")
    loss = graph.outputs[0]
    tensors = graph.tensors | {loss: replace(graph.tensors[loss], requires_grad=False)}
    with pytest.raises(CaptureError, match="loss of the captured graph has no gradient"):
        check_structure(replace(graph, tensors=tensors), step, "")
    assert "not compared" in check_structure(graph, EagerStep(problem="no kernel"), "")[0]


def test_what_the_graph_trains_beyond_the_model_is_noted():
    _, _, graph = two_layers()
    (note,) = check_structure(graph, EagerStep(frozenset({"2.weight", "2.bias"})), "")
    assert note.startswith("the graph trains 0.bias, 0.weight, which")


def test_rounding_that_a_model_amplifies_is_not_refused():
    """A product of large terms that cancel: rounding of a weight changes gradients by much."""

    def steep(m, x):
        h = m.layer(x)
        return ((h * 3e6 + 1.0) - h * 3e6).square().mean() + torch.sin(h * 1e6).mean()

    graph = capture(Call(steep, layer=nn.Linear(8, 8)), (X,)).graph
    assert not any("another" in note for note in graph.notes)


def test_big_models_and_those_without_values_are_not_computed():
    model, _, graph = two_layers()
    assert can_compare(graph, model)
    assert not can_compare(graph, model.to("meta"))
    assert not can_compare(graph, torch.nn.Linear(1 << 11, (1 << 11) + 1))


def test_a_step_without_values_tells_what_is_trained():
    model, x, _ = two_layers()
    model[0].bias.requires_grad_(False)
    step = eager_step(WithLoss(model, torch.sum), (x,), {})
    assert step == EagerStep(frozenset({"model.0.weight", "model.2.weight", "model.2.bias"}))
    assert all(p.device.type == "cpu" and type(p) is torch.nn.Parameter for p in model.parameters())
