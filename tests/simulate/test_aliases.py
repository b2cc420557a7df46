"""Gradients that share a storage, against what a real step keeps alive.

Who reads the views of a storage: worked out by hand for a tensor with two views.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.api import explore
from tensoropt.costs.effects import Reading
from tensoropt.simulate.aliases import ViewAlias, ViewAliases
from tensoropt.simulate.readings import Column
from tests.models import Call
from tests.simulate.strategies import facts_by_group, memory_curve
from tests.simulate.test_owners import OPTIMIZERS, tracked_peak, unsplit

ROWS, WIDTH, NARROW, WIDE = 16, 12, 8, 24


def joined() -> tuple:
    """Two layers side by side: backward cuts one gradient into two.

    The loss reads one column only, here and below: that of a real mean squared error keeps memory for all
    its input.
    """

    def forward(m, x, y):
        return F.mse_loss(torch.cat([m.a(x), m.b(x)], 1)[:, 0], y)

    held = {name: nn.Linear(WIDTH, size, bias=False) for name, size in (("a", NARROW), ("b", WIDE))}
    return Call(forward, **held), (torch.randn(ROWS, WIDTH), torch.randn(ROWS)), {}


def dense(count: int = 4) -> tuple:
    """Every layer reads all that came before it, put side by side."""

    def forward(m, x, y):
        parts = [torch.tanh(x)]
        for layer in m.layers:
            parts.append(torch.tanh(layer(torch.cat(parts, 1))))
        return F.mse_loss(m.out(torch.cat(parts, 1))[:, 0], y)

    layers = nn.ModuleList(nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(count))
    model = Call(forward, layers=layers, out=nn.Linear(WIDTH * (count + 1), 4))
    return model, (torch.randn(ROWS, WIDTH), torch.randn(ROWS)), {}


def play(build, micro_batches: int = 1):
    strategy = unsplit(build, micro_batches)
    return memory_curve(strategy, facts_by_group(strategy), "sgd")


class Residual(nn.Module):
    """A sum whose gradient both operands take as it is: the peak is in the backward of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return F.mse_loss(self.last(x + self.second(F.gelu(x)))[:, 0], y)


def residual() -> tuple:
    return Residual(), (torch.randn(64 * ROWS, WIDTH), torch.randn(64 * ROWS)), {}


def branches() -> tuple:
    """A sum of three whose gradient each takes as it is: it waits for the one made first."""

    def forward(m, x, y):
        x = torch.tanh(m.first(x))
        a = m.a(x)
        return F.mse_loss(m.last(a + m.b(torch.tanh(a)) + m.c(x))[:, 0], y)

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "a", "b", "c", "last")}
    return Call(forward, **layers), (torch.randn(64 * ROWS, WIDTH), torch.randn(64 * ROWS)), {}


def masked() -> tuple:
    """A view of a buffer is added and multiplied with: only the product's backward needs the old value."""

    def forward(m, x, y):
        seen = m.mask.t()
        x = m.block(torch.tanh(m.first(x) + seen)) * seen
        m.mask = m.mask * 0.9
        return F.mse_loss(x[:, 0], y)

    model = Call(forward, first=nn.Linear(WIDTH, WIDTH), block=block(), mask=torch.ones(WIDTH, 64 * ROWS))
    return model, (torch.randn(64 * ROWS, WIDTH), torch.randn(64 * ROWS)), {}


@pytest.mark.parametrize("build", [joined, dense, residual, branches, masked])
def test_a_real_step_peaks_where_it_was_predicted(build):
    """Slices of one gradient are counted apart: in a model as small as this 1 %."""
    predicted = play(build).peak.total
    assert predicted == pytest.approx(tracked_peak(build, unsplit(build, 1), OPTIMIZERS["sgd"]), rel=0.02)


def block() -> nn.Module:
    layers = {"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)}
    return Call(lambda m, x: x + m.down(torch.tanh(m.up(x))), **layers)


def test_alike_sums_in_and_outside_of_recomputed_blocks():
    """Sums that look alike before and in repeated blocks, of which only the latter can be recomputed."""

    def forward(m, x, y):
        x = torch.tanh(m.first(x))
        return F.mse_loss(m.blocks(x + m.second(x))[:, 0], y)

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second")}
    model = Call(forward, **layers, blocks=nn.Sequential(*(block() for _ in range(3))))
    args = torch.randn(64 * ROWS, WIDTH), torch.randn(64 * ROWS)
    found = explore(model, args, cluster="dgx-h100[2]", micro_batches=[1], measure="never")
    assert any(found.plan(i).recomputed for i in range(len(found.points)))


IN_ROWS, WHOLE = (0,), (-1,)


class Seen:
    """``written``: per view what its maker says of it; readers read as it is written, ``far`` in rows."""

    def __init__(self, written, again=()):
        self._written, self._again = written, again

    def written(self, group, name):
        return Column(np.zeros(1, int), [self._written[name]])

    def read(self, group, name):
        return Column(np.zeros(1, int), [Reading(IN_ROWS if group == "far" else WHOLE, True)])

    def hub(self, name):
        return None

    def inside(self, maker, reader):
        return False

    def gathered_again(self, name):
        return np.ones(1, int) if name in self._again else None


def alias(
    name: str, first: int, *readers: str, inner: tuple[ViewAlias, ...] = (), through: int = 0
) -> ViewAlias:
    groups = tuple(SimpleNamespace(name=reader) for reader in readers)
    maker = SimpleNamespace(name=f"cuts {name}")
    return ViewAlias(name, maker, through, "x", first, groups, False, inner)


def users(views, written, *, orders=tuple(range(20)), through=None, again=()):
    moves = SimpleNamespace(steps=lambda name, a, b: ([], []) if a == b else (["all-gather"], []))
    found = ViewAliases(None, None, moves, Seen(written, again))
    return list(found.users(views, 0, orders, through))


def view(lies_in: str = "x") -> Reading:
    return Reading(WHOLE, False, lies_in=lies_in)


def test_one_that_is_no_view_here_leaves_the_others_their_readers():
    both = [alias("a", 2, "reads a"), alias("b", 4, "reads b", "also b")]
    assert [u.number for u in users(both, {"a": view(), "b": view()})] == [3, 5, 6]
    assert [u.number for u in users(both, {"a": view(""), "b": view()})] == [5, 6]
    assert [u.number for u in users(both, {"a": view(), "b": view("")})] == [3]


def test_readers_of_views_are_numbered_behind_each_other():
    """The tensor has one reader, its first view two, and the second view one."""
    reads = {
        name: [SimpleNamespace(name=f"{name}{i}") for i in range(n)]
        for name, n in zip("xab", (1, 2, 1), strict=True)
    }
    maker = SimpleNamespace(name="cuts", writes=("x",), short_names={"x": "x"})
    found = ViewAliases(None, SimpleNamespace(readers=reads, position=lambda *_: -1), None, None)
    found.__dict__["_views"] = {"x": ((maker, "a"), (maker, "b"))}
    assert [(view.name, view.first) for view in found.of("x")] == [("a", 1), ("b", 4)]


def test_a_reader_of_a_view_comes_when_it_comes():
    (user,) = users([alias("a", 2, "reads a", through=7)], {"a": view()})
    assert (user.number, user.order, user.kept, user.moved, user.through) == (3, 3, True, False, 7)


def test_a_view_of_a_view_counts_unless_its_reader_has_a_copy():
    inner = alias("b", 6, "reads b", through=0)
    for reader, numbers in (("reads a", [3, 7]), ("far", [3])):
        outer = alias("a", 2, reader, inner=(inner,), through=9)
        found = users([outer], {"a": view(), "b": view()})
        assert [u.number for u in found] == numbers
        assert {u.through for u in found} == {9}
        assert [u.moved for u in found] == [reader == "far"] + [False] * (len(numbers) - 1)


def test_a_reader_that_gathers_a_view_again_needs_the_storage_that_it_lies_in():
    for again, moved in ((), True), (("a",), False):
        (user,) = users([alias("a", 2, "far")], {"a": view()}, again=again)
        assert (user.kept, user.moved) == (True, moved)
