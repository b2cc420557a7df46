"""The cost of running attention with dropout in its math form.

A fused kernel draws its dropout from its device's own generator, by positions in its own shard. Every way to
split it would give different masks, so a plan could not be compared with the unsplit model, and replicas
would disagree. The math form takes its mask from a counter-based hash of global positions, and keeps all
weights for this (:mod:`tensoropt.ops.families.attention`). On GPUs PyTorch would run a fused kernel instead;
people are told how much more memory the math form keeps there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tensoropt.costs.tables import Template
from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.families.attention import ATTENTION, MATH_FORM
from tensoropt.profiling.cuda_attention import Capability
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import Workload
from tensoropt.units import format_bytes


def fused(work: Workload) -> Workload | None:
    """The same workload with PyTorch's own attention; None if it has no attention with dropout."""
    if not any(call.function == MATH_FORM for call, _ in work.calls):
        return None
    calls = tuple((_fused(work, call) if call.function == MATH_FORM else call, o) for call, o in work.calls)
    return replace(work, calls=calls)


def _fused(work: Workload, call: LocalCall) -> LocalCall:
    q, k, *_, scale = call.args
    heads = {name: spec.shape[-3] for name, spec, _ in work.inputs if len(spec.shape) >= 3}
    names = [one.name for one in (q, k) if isinstance(one, Ref)]
    # Nothing is known here of tensors that are made inside; PyTorch takes the flag for equal heads as well.
    grouped = len({heads.get(name) for name in names}) > 1
    return LocalCall(ATTENTION, call.args[:-1], {"scale": scale, "enable_gqa": grouped}, call.name)


def math_form_notes(
    templates: Iterable[Template], capability: Capability | None, training: bool = True
) -> tuple[str, ...]:
    """How much more the math form keeps for backward than a GPU's own kernels would, in words; empty for CPU
    ranks, whose own attention with dropout is the math form too.

    Args:
        templates: the groups, unsplit.
        training: whether a step trains; in inference nothing is kept, and dropout is left out.
    """
    if capability is None or not training:
        return ()
    known: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    for template in templates:
        work, facts = template.works[0], template.facts[0]
        own = fused(work)
        if own is None:
            continue
        if work.key not in known:
            known[work.key] = find_facts(own, True, capability).kept_bytes
        pairs.append((facts.kept_bytes, known[work.key]))
    more = sum(kept - least for kept, least in pairs)
    if more <= 0:
        return ()
    kept, least = max(pairs)
    number = "one operator keeps" if len(pairs) == 1 else f"{len(pairs)} operators keep up to"
    return (
        "attention with dropout runs in its math form, whose masks do not depend on how it is split: "
        f"{number} {format_bytes(kept)}, where a GPU's own kernel keeps {format_bytes(least)}; "
        f"{format_bytes(more)} more in all, unsplit. A dropout of 0 inside attention saves that, recomputed "
        "blocks and micro-batches most of it",
    )
