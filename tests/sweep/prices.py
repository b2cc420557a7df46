"""What calls are priced by, beside what they must move and PyTorch's own counts of FLOP.

``python -m tests.sweep.prices`` looks at every tiny model of the zoo and of ``tests/sharding/models.py``.
Calls priced for twice as many bytes as they read and write once, for half as many, or for twice
or half the FLOP, are listed with what they do; one that ``WHY`` does not explain ends the program with 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from tensoropt import zoo
from tensoropt.costs.compute import call_class, moved_bytes
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


@dataclass(frozen=True)
class Odd:
    """A call, what of it is unlike (``bytes`` or ``FLOP``), by which factor, and where it was seen."""

    call: str
    what: str
    factor: float
    where: str


def name_of(call: LocalCall) -> str:
    return f"{call.static[0]}, divided" if call.function == "kernels.divided" else call.function


def odd_calls(model: str, graph: GroupGraph, seen: set[str] | None = None) -> Iterator[Odd]:
    """The calls of a model, in every configuration on two devices, whose price is unlike."""
    orders, seen = memory_orders(graph), set() if seen is None else seen
    for group in graph.groups:
        for configuration in enumerate_configurations(graph.atoms, group, (1, 2), group.unsplit):
            work = workload(graph, configuration, (1, 2), orders)
            if work.key not in seen:
                seen.add(work.key)
                yield from _odd(work, f"{model}, {group.name}, {', '.join(configuration.labels)}")


def _odd(work: Workload, where: str) -> Iterator[Odd]:
    facts, counted = find_facts(work), _counted(work)
    added_up = work.resolved.tensor if work.resolved is not None else None
    for (call, outputs), of, flop in zip(work.calls, facts.work_of_calls, counted, strict=True):
        # A result that ranks add up is written whole and copied into its pieces: that is no single kernel.
        size = 0 if added_up in outputs else of.outer_bytes
        for what, priced, once in (
            ("bytes", moved_bytes(call_class(call), of), size),
            ("FLOP", of.forward_flops, flop),
        ):
            if once and not 1 / UNALIKE < priced / once < UNALIKE:
                yield Odd(name_of(call), what, priced / once, where)


def _counted(work: Workload) -> list[int]:
    """PyTorch's own FLOP of each call."""
    counter, at = FlopCounterMode(display=False), [0]

    def run(tensors):
        with counter:
            run_workload(work, tensors, SingleDevice(), after=lambda _: at.append(counter.get_total_flops()))

    on_fake_tensors(work, run)
    return [after - before for before, after in itertools.pairwise(at)]


def graphs(names: Iterable[str] = ()) -> Iterator[tuple[str, GroupGraph]]:
    wanted = set(names)
    for name in (*(f"zoo:{entry.name}" for entry in zoo.list_models() if entry.size == "laptop"), *MODELS):
        if not wanted or name in wanted:
            yield (
                name,
                load_model(ModelSpec(name)).graph if name.startswith("zoo:") else grouped(graph_of(name)),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    seen: set[str] = set()
    most: dict[tuple[str, str], Odd] = {}
    for model, graph in graphs(parser.parse_args().names):
        for odd in odd_calls(model, graph, seen):
            key = odd.call, odd.what
            if key not in most or max(odd.factor, 1 / odd.factor) > max(
                most[key].factor, 1 / most[key].factor
            ):
                most[key] = odd
    for odd in sorted(most.values(), key=lambda o: (o.what, -o.factor)):
        print(f"{odd.call} {odd.what} x {odd.factor:.1f} ({odd.where}): {WHY.get(odd.call, 'NOT EXPLAINED')}")
    return int(any(odd.call not in WHY for odd in most.values()))


if __name__ == "__main__":
    sys.exit(main())
