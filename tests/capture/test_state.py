"""State that forward changes: in the graph, refused by name, or said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.fidelity import rebuild
from tensoropt.errors import CaptureError
from tests.models import Call
from tests.situations import state

IN_GRAPH = {
    state.build_decay: {"mask"},
    state.build_shifted: {"mean", "before"},
    state.build_set_data: {"kept"},
    state.build_queue: {"queue", "place"},
    state.build_codebook: {"book", "sums", "sizes"},
    state.build_teacher: {"weight", "bias"},
    state.build_instance_norms: {f"norms.{n}.running_{what}" for n in (0, 2) for what in ("mean", "var")},
}
"""Builders, and the buffers whose new values the graph has."""


FAST = (state.build_codebook, state.build_set_data, state.build_instance_norms)
"""An assignment, a write through ``.data``, and what an operator changes inside."""


@pytest.mark.parametrize(
    "build", [pytest.param(build, marks=() if build in FAST else pytest.mark.slow) for build in IN_GRAPH]
)
def test_new_values_of_buffers_are_those_of_the_model(build: Callable[[], state.Recipe]) -> None:
    model, args = build()
    graph = capture(model, args).graph
    assert {graph.tensors[name].key for name in graph.mutations} == IN_GRAPH[build]
    # Each lies in memory of its own, so that nobody has to copy it.
    assert len(set(graph.mutations.values())) == len(graph.mutations)
    assert all(graph.tensors[new].kind == "activation" for new in graph.mutations.values())
    rebuilt, (own, given) = rebuild(graph, model), build()
    for _ in range(2):
        assert float(rebuilt(*args)) == pytest.approx(float(own(*given)), rel=1e-5)
    found = dict(rebuilt.named_buffers())
    for key, value in own.named_buffers():
        if key in IN_GRAPH[build]:
            torch.testing.assert_close(found[key], value)


def test_a_model_that_is_refused_is_as_it_was() -> None:
    model, args = state.build_late_buffer()
    before = {name: id(value) for name, value in model.named_buffers()}
    with pytest.raises(CaptureError):
        capture(model, args)
    assert {name: id(value) for name, value in model.named_buffers()} == before


def test_numbers_and_lists_that_change_are_said() -> None:
    for build, name in ((state.build_python_counter, "count"), (state.build_list, "found")):
        model, args = build()
        (note,) = capture(model, args).graph.notes
        assert note.startswith(f"forward changes {name}")
    assert model.count == 1


def test_what_carries_nothing_over_is_not_mentioned() -> None:
    """Attributes that forward sets and nothing reads, or reads only once it has set them."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.last, m.seen = x, x.mean(0)
        return (m.layer(x) * m.seen).mean()

    model = Call(forward, layer=nn.Linear(4, 4))
    model.last, model.seen = None, torch.zeros(4)
    assert not capture(model, (torch.randn(3, 4),)).graph.notes


def test_buffers_of_another_shape_are_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.kept = x.detach()
        return m.layer(x).mean()

    model = Call(forward, layer=nn.Linear(4, 4))
    model.register_buffer("kept", torch.zeros(4))
    with pytest.raises(CaptureError, match=r"its buffer kept in forward, or gives it another shape"):
        capture(model, (torch.randn(3, 4),))
