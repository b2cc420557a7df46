"""A model prepared for costs: its micro-batch counts, the share of its work that can be split, and its FLOP.

The model FLOP of a step are what forward and backward have to compute, whatever a plan recomputes.

Chowdhery et al., *PaLM*, 2022, appendix B, count for model FLOPs utilisation (MFU) the products of forward
and their gradients once, recomputation not at all. Plans recompute blocks, which is no part of the unsplit
model; kernels recompute too: fused attention makes its scores again in backward, which PyTorch's counts
include. They count every score of attention, also what a causal mask hides, which kernels skip: utilisations
are published so, and could not be compared with half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tensoropt.capture import Capture
from tensoropt.costs.compute import class_of, number_format
from tensoropt.costs.tables import CostTables, Template, make_templates
from tensoropt.errors import TensorOptError
from tensoropt.graph import OperatorGraph
from tensoropt.ops.calls import CostClass, LocalCall
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.index_space import LoopDim
from tensoropt.ops.layouts import chunk
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.question.settings import Settings
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import (
    MicroBatchRefused,
    batch_placements,
    batch_strategies,
    micro_batch_strategies,
)
from tensoropt.sharding.discovery.discover import Kept
from tensoropt.sharding.groups import (
    PASSED_ON,
    WHOLE,
    AxisStrategy,
    Group,
    GroupGraph,
    batch_inputs,
    group_operators,
)
from tensoropt.sharding.regions import Region, find_regions
from tensoropt.sharding.sequence import sequence_strategies

_AUTO_MICRO_BATCHES = (1, 2, 4, 8)
"""Counts that ``auto`` searches where they divide the batch; each is a search more. Where they end is an
assumption."""


@dataclass
class Problem:
    """A model made ready for costs: captured, factored into atoms, grouped.

    Attributes:
        captured: the capture; None if only the operator graph is available.
        micro: for each group its strategy on the micro-batch axis (all unsplit when refused).
        refusal: why the model cannot run in micro-batches, or "".
    """

    captured: Capture | None
    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    refusal: str = ""

    @property
    def batch(self) -> int:
        """The rows of a step: those of the first input that has any."""
        operators = self.graph.atoms.graph
        shapes = (operators.tensors[name].shape for name in operators.inputs)
        return next((shape[0] for shape in shapes if shape), 1)

    @cached_property
    def sequence(self) -> dict[str, str]:
        """The label with which each group follows the sequence, of those that do."""
        labels = {name: s.label for name, s in sequence_strategies(self.graph).items()}
        return {name: str(label) for name, label in labels.items() if label not in (WHOLE, PASSED_ON)}

    @property
    def parameter_keys(self) -> dict[str, str]:
        """The model's own name for each parameter of the graph."""
        return {t.name: str(t.key) for t in self.graph.atoms.graph.parameters}


def prepare(captured: Capture, kept: Kept | None = None, expert_imbalance: float = 1.0) -> Problem:
    """Return the captured model as atoms and groups, with the groups' strategies on the micro-batch axis."""
    graph = replace(captured.graph, expert_imbalance=expert_imbalance)
    return prepare_graph(graph, captured, kept)


def prepare_graph(
    operators: OperatorGraph, captured: Capture | None = None, kept: Kept | None = None
) -> Problem:
    """Return the operator graph as atoms and groups, with the groups' strategies on the micro-batch axis.

    Args:
        kept: earlier discoveries about operators without a rule; new ones are added.
    """
    graph = group_operators(refine_graph(operators, kept))
    try:
        return Problem(captured, graph, micro_batch_strategies(graph))
    except MicroBatchRefused as refusal:
        whole = {g.name: g.unsplit for g in graph.groups}
        return Problem(captured, graph, whole, str(refusal))


def offered_regions(problem: Problem, settings: Settings) -> tuple[Region, ...]:
    """Return the blocks that the search may recompute."""
    return find_regions(problem.graph) if settings.recompute == "auto" else ()


def micro_batch_counts(problem: Problem, settings: Settings) -> tuple[int, ...]:
    """Return the micro-batch counts to search.

    Raises:
        TensorOptError: a count asked for is refused by the model or does not divide its batch.
    """
    operators = problem.graph.atoms.graph
    inputs = [operators.tensors[n] for n in operators.inputs]
    places = batch_placements(problem.graph)
    # The first input that is split along its dim 0; the placements say which inputs follow the batch.
    batch = next((t.shape[0] for t in inputs if places[t.name] == 0), 1)
    if settings.micro_batches == "auto":
        if problem.refusal or settings.mode == "inference":
            return (1,)
        return tuple(m for m in _AUTO_MICRO_BATCHES if batch % m == 0)
    if isinstance(settings.micro_batches, str):
        raise TensorOptError(
            f"micro-batches '{settings.micro_batches}' is neither 'auto' nor a list such as 1,2,4"
        )
    for count in settings.micro_batches:
        if count > 1 and problem.refusal:
            raise TensorOptError(
                f"{count} micro-batches are refused: {problem.refusal}; use --micro-batches 1"
            )
        if batch % count:
            raise TensorOptError(f"{count} micro-batches do not divide the batch of {batch}; use a divisor")
    return tuple(dict.fromkeys(settings.micro_batches))


def unsplit(graph: GroupGraph, facts_of: Callable[[Workload], Facts]) -> Mapping[str, Template]:
    """Return, for each group, its one configuration on a single device, with workload and facts."""
    return make_templates(graph, (1,), {g.name: g.unsplit for g in graph.groups}, facts_of)


def shares_of_flops(graph: GroupGraph, whole: Mapping[str, Template]) -> tuple[float, float]:
    """Return the shares of the forward FLOPs in groups (all of whose operators have a rule, that can be split
    at least two ways, the unsplit one not counted).

    Args:
        whole: the groups, unsplit.
    """
    total = ruled = split = 0.0
    for group in graph.groups:
        flops = whole[group.name].facts[0].forward_flops
        loops = {s.label.dim for s in group.strategies if s.label.splits}
        total += flops
        ruled += flops if all(graph.atoms.spaces[op.name].known for op in group.operators) else 0.0
        split += flops if len(loops) >= 2 else 0.0
    # A model without FLOP has nothing that could not be split.
    return (ruled / total, split / total) if total else (1.0, 1.0)


def undivided(tables: Iterable[CostTables], but: Container[str] = ()) -> tuple[str, ...]:
    """Return notes on what every searched mesh leaves whole because it divides none of its sizes, with the
    sizes that would be divided: groups with a rule, the batch, and the heads of attention.

    One sentence per kind of operator and sizes, the longest loop nests first; meshes of one device say
    nothing and are passed over.

    Args:
        but: groups to pass over, since constraints decide about them.
    """
    split: dict[str, set[str]] = {}
    axes: set[int] = set()
    graph: GroupGraph | None = None
    for one in tables:
        if prod(one.mesh[1:]) == 1:
            continue
        graph = one.graph
        axes.update(size for size in one.mesh[1:] if size > 1)
        for group in graph.groups:
            labels = (
                group.strategies[i].label for choice in one.templates[group.name].choices for i in choice
            )
            split.setdefault(group.name, set()).update(label.dim for label in labels if label.splits)
    if graph is None:
        return ()
    left: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for group in graph.groups:
        sizes = tuple(_sizes(graph, group))
        if sizes and group.name not in but and not split[group.name]:
            left.setdefault((group.anchor.target, sizes), []).append(group.name)
    ordered = sorted(left.items(), key=lambda item: -prod(size for _, size in item[0][1]))
    return (
        *_counts_left_whole(graph, split, min(axes), but),
        *(_sentence(target, sizes, names, min(axes)) for (target, sizes), names in ordered),
    )


def _counts_left_whole(
    graph: GroupGraph, split: Mapping[str, set[str]], axis: int, but: Container[str]
) -> Iterator[str]:
    """Yield a sentence on the batch, and one on the heads of attention, if they could be split and are not.

    Args:
        split: the loops that searched meshes split, by group.
        axis: the smallest axis of these meshes.
    """
    following = batch_strategies(graph, everywhere=False)
    samples = {graph.atoms.graph.tensors[name].shape[0] for name in batch_inputs(graph.atoms.graph)}
    batch, heads = dict[str, LoopDim](), dict[str, LoopDim]()
    for group in graph.groups:
        dims = {dim.name: dim for dim in graph.atoms.spaces[group.name].dims}
        follows = following.get(group.name)
        if follows is not None and follows.label.splits and dims[follows.label.dim].size in samples:
            batch[group.name] = dims[follows.label.dim]
        if group.anchor.target == ATTENTION and "heads" in dims and "group" not in dims:
            heads[group.name] = dims["heads"]
    for what, loops in (("batch", batch), ("attention heads", heads)):
        whole = [
            loop.size for name, loop in loops.items() if name not in but and loop.name not in split[name]
        ]
        if whole and len(whole) == len(loops):
            better = _near_in_parts(whole[0], axis)
            yield f"{what} left whole: no searched mesh splits {whole[0]}; an axis of {axis} cuts {better}"


def _near(size: int, parts: int) -> str:
    """Return the nearest sizes that are divisible by the number of parts, in words."""
    below = size // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def _near_in_parts(size: int, parts: int) -> str:
    """Return the nearest sizes that can be cut into parts of which none is empty, in words."""

    def cuts(whole: int) -> bool:
        return chunk(whole, parts, parts - 1)[1] > 0

    below = next((whole for whole in range(size - 1, 0, -1) if cuts(whole)), None)
    above = next(whole for whole in range(size + 1, size + 2 * parts) if cuts(whole))
    return f"{above}" if below is None else f"{below} or {above}"


def _sizes(graph: GroupGraph, group: Group) -> Iterator[tuple[str, int]]:
    """Yield the loop dims that a group could split, with their sizes; a dim of size 1 is none."""
    loops = {s.label.dim for s in group.strategies if s.label.splits}
    for dim in graph.atoms.spaces[group.name].dims:
        if dim.name in loops and dim.size > 1:
            yield dim.name, dim.size


def _sentence(target: str, sizes: tuple[tuple[str, int], ...], names: list[str], axis: int) -> str:
    kind = target.removeprefix("aten.").partition(".")[0]
    shown = ", ".join(f"{name} {size}" for name, size in sizes)
    others = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
    better = ", ".join(f"{name} {_near(size, axis)}" for name, size in sizes)
    return (
        f"kept whole, since no searched mesh divides its sizes: {kind} {names[0]} ({shown}){others}; "
        f"an axis of {axis} divides {better}"
    )


_GRADIENTS_OF_A_PRODUCT = 2.0
"""A product's gradients are one product of its size for each of its two factors; what a kernel computes in
backward beyond that, it computes again."""


def model_flops(
    whole: Iterable[Template],
    facts_of: Callable[[Workload], Facts],
    device_type: str,
    kernels: KernelSettings,
) -> dict[str, float]:
    """Return the FLOP of one step of the unsplit model, multiply-adds counted as two, by number format.

    Formats are dtypes as device kinds list their peaks (``float32``, ``bfloat16``), and ``tf32`` for float32
    numbers that PyTorch's settings let a GPU's tensor cores compute.

    Args:
        whole: the groups, unsplit.
        facts_of: facts in the mode (training or inference) that is meant.
        kernels: PyTorch's settings.
    """
    found: dict[str, float] = {}
    for template in whole:
        work, facts = template.works[0], template.facts[0]
        seeing_all = _with_all_scores(work)
        if seeing_all is not work:
            facts = facts_of(seeing_all)
        backward = min(facts.backward_flops, _GRADIENTS_OF_A_PRODUCT * facts.forward_flops)
        if facts.forward_flops:
            name = number_format(work.dtype, CostClass(class_of(work)), device_type, kernels)
            found[name] = found.get(name, 0.0) + facts.forward_flops + backward
    return found


def _with_all_scores(work: Workload) -> Workload:
    """Return the workload without the causal flags of attention."""
    if not any(_is_causal(call) for call, _ in work.calls):
        return work
    calls = tuple((_seeing_all(call) if _is_causal(call) else call, outputs) for call, outputs in work.calls)
    return replace(work, calls=calls)


def _is_causal(call: LocalCall) -> bool:
    return call.function == ATTENTION and call.args[5:6] == (True,)


def _seeing_all(call: LocalCall) -> LocalCall:
    return replace(call, args=(*call.args[:5], False, *call.args[6:]))
