"""Guards on values are passed, whoever wrote them, and what is left computes what the model does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture, rebuild
from tensoropt.errors import CaptureError
from tests.models import Call


def net(forward):
    return Call(forward, a=nn.Linear(8, 4))


X, Y = torch.randn(6, 8), torch.randint(0, 4, (6,))


def _captured(forward, *args):
    model = net(forward)
    captured = capture(model, args)
    found = rebuild(captured.graph, model)(*args)
    torch.testing.assert_close(found, model(*args))
    return captured.graph


def test_guards_of_pytorchs_own_losses_are_passed_with_a_note():
    def forward(m, x, y):
        return F.gaussian_nll_loss(m.a(x), x[:, :4], torch.full((6, 1), 0.5))

    graph = _captured(forward, X, Y)
    assert any("test_validity.py" in note and "refuses some values" in note for note in graph.notes)


JOINED = """
def step(m, x, y):
    assert (y >= 0).all() and (y < 4).all()
    assert not ((x > 100).any() or (x < -100).any())
    if not (x == x).all() or (y > 3).any():
        raise ValueError("values")
    return m.a(x).square().mean() + y.sum()
"""


def test_guards_that_join_questions_are_passed(tmp_path):
    """In a file of its own, as pytest writes other code for the assertions of a test."""
    path, names = tmp_path / "joined.py", {}
    path.write_text(JOINED)
    exec(compile(JOINED, str(path), "exec"), names)
    graph = _captured(names["step"], X, Y)
    assert [note.partition(" ")[0].rpartition(":")[2] for note in graph.notes] == ["3", "4", "5"]


def _numbers(m, x, y):
    if y.max().item() > 3 or x.abs().max().item() > 100.0:
        raise ValueError("values")
    return F.cross_entropy(m.a(x), y)


def _warned(m, x, y):
    if (x.abs() > 50).any():
        print("large")
    return F.cross_entropy(m.a(x), y)


@pytest.mark.parametrize("forward", [_numbers, _warned])
def test_guards_on_numbers_and_warnings_are_passed(forward):
    graph = _captured(forward, X, Y)
    assert all("test_validity.py" in note for note in graph.notes)
    assert graph.notes


def _two_ways(m, x, y):
    if (x > 0).any():
        x = x * 2
    return F.cross_entropy(m.a(x), y)


def test_a_branch_that_computes_is_no_guard():
    with pytest.raises(CaptureError, match=r"test_validity\.py:\d+ \(if \(x > 0\)\.any\(\):\)"):
        capture(net(_two_ways), (X, Y))


def dropping(draw):
    def forward(m, x):
        x = m.a(x)
        if draw():
            x = m.b(x)
        return x.square().mean()

    return Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("draw", "taken"),
    [
        (lambda: torch.rand(1) < 0.3, False),
        (lambda: torch.rand(()) <= 0.7, True),
        (lambda: torch.rand(1) >= 0.7, False),
    ],
)
def test_a_layer_that_is_dropped_at_random_is_the_likelier_one(draw, taken):
    graph = capture(dropping(draw), (torch.ones(4, 4),)).graph
    assert any("test_validity.py" in note and "takes the likelier branch" in note for note in graph.notes)
    assert len([op for op in graph.operators if "linear" in op.target]) == 1 + taken


@pytest.mark.parametrize(
    "use", [lambda d: d < 0.3, lambda d: d * 2 < 1, lambda d: int(d) == 0, lambda d: torch.ones(1) * d < 2]
)
def test_a_number_that_was_drawn_is_compared_as_a_tensor(use):
    with pytest.raises(CaptureError, match=r"test_validity\.py:\d+ .*(number of|value of) a tensor"):
        capture(dropping(lambda: use(torch.rand(()).item())), (torch.ones(4, 4),))
