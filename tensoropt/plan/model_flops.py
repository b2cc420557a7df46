"""Model FLOP of a step: what forward and backward have to compute, whatever a plan computes again.

Chowdhery et al., *PaLM*, 2022, appendix B, count for model FLOPs utilisation (MFU) the products of forward
and their gradients once, recomputation not at all. Plans recompute blocks, which is no part of the unsplit
model; kernels recompute too: fused attention makes its scores again in backward, which PyTorch's counts
include. They count every score of attention, also what a causal mask hides, which kernels skip: utilisations
are published so, and could not be compared with half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tensoropt.costs.roofline import class_of, number_format
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.spec import CostClass
from tensoropt.plan.coverage import unsplit
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.sharding.groups import GroupGraph

GRADIENTS_OF_A_PRODUCT = 2.0
"""A product's gradients are one product of its size for each of its two factors; what a kernel computes in
backward beyond that, it computes again."""


def model_flops(
    graph: GroupGraph,
    facts_of: Callable[[Workload], Facts],
    device_type: str,
    kernels: KernelSettings,
) -> dict[str, float]:
    """FLOP of one step of the unsplit model, multiply-adds counted as two, by the format of their numbers.

    Formats are dtypes as device kinds list their peaks (``float32``, ``bfloat16``), and ``tf32`` for float32
    numbers that PyTorch's settings let a GPU's tensor cores compute.

    Args:
        facts_of: facts in the mode (training or inference) that is meant.
        kernels: PyTorch's settings.
    """
    found: dict[str, float] = {}
    for template in unsplit(graph, facts_of).values():
        work, facts = template.works[0], template.facts[0]
        whole = _with_all_scores(work)
        if whole is not work:
            facts = facts_of(whole)
        backward = min(facts.backward_flops, GRADIENTS_OF_A_PRODUCT * facts.forward_flops)
        if facts.forward_flops:
            name = number_format(work.dtype, CostClass(class_of(work)), device_type, kernels)
            found[name] = found.get(name, 0.0) + facts.forward_flops + backward
    return found


def _with_all_scores(work: Workload) -> Workload:
    """The workload without the causal flags of attention."""
    if not any(_is_causal(call) for call, _ in work.calls):
        return work
    calls = tuple((_seeing_all(call) if _is_causal(call) else call, outputs) for call, outputs in work.calls)
    return replace(work, calls=calls)


def _is_causal(call: LocalCall) -> bool:
    return call.function == ATTENTION and call.args[5:6] == (True,)


def _seeing_all(call: LocalCall) -> LocalCall:
    return replace(call, args=(*call.args[:5], False, *call.args[6:]))
