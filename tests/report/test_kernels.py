"""What the seconds of a group of operators go into, by class of call."""

from __future__ import annotations

import pytest

from tensoropt.graph.ir import Operator
from tensoropt.plan.shares import Weights
from tensoropt.report.kernels import Kernels, kernels_of
from tensoropt.report.step_parts import Part, remedies

GELU = ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul")


def operators(*calls: str) -> list[Operator]:
    """A group of these calls, the n-th called ``on``."""
    return [Operator(f"o{n}", f"aten.{call}.default", (), {}, ()) for n, call in enumerate(calls)]


def weighing(*seconds: float) -> Weights:
    return Weights({f"o{n}": s for n, s in enumerate(seconds)})


def test_a_product_and_the_function_behind_it_are_told_apart() -> None:
    found = kernels_of(operators("addmm", "view", *GELU), weighing(2.0, 0.0, *[1.0] * 8))
    assert found == (
        Kernels("GELU", 8, 0.8, "F.gelu(approximate='tanh') or torch.compile"),
        Kernels("matrix product", 1, 0.2),
    )


@pytest.mark.parametrize(
    ("calls", "title", "remedy"),
    [
        (("erf", "add", "mul"), "GELU", "F.gelu or torch.compile"),
        (("pow", "mean", "add", "rsqrt"), "RMS norm", "F.rms_norm or torch.compile"),
        (("mul", "neg", "add"), "element-wise", "torch.compile"),
        (("mul", "add"), "element-wise", ""),
    ],
)
def test_a_chain_is_named_after_what_it_computes(calls: tuple[str, ...], title: str, remedy: str) -> None:
    found = kernels_of(operators("linear", *calls), weighing(1.0, *[1.0] * len(calls)))
    assert [(k.title, k.remedy) for k in found if k.title != "matrix product"] == [(title, remedy)]


def test_nothing_is_divided_that_is_of_one_class_or_of_unknown_weight() -> None:
    assert kernels_of(operators("linear"), weighing(1.0)) == ()
    assert kernels_of(operators("linear", *GELU), Weights()) == ()


def test_advice_is_given_by_what_it_would_gain() -> None:
    kernels = kernels_of(operators("addmm", *GELU), weighing(2.0, *[1.0] * 8))
    parts = [
        Part("computation", f"linear {name}", s, s, 2, (), kernels) for name, s in (("a", 0.1), ("b", 0.6))
    ]
    assert [words.partition(" in ")[2] for words in remedies(parts)] == ["linear b.", "linear a."]
    assert remedies(parts)[0].startswith(
        "F.gelu(approximate='tanh') or torch.compile makes one kernel of the 8 GELU"
    )
    assert remedies([Part("computation", "linear a", 0.05, 0.05, 2, (), kernels)]) == []
    assert parts[1].words_by_class == ("linear b, 60 %: GELU (8 unfused kernels) 48 %, matrix product 12 %")
