"""A captured model prepared for cost tables: its micro-batch counts, splittable FLOP, and total FLOP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tensoropt.capture import Capture
from tensoropt.costs.compute import class_of, number_format
from tensoropt.costs.tables import Template, make_templates
from tensoropt.errors import TensorOptError
from tensoropt.graph import OperatorGraph
from tensoropt.ops.calls import CostClass, LocalCall
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.question.settings import Settings
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import MicroBatchRefused, batch_placements, micro_batch_strategies
from tensoropt.sharding.discovery.discover import Kept
from tensoropt.sharding.groups import PASSED_ON, WHOLE, AxisStrategy, GroupGraph, group_operators
from tensoropt.sharding.regions import Region, find_regions
from tensoropt.sharding.sequence import sequence_strategies

_AUTO_MICRO_BATCHES = (1, 2, 4, 8)
"""The numbers of micro-batches that ``auto`` searches if they divide the batch; an assumption."""


@dataclass
class Problem:
    """A captured model with groups of operators, ready for cost tables.

    Attributes:
        captured: the capture, if available.
        micro: group -> its split along the micro-batch axis (unsplit if micro-batches are refused).
        refusal: the reason why the model cannot run in micro-batches, or "".
    """

    captured: Capture | None
    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    refusal: str = ""

    @property
    def batch(self) -> int:
        """The global batch size: the size of dim 0 of the first input that is not a scalar."""
        operators = self.graph.atoms.graph
        shapes = (operators.tensors[name].shape for name in operators.inputs)
        return next((shape[0] for shape in shapes if shape), 1)

    @cached_property
    def sequence(self) -> dict[str, str]:
        """Group -> name of the loop that is split to split the sequence, for groups with such a loop."""
        labels = {name: s.label for name, s in sequence_strategies(self.graph).items()}
        return {name: str(label) for name, label in labels.items() if label not in (WHOLE, PASSED_ON)}

    @property
    def parameter_keys(self) -> dict[str, str]:
        """Name of a parameter in the graph -> its name in the model."""
        return {t.name: str(t.key) for t in self.graph.atoms.graph.parameters}


def prepare(captured: Capture, kept: Kept | None = None, expert_imbalance: float = 1.0) -> Problem:
    """Group the operators of a captured model, and find how micro-batches split them.

    Args:
        kept: a store of the splits of operators without a sharding rule, which are found by running them.
        expert_imbalance: rows of the busiest expert-parallel rank, divided by the mean over ranks.
    """
    graph = replace(captured.graph, expert_imbalance=expert_imbalance)
    return prepare_graph(graph, captured, kept)


def prepare_graph(
    operators: OperatorGraph, captured: Capture | None = None, kept: Kept | None = None
) -> Problem:
    """Group the operators of a graph.

    Args:
        kept: a store of the splits of operators without a sharding rule, which are found by running them.

    Raises:
        TensorOptError: the graph has no operators.
    """
    if not operators.operators:
        raise TensorOptError(
            "the model computes nothing that could be split or placed: what it returns is an input, a "
            "parameter or a constant; pass a module whose forward computes the loss or the outputs"
        )
    graph = group_operators(refine_graph(operators, kept))
    try:
        return Problem(captured, graph, micro_batch_strategies(graph))
    except MicroBatchRefused as refusal:
        whole = {g.name: g.unsplit for g in graph.groups}
        return Problem(captured, graph, whole, str(refusal))


def offered_regions(problem: Problem, settings: Settings) -> tuple[Region, ...]:
    """Return the repeated blocks that the search may recompute."""
    return find_regions(problem.graph) if settings.recompute == "auto" else ()


def micro_batch_counts(problem: Problem, settings: Settings) -> tuple[int, ...]:
    """Return the numbers of micro-batches to search; TensorOptError if a requested one is impossible."""
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
    """Return each group's configuration on a single device, with its workload, memory and FLOP."""
    return make_templates(graph, (1,), {g.name: g.unsplit for g in graph.groups}, facts_of)


def shares_of_flops(graph: GroupGraph, whole: Mapping[str, Template]) -> tuple[float, float]:
    """Return the share of forward FLOP in groups whose operators all have sharding rules, and the share in
    splittable groups.

    Args:
        whole: the groups, unsplit; a splittable one can be split along two or more dims.
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


def parallelism(graph: GroupGraph, whole: Mapping[str, Template]) -> float:
    """Return the forward FLOP of all groups, divided by those of the longest chain of dependent groups."""
    until: dict[str, float] = {}
    total = longest = 0.0
    for group in graph.groups:
        flops = whole[group.name].facts[0].forward_flops
        end = flops + max((until.get(name, 0.0) for name in group.reads), default=0.0)
        until.update(dict.fromkeys(group.writes, end))
        total, longest = total + flops, max(longest, end)
    return total / longest if longest else 1.0


_GRADIENTS_OF_A_PRODUCT = 2.0
"""The FLOP of a product's gradients, relative to forward; more in backward is recomputation."""


def model_flops(
    whole: Iterable[Template],
    facts_of: Callable[[Workload], Facts],
    device_type: str,
    kernels: KernelSettings,
) -> dict[str, float]:
    """Return the FLOP of one step of the unsplit model by number format, multiply-adds counted as two.

    Formats are those of device kinds (``float32``, ``bfloat16``), and ``tf32`` where PyTorch's settings allow
    it.

    Args:
        whole: the groups, unsplit.
        facts_of: a function from a workload to its memory and FLOP, in training or inference.
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
    calls = tuple((_seeing_all(call), outputs) for call, outputs in work.calls)
    return work if calls == work.calls else replace(work, calls=calls)


def _seeing_all(call: LocalCall) -> LocalCall:
    is_causal = call.function == ATTENTION and call.args[5:6] == (True,)
    return replace(call, args=(*call.args[:5], False, *call.args[6:])) if is_causal else call
