"""Random numbers: every element is a hash of its global index, so every dim splits."""

from __future__ import annotations

from tensoropt.sharding.rules.registry import Builder, rule


@rule("aten.rand.default", "aten.randn.default", "aten.rand_like.default", "aten.randn_like.default")
def random(b: Builder) -> None:
    b.write(b.loops(b.output().shape))


@rule("aten.bernoulli.p", "aten.bernoulli.default")
def bernoulli(b: Builder) -> None:
    loops = b.loops(b.output().shape)
    b.read(b.arg(0), loops)
    b.write(loops)
