"""What is said of attention with dropout: in bytes that are worked out by hand, and only where it is true."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional

from tensoropt.capture import capture
from tensoropt.costs.math_form import fused, math_form_notes
from tensoropt.plan.coverage import unsplit
from tensoropt.plan.problem import prepare
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.units import format_bytes

A100 = (8, 0)
ROWS, SIZE, LAYERS = 64, 16, 3


class Attending(nn.Module):
    """Layers of attention of two heads, those of the keys in front, without a projection."""

    def __init__(self, dropout: float, key_heads: int = 2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.dropout, self.key_heads = dropout, key_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            x = x * self.scale
            keys = x[:, : self.key_heads]
            x = functional.scaled_dot_product_attention(
                x, keys, keys, None, self.dropout, True, enable_gqa=self.key_heads != 2
            )
        return x.square().mean()


def templates(dropout: float, key_heads: int = 2):
    problem = prepare(capture(Attending(dropout, key_heads), (torch.randn(4, 2, ROWS, SIZE),)))
    return list(unsplit(problem.graph, lambda work: find_facts(work, True, A100)).values())


def test_the_note_says_what_the_math_form_keeps_more():
    (note,) = math_form_notes(templates(0.1), A100)
    more = []
    for template in templates(0.1):
        work = fused(template.works[0])
        if work is not None:
            kept = find_facts(work, True, A100).kept_bytes
            more.append(template.facts[0].kept_bytes - kept)
    assert len(more) == LAYERS
    # At least the weights, those that dropout left and which these are, without what it need not keep.
    weights = 4 * 2 * ROWS * ROWS
    assert all(2 * 4 * weights < one < 4 * 4 * weights for one in more)
    assert note.startswith("attention with dropout runs in its math form")
    assert f"; {format_bytes(sum(more))} more in all" in note
    assert re.search(rf"{LAYERS} operators keep up to", note)


def test_nothing_is_said_where_a_gpu_takes_the_math_form_itself():
    works = [w for t in templates(0.1, 1) if (w := fused(t.works[0])) is not None]
    assert len(works) == LAYERS
    assert all(find_facts(work, True, A100).kept_bytes > 0 for work in works)
    # Heads in groups are not for the efficient kernel, and floats not for flash.
    assert math_form_notes(templates(0.1, 1), A100) == ()


def test_nothing_is_said_without_dropout_gpus_or_training():
    assert math_form_notes(templates(0.0), A100) == ()
    assert math_form_notes(templates(0.1), None) == ()
    assert math_form_notes(templates(0.1), A100, training=False) == ()
    assert fused(templates(0.0)[0].works[0]) is None
