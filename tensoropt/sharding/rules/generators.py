"""Random numbers: every element is a hash of its global index, so every dim splits."""

from __future__ import annotations

from tensoropt.sharding.rules.registry import Builder, rule


@rule(
    "aten.rand.default",
    "aten.randn.default",
    "aten.randint.low",
    "aten.randint.default",
)
def random(b: Builder) -> None:
    b.write(b.loops(b.output().shape))


@rule(
    "aten.rand_like.default",
    "aten.randn_like.default",
    "aten.uniform.default",
    "aten.normal_functional.default",
    "aten.exponential.default",
)
def random_like(b: Builder) -> None:
    """In the shape of the operand, whose values do not count."""
    loops = b.loops(b.output().shape)
    b.read(b.arg(0), loops)
    b.write(loops)


@rule("aten.bernoulli.p", "aten.bernoulli.default")
def bernoulli(b: Builder) -> None:
    loops = b.loops(b.output().shape)
    b.read(b.arg(0), loops)
    b.write(loops)
