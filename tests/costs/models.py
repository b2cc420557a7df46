"""Small models made ready for costs, and prices that tell everything apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.capture import capture
from tensoropt.costs.builder import TableBuilder
from tensoropt.costs.edges import TableArrays
from tensoropt.costs.prices import Prices
from tensoropt.costs.restrictions import FREE, Restriction
from tensoropt.costs.tables import CostTables, make_templates
from tensoropt.evaluation.problem import Problem, prepare
from tensoropt.graph import OperatorGraph
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.regions import Region
from tests.models import Call

Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def unrolled(width: int = 16) -> Recipe:
    """Three steps of ``h = tanh(A x + B h) * h + h``: each step reads both weights."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.enter(x[:, 0]))
        for step in x.unbind(1):
            h = torch.tanh(m.enter(step) + m.again(h)) * h + h
        return F.mse_loss(m.leave(h), y)

    layers = {"enter": nn.Linear(width, width), "again": nn.Linear(width, width, bias=False)}
    model = Call(forward, **layers, leave=nn.Linear(width, 4))
    return model, (torch.randn(16, 3, 16), torch.randn(16, 4)), {}


def three() -> Recipe:
    """Two layers behind another one, so that what they read needs a gradient."""
    sizes = {"enter": (12, 24), "first": (24, 32), "second": (32, 8)}
    layers = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    model = Call(lambda m, x, y: F.mse_loss(m.second(F.relu(m.first(m.enter(x)))), y), **layers)
    return model, (torch.randn(16, 12), torch.randn(16, 8)), {}


def four() -> Recipe:
    """Four products without biases and a loss: five groups in four blocks."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, y)

    layers = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4)))
    return Call(forward, layers=layers), (torch.randn(16, 24), torch.randn(16, 24)), {}


def two_layers() -> Recipe:
    """``mse(W2 relu(W1 x))`` without biases: everything about it can be worked out by hand."""
    layers = {"first": nn.Linear(24, 32, bias=False), "second": nn.Linear(32, 8, bias=False)}
    model = Call(lambda m, x, y: F.mse_loss(m.second(F.relu(m.first(x))), y), **layers)
    return model, (torch.randn(16, 24), torch.randn(16, 8)), {}


def gates(width: int = 16) -> Recipe:
    """Two projections of one input multiplied with it: a hub with three readers, and biases."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hub = torch.tanh(m.enter(x))
        return F.mse_loss(m.leave(m.norm(torch.sigmoid(m.left(hub)) * m.right(hub) + hub)), y)

    layers = {
        "enter": nn.Linear(12, width),
        "left": nn.Linear(width, width),
        "right": nn.Linear(width, width),
    }
    model = Call(forward, **layers, norm=nn.LayerNorm(width), leave=nn.Linear(width, 4))
    return model, (torch.randn(16, 12), torch.randn(16, 4)), {}


def gpt2(**config: Any) -> Recipe:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 102, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**(sizes | off | config)))
    model.loss_type = "ForCausalLM"
    x = torch.randint(0, sizes["vocab_size"], (4, 16))
    return model, (), {"input_ids": x, "labels": x.clone()}


def llama(layers: int = 1) -> Recipe:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=101, intermediate_size=48, bos_token_id=0, eos_token_id=0, **sizes)
    x = torch.randint(0, 101, (4, 16))
    return LlamaForCausalLM(config), (), {"input_ids": x, "labels": x.clone()}


def llama_two() -> Recipe:
    return llama(2)


@cache
def problem(build: Callable[[], Recipe], mode: str = "train", dtype: str = "float32") -> Problem:
    model, args, kwargs = build()
    return prepare(capture(model, args, kwargs, mode=mode, dtype=dtype))


def grouped(graph: OperatorGraph) -> GroupGraph:
    return group_operators(refine_graph(graph))


@dataclass(frozen=True)
class ToyCompute:
    """Seconds that differ between any two workloads: read off their keys."""

    optimizer_s_per_element: float = 1e-9
    source: str = "data sheet"
    host_s: tuple[float, float] = (0.0, 0.0)

    def source_of(self, work: Workload) -> str:
        return self.source

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        return int(work.key[:6], 16) * 1e-10, int(work.key[6:12], 16) * 1e-10

    def host_seconds(self, work: Workload) -> tuple[float, float]:
        return self.host_s

    def weight_gradient_s(self, work: Workload, facts: Facts) -> float:
        return 0.4 * self.seconds(work, facts)[1]


class ToyCommunication:
    """Seconds with a constant and a slope of its own for every kind and every set of axes."""

    def source(self, kind: str, axes: Sequence[int]) -> str:
        return "fitted"

    WEIGHTS: ClassVar = {
        "all_reduce": 2.0,
        "all_gather": 3.0,
        "reduce_scatter": 5.0,
        "all_to_all": 7.0,
        "ring_send": 13.0,
    }

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        assert axes
        assert list(axes) == sorted(axes)
        group = sum(11.0 ** (a + 1) for a in axes)
        return self.WEIGHTS[kind] * (1e-6 * group + 1e-9 * num_bytes * (1 + group))


_FACTS: dict[tuple[str, bool], Facts] = {}


def facts_of(work: Workload, training: bool = True) -> Facts:
    if (work.key, training) not in _FACTS:
        _FACTS[work.key, training] = find_facts(work, training)
    return _FACTS[work.key, training]


AGAIN_S = 3e-6


def tables_of(
    prepared: Problem,
    mesh: tuple[int, ...],
    optimizer: str = "adam",
    copy: float = 1e9,
    regions: Sequence[Region] = (),
    arrays: TableArrays | None = None,
    *,
    beside: bool = False,
    restriction: Restriction = FREE,
) -> CostTables:
    """Cost tables at toy prices."""
    training = prepared.graph.atoms.graph.training
    templates = make_templates(
        prepared.graph, mesh, prepared.micro, lambda w: facts_of(w, training), restriction
    )
    overheads = Overheads(copy_s_per_byte=1 / copy, again_s=AGAIN_S)
    costs = ToyCompute(), ToyCommunication()
    prices = Prices(prepared.graph, mesh, *costs, optimizer, overheads, beside=beside)
    builder = TableBuilder(prepared.graph, prepared.micro, templates, prices, regions, restriction, arrays)
    return builder.build()
