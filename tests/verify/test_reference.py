"""The module beside its graph: modes as its user set them, rounding told from a fault.

The one comparison of results says what numbers do not.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.capture.steps import difference, largest, largest_of, worst
from tensoropt.engine import models
from tensoropt.engine.models import ModelSpec
from tensoropt.verify.reference import module_difference, named_difference, not_finite, outputs_difference
from tests import naive

NAN, INF = math.nan, math.inf
VALUES = st.lists(st.sampled_from([0.0, 1.0, -2.0, 0.5, NAN, INF, -INF]), min_size=1, max_size=5)


@pytest.mark.parametrize(("got", "want", "apart"), [
    ([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, 3.0], [1.0, 4.0], 0.25), ([-1.0, 4.0], [1.0, 4.0], 0.5),
    ([NAN, NAN], [1.0, 2.0], INF), ([1.0, 2.0], [NAN, 2.0], INF), ([NAN, 2.0], [2.0, NAN], INF),
    ([NAN, 3.0], [NAN, 4.0], 0.25), ([INF, 3.0], [INF, 4.0], 0.25), ([INF, 3.0], [-INF, 4.0], INF),
    ([INF, 3.0], [NAN, 4.0], INF), ([INF, 4.0], [1.0, 4.0], INF), ([NAN], [NAN], 0.0), ([], [], 0.0),
    ([0.0], [0.0], 0.0), ([1.0], [1.0, 1.0], INF),
])  # fmt: skip
def test_a_difference_is_relative_and_strict(got, want, apart):
    assert difference(torch.tensor(got), torch.tensor(want)) == apart
    assert outputs_difference([torch.tensor(got)], [torch.tensor(want)]) == apart
    assert named_difference({"a": torch.tensor(got)}, {"a": torch.tensor(want)}) == apart


@given(VALUES, VALUES)
def test_it_equals_its_twin(got, want):
    want = (want * len(got))[: len(got)]
    assert difference(torch.tensor(got), torch.tensor(want)) == naive.difference(got, want)


def test_the_scale_is_the_whole_tensors_or_the_floor():
    got, want = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    assert difference(got, want, torch.tensor([1.0, -8.0, NAN, INF])) == 1 / 8
    assert difference(got, want, floor=4.0) == 1 / 4
    assert difference(got, want, torch.tensor([8.0]), floor=4.0) == 1 / 8
    assert difference(torch.tensor([1e-40]), torch.tensor([0.0])) == pytest.approx(1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_every_type_is_compared(dtype):
    one, other = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert difference(one, one) == 0.0
    assert difference(one, other) == 1.0


def test_the_imaginary_part_counts():
    assert difference(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])) == 0.5
    assert difference(torch.tensor([1 + 1j]), torch.tensor([complex(1, NAN)])) == INF


def test_one_of_many_is_enough():
    right, wrong = torch.ones(3), torch.tensor([1.0, NAN, 1.0])
    for outputs in ([right, wrong, right], [wrong, right, right], [right, right, wrong]):
        assert outputs_difference(outputs, [right] * 3) == INF
        named = {str(i): value for i, value in enumerate(outputs)}
        assert named_difference(named, dict.fromkeys(named, right)) == INF
    assert worst({"a": 0.5, "b": INF, "c": 2.0}) == (INF, "b")
    assert worst({}) == (0.0, "")
    with pytest.raises(AssertionError):
        outputs_difference([right], [])


def test_sizes_are_of_what_is_finite():
    assert largest(torch.tensor([NAN, -3.0, INF])) == 3.0
    assert largest(torch.tensor([])) == largest(torch.tensor([NAN])) == largest_of([]) == 0.0
    assert largest_of([torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([NAN])]) == 2.0
    named = {"a": torch.tensor([NAN, 1.0, -INF]), "b": torch.ones(2), "c": torch.tensor([1, 2])}
    assert not_finite(named) == {"a": 2}


SITUATIONS = "tests/situations/gradients.py"
AUTOCAST = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(torch.softmax(self.a(self.b(torch.relu(self.a(x)))), -1)).float().square().mean()

def build():
    return Net(), (torch.randn(8, 6, 16),)
"""


def found(source):
    models._forget_models()
    return module_difference(0, 1, ModelSpec(source), 0)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.85), ("bfloat16", 0.0)])
def test_a_wrong_gradient_is_found_in_any_precision(monkeypatch, dtype, share):
    """What rounding of a whole narrow model may change is more than one gradient that is missing."""
    build, spec = ModelSpec.build_to_run, ModelSpec("zoo:bert-tiny", compute_dtype=dtype)

    def wrong(self):
        model, args, kwargs = build(self)
        own = dict(model.named_parameters())
        (name,) = (n for n in own if n.endswith("layer.0.intermediate.dense.weight"))
        own[name].register_hook(lambda gradient: gradient * share)
        return model, args, kwargs

    models._forget_models()
    assert module_difference(0, 1, spec, 0).ok
    monkeypatch.setattr(ModelSpec, "build_to_run", wrong)
    assert not module_difference(0, 1, spec, 0).ok


@pytest.mark.parametrize(
    "name", ["build_straight_through", "build_codebook", "build_held_norm", "build_summed_losses",
             "build_python_random", "build_reentrant"],
)  # fmt: skip
def test_a_graph_is_its_module(name):
    module = found(f"{SITUATIONS}:{name}")
    assert module.ok
    assert module.differences.gradient < 1e-5


def test_a_mode_that_capture_overruled_is_seen(monkeypatch):
    """The module runs as its user set it, whatever capture does."""
    monkeypatch.setattr("tensoropt.capture.pytorch.in_mode", lambda model, mode: _all_training(model))
    module = found(f"{SITUATIONS}:build_held_norm")
    # Its dropout would train in the graph, which then is not compared.
    assert module is None or not module.ok


def _all_training(model):
    import contextlib

    @contextlib.contextmanager
    def open_():
        modes = {m: m.training for m in model.modules()}
        model.train()
        model.drop.eval()
        yield ()
        for m, training in modes.items():
            m.training = training

    return open_()


COUNTING = """
import torch
from torch import nn


class Counting(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.a, self.norm, self.what, self.calls, self.found = nn.Linear(8, 8), nn.BatchNorm1d(8), what, 0, []
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("unread", torch.ones(3))

    def forward(self, x):
        h = self.norm(self.a(x))
        self.calls += 1
        with torch.no_grad():
            if self.what == "every other call" and self.calls % 2 == 0:
                self.seen += 1
            if self.what == "list":
                self.found.append(h.mean() + 1)
                self.seen += sum(self.found)
            if self.what == "kept":
                self.seen += h.mean(0)
        scale = self.calls if self.what == "loss" else 1
        return h.square().sum(1).mean() * scale + 0 * self.seen.sum()


def of(what):
    def build():
        torch.manual_seed(0)
        return Counting(what), (torch.randn(16, 8),)
    return build


every_other, in_list, kept, of_loss = map(of, ("every other call", "list", "kept", "loss"))
"""


@pytest.mark.parametrize(("name", "ok", "buffer"), [
    ("every_other", False, "seen"),
    ("in_list", False, "seen"),
    ("kept", True, None),
    ("of_loss", False, None),
])  # fmt: skip
def test_state_that_python_keeps_is_seen(tmp_path, name, ok, buffer):
    """The graph computes the first call again and again: another call shows it in buffers and in the loss."""
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)
    module = found(f"{file}:{name}")
    assert module.ok is ok
    if buffer:
        assert module.worst_buffer == buffer
        assert module.differences.buffer > 1e-2
    else:
        assert module.differences.buffer < 1e-5


IN_PLACE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, mask):
        x.sub_(0.3).div_(1.7)
        x[mask] = 0
        return (self.a(x) - x).square().mean()


def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 8), torch.rand(4) < 0.5)
"""


def test_a_module_that_changes_its_inputs_gets_new_ones_for_each_call(tmp_path):
    file = tmp_path / "in_place.py"
    file.write_text(IN_PLACE)
    assert found(f"{file}:build").differences.loss < 1e-6


def test_autocast_inside_is_judged_by_what_bfloat16_changes(tmp_path):
    file = tmp_path / "autocast.py"
    file.write_text(AUTOCAST)
    assert found(f"{file}:build").ok


def test_a_lost_backward_inside_bfloat16_is_not(monkeypatch):
    """Without the function's own backward the rounding has no gradient at all."""
    monkeypatch.setattr("tensoropt.capture.fidelity.check_structure", lambda *args: ())
    monkeypatch.setattr(
        "tensoropt.capture.custom_functions._kept", lambda cls, args, kwargs: cls.forward(_Anything(), *args)
    )
    module = found(f"{SITUATIONS}:build_narrow")
    assert not module.ok
    assert module.worst_gradient in {"first.weight", "first.bias"}


class _Anything:
    def save_for_backward(self, *tensors):
        pass
