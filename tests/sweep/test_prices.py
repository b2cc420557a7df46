"""What calls are priced by, beside what they must move and PyTorch's own counts of FLOP.

Calls priced for twice as many bytes as they read and write once, for half as many, or for twice or half the
FLOP, have their reason in ``WHY``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tensoropt import zoo
from tensoropt.costs import compute
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import Workload, memory_orders, on_fake_tensors, run_workload, workload
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.sharding.groups import GroupGraph
from tests.costs.models import grouped
from tests.sharding.models import MODELS, graph_of

UNALIKE = 2.0
"""From this factor on, either way, a price needs a reason."""
_BY_COUNTER = (
    "numbers are drawn by counter, alike however a tensor is split: integer operators in place of one kernel"
)
_COPIED = "operands whose strides the product cannot take are copied first"
WHY = {
    "aten.cross_entropy_loss.default": "the logarithm of softmax is written, then read",
    "aten.einsum.default": _COPIED,
    "aten.linear.default": _COPIED,
    "aten.lstm.input": "each layer and direction reads its weights and writes gates for backward",
    "aten.matmul.default": _COPIED,
    "aten.max_pool2d.default": "the position of each maximum is written, in eight bytes",
    "aten.scaled_dot_product_attention.default": "heads that broadcast: not fused, scores are written",
    "expert_kernels.experts": "rows are sorted by expert, gathered, and put back",
    "kernels.attention_with_dropout": _BY_COUNTER,
    "kernels.causal_attention_in_blocks": "each block of queries reads the keys and values that it sees",
    "kernels.dropout": _BY_COUNTER,
    "kernels.random": _BY_COUNTER,
    "kernels.ring_attention": "each step of the ring adds to a result in float32",
    "kernels.vocabulary_embedding": "rows of other devices' parts are looked up too and zeroed",
    "loss_kernels.cross_entropy": "eight passes over the classes, from their maximum to softmax",
}
"""What calls do with the bytes that they are priced for."""


def name_of(call: LocalCall) -> str:
    return f"{call.static[0]}, divided" if call.function == "kernels.divided" else call.function


def odd_calls(graph: GroupGraph, seen: set[str]) -> dict[str, str]:
    """The calls of a model, in every configuration on two devices, whose price is unlike, and how."""
    orders, odd = memory_orders(graph), {}
    for group in graph.groups:
        for configuration in enumerate_configurations(graph.atoms, group, (1, 2), group.unsplit):
            work = workload(graph, configuration, (1, 2), orders)
            if work.key not in seen:
                seen.add(work.key)
                odd |= {call: f"{how} in {group.name} {configuration.labels}" for call, how in _odd(work)}
    return odd


def _odd(work: Workload) -> Iterator[tuple[str, str]]:
    facts, counted = find_facts(work), _counted(work)
    added_up = work.resolved.tensor if work.resolved is not None else None
    for (call, outputs), of, flop in zip(work.calls, facts.work_of_calls, counted, strict=True):
        # A result that ranks add up is written whole and copied into its pieces: that is no single kernel.
        size = 0 if added_up in outputs else of.outer_bytes
        bytes_moved = compute.moved_bytes(compute._call_class(call), of)
        for what, priced, once in ("bytes", bytes_moved, size), ("FLOP", of.forward_flops, flop):
            if once and not 1 / UNALIKE < priced / once < UNALIKE:
                yield name_of(call), f"{what} x {priced / once:.1f}"


def _counted(work: Workload) -> list[int]:
    """PyTorch's own FLOP of each call."""
    counter, at = FlopCounterMode(display=False), [0]

    def run(tensors):
        with counter:
            run_workload(work, tensors, SingleDevice(), after=lambda _: at.append(counter.get_total_flops()))

    on_fake_tensors(work, run)
    return [after - before for before, after in itertools.pairwise(at)]


def test_unlike_prices_of_a_model_have_reasons() -> None:
    assert not odd_calls(load_model(ModelSpec("zoo:unet-tiny")).graph, set()).keys() - WHY


@pytest.mark.slow
def test_unlike_prices_have_reasons() -> None:
    names = [f"zoo:{entry.name}" for entry in zoo.list_models() if entry.size == "laptop"]
    seen: set[str] = set()
    for graph in (*(load_model(ModelSpec(n)).graph for n in names), *(grouped(graph_of(n)) for n in MODELS)):
        odd = odd_calls(graph, seen)
        assert not {call: how for call, how in odd.items() if call not in WHY}


@pytest.mark.parametrize("factor", [4.0, 0.2])
def test_a_price_pass_by_pass_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a batch norm split along the batch was, in the operators it consists of."""
    own = compute.moved_bytes
    monkeypatch.setattr(compute, "moved_bytes", lambda cls, of: factor * own(cls, of))
    found = odd_calls(load_model(ModelSpec("zoo:unet-tiny")).graph, set())
    assert {"kernels.sync_batch_norm", "aten.conv2d.default"} <= found.keys()
