"""Steps on the ranks of a test pool with copies gathered again in backward, beside such with copies kept."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.execute import jobs


def strategies(name: str, mesh: tuple[int, ...], seed: int, recompute: float) -> tuple[Strategy, Strategy]:
    """A random strategy that keeps all copies, and the same with all gathered again that can be."""
    graph = jobs.captured_model(name).graph
    micro = micro_strategies(graph, mesh[0])
    drawn = random_strategy(graph, mesh, micro, random.Random(seed), recompute)
    kept = replace(drawn, gathered_again=frozenset())
    return kept, replace(kept, gathered_again=kept.gatherable)


def gather_alike(
    rank: int, world: int, name: str, mesh: tuple[int, ...], seed: int, recompute: float
) -> dict[str, object]:
    """Whether loss and gradients are the same to the last bit, and how many copies were gathered again."""
    loaded = jobs.captured_model(name)
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    both = strategies(name, mesh, seed, recompute)
    for strategy in both:
        run = ShardedEngine(strategy, loaded.values)
        (loss,) = run(*loaded.inputs)
        loss.backward()
        found.append((loss.detach(), {k: v.clone() for k, v in run.shards.gradients.items()}))
    (loss, gradients), (again, others) = found
    return {
        "loss": torch.equal(loss, again),
        "gradients": all(torch.equal(value, others[key]) for key, value in gradients.items()),
        "gathered": len(both[1].gathered_again),
    }
