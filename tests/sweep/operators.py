"""One sample of PyTorch's own operator tests: captured, split in every way that is offered, and compared.

A sample goes the way of a user's model. What is checked of each of its operators: outputs, gradients and
their placements on thread ranks (:func:`tests.sharding.graph_check.check_graph`, on the sample's own values),
what its workload keeps beside a run on real tensors, and whether discovery finds a split that the rule leaves
out. The whole sample then runs on the executor's ranks with random strategies.
"""

from __future__ import annotations

import itertools
import random
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tensoropt.capture import capture
from tensoropt.capture.steps import largest_of
from tensoropt.engine.models import model_values
from tensoropt.errors import CaptureError
from tensoropt.graph import OperatorGraph
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.registry import bind
from tensoropt.profiling.fact_finding import _Probe, find_facts
from tensoropt.profiling.workload import random_tensor, workload
from tensoropt.sharding.atoms import AtomGraph, refine_graph
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.sharding.discovery.discover import signature
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.engine.threads import largest_differences, step, unsplit_engine
from tests.sharding.graph_check import check_graph, missing_splits

SIZE = 6
"""What PyTorch's samples call S, and set to 5, which neither two nor three ranks divide."""
WITHIN = 0.03
"""How far predicted bytes may be from those of a real run."""
FAR = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
"""What the executor may be off in these precisions; samples are small numbers, some badly conditioned."""
PARTS = (2, 3)
SKIPPED = {
    "as_strided.partial_views": "reads beside its tensor in a larger storage, of which no graph knows",
    "_segment_reduce.offsets": "PyTorch's own kernel ends the process on a sample",
}
"""Operators that are left out, and why."""
FEWEST_BYTES = 64
"""What two figures may differ by in any case: samples are small."""
MOST_SAMPLES = 400
"""Of an operator that are drawn; a few have more, in all pairings of their arguments."""
MOST_ELEMENTS = 1 << 12
"""Of a sample's tensor: larger ones are there to test kernels."""


@dataclass
class Seen:
    """What needs no second look in this process: calls that were split, compared with discovery, and run."""

    splits: set[Any] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    works: set[str] = field(default_factory=set)


@dataclass
class Found:
    """What became of a sample.

    Attributes:
        targets: what was checked of each operator: how many splits were run, and how many are offered.
        incorrect: what is wrong, in lines.
        missing: why an operator has no split, or which one is left out.
        unrun: calls that do not run on random operands, whose memory is not compared.
        refused: why the sample became no graph.
    """

    targets: dict[str, list[int]] = field(default_factory=dict)
    incorrect: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    unrun: list[str] = field(default_factory=list)
    refused: str = ""


class Around(nn.Module):
    """A function around a sample: every floating-point tensor is a product of an input and a parameter, or a
    parameter alone, as which it may be cut unevenly; all others are inputs.

    Attributes:
        largest: of its gradients, by which the loss is divided; infinite if not all are finite.
    """

    def __init__(self, function: Any, arguments: Any, learns: bool, alone: bool):
        super().__init__()
        self.function, self.learns, self.alone, self.largest = function, learns, alone, 1.0
        self.leaves, self.spec = tree_flatten(arguments)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        values = {i: self.leaves[i].detach() for i in self.places}
        self.learning = {
            i for i, value in values.items() if learns and (value.is_floating_point() or value.is_complex())
        }
        held = {i: values[i].clone() if alone else torch.ones_like(values[i]) for i in self.learning}
        self.held = nn.ParameterDict({f"w{i}": nn.Parameter(value) for i, value in held.items()})
        self.inputs = tuple(values[i] for i in self.places if not (alone and i in self.learning))

    @property
    def like(self) -> tuple[bool, bool]:
        """How it is captured, and whether the executor's gradients are compared."""
        return self.learns, self.largest < torch.inf

    def forward(self, *inputs: torch.Tensor) -> Any:
        given, leaves = iter(inputs), list(self.leaves)
        for i in self.places:
            leaves[i] = 1.0 if self.alone and i in self.learning else next(given)
            if i in self.learning:
                # A product even if it is alone: operators of the middle of a model have activations.
                leaves[i] = self.held[f"w{i}"] * leaves[i]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Together(nn.Module):
    """Several samples as one model: it is captured in a third of the time."""

    def __init__(self, parts: Sequence[Around]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.learns = parts[0].learns
        self.inputs = tuple(value for part in parts for value in part.inputs)

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = iter(inputs)
        return [part(*itertools.islice(given, len(part.inputs))) for part in self.parts]

    def loss(self, outputs: Any) -> torch.Tensor:
        """Each sample's with a largest gradient of one, so that none hides what is wrong with another."""
        parts = zip(self.parts, outputs, strict=True)
        return sum((weighted(output, part.largest) for part, output in parts), torch.zeros(()))


def weighted(output: Any, divided_by: float = 1.0) -> torch.Tensor:
    """A loss with another gradient for every element."""
    total = torch.zeros(())
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            parts = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            weights = torch.linspace(0.5, 1.5, max(parts.numel(), 1))[: parts.numel()]
            total = total + (parts.float() * (weights / divided_by).reshape(parts.shape)).sum()
    return total


def operators() -> list[Any]:
    """PyTorch's table of operators with their samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [info for info in op_db if name_of(info) not in SKIPPED]


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def samples(info: Any, dtype: torch.dtype, most: int) -> dict[int, Any]:
    """Some of an operator's samples by number, from the first to the last."""
    made = _drawn(info, dtype, MOST_SAMPLES)
    count = min(most, len(made))
    return {n: made[n] for n in (round(i * (len(made) - 1) / max(count - 1, 1)) for i in range(count))}


def sample_of(info: Any, dtype: torch.dtype, number: int) -> Any:
    return _drawn(info, dtype, number + 1)[number]


def _drawn(info: Any, dtype: torch.dtype, count: int) -> list[Any]:
    def made() -> list[Any]:
        torch.manual_seed(0)
        drawn = info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
        return list(itertools.islice(drawn, count))

    with warnings.catch_warnings(), ExitStack() as sized:
        warnings.simplefilter("ignore")
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.testing._internal") and isinstance(getattr(module, "S", None), int):
                sized.enter_context(mock.patch.object(module, "S", SIZE))
        try:
            return made()
        except Exception:  # a few have their sizes written out
            sized.close()
            return made()


def check_sample(
    info: Any, sample: Any, number: int, seen: Seen | None = None, *, compare: bool = True
) -> Found:
    """Capture a sample and check it.

    Args:
        number: decides how it enters the model, and the random strategies.
        compare: whether discovery looks for splits that rules leave out.
    """
    model = model_of(info, sample, number)
    if isinstance(model, str):
        return Found(refused=model)
    return check_models([model], number, seen, compare=compare)


def model_of(info: Any, sample: Any, number: int) -> Around | str:
    """A sample as a model, or why there is none."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(t.layout != torch.strided for t in tensors):
        return "the sample has sparse tensors"
    if any(t.numel() > MOST_ELEMENTS for t in tensors):
        return f"the sample has over {MOST_ELEMENTS} elements"
    empty = any(not t.numel() for t in tensors)
    plain = number % 4 == 3 and not (empty and info.supports_autograd)
    if plain and all(t.dim() for t in tensors):
        sample = sample.noncontiguous()
    arguments = (sample.input, *sample.args), sample.kwargs
    torch.manual_seed(number)
    try:
        results = tree_leaves(info.op(*arguments[0], **arguments[1]))
        learns = not plain and any(isinstance(r, torch.Tensor) and r.requires_grad for r in results)
        model = Around(info.op, arguments, learns, empty or number % 2 == 0)
        if learns:
            weighted(model(*model.inputs)).backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            finite = all(torch.isfinite(g).all() for g in gradients.values())
            model.largest = (largest_of(gradients.values()) or 1.0) if finite else torch.inf
            model.zero_grad()
    except Exception as error:  # the operator's own: not a sample for a CPU
        return f"the sample does not run: {_first_line(error)}"
    return model


def check_models(
    parts: Sequence[Around], number: int, seen: Seen | None = None, *, compare: bool = True
) -> Found:
    """Capture samples as one model and check it: samples that have the same :attr:`Around.like`."""
    model, seen = Together(parts), seen or Seen()
    found, learns = Found(), model.learns
    torch.manual_seed(number)
    try:
        how = {"loss": model.loss} if learns else {"mode": "inference"}
        captured = capture(model, model.inputs, **how)
        atoms = refine_graph(captured.graph)
        values = _values(atoms.graph, model_values(captured), model.inputs)
        _check_splits(found, replace(atoms, graph=replace(atoms.graph, constants=values)), seen.splits)
        if compare:
            for op in atoms.graph.operators:
                if (call := signature(op, captured.graph)) not in seen.compared:
                    seen.compared.add(call)
                    for split in missing_splits(op, captured.graph):
                        found.missing.setdefault(op.target, f"discovery splits {split}")
        graph = group_operators(atoms)
        _check_memory(found, graph, learns, seen.works)
        if learns and all(part.largest < torch.inf for part in model.parts):
            _check_strategies(found, graph, model_values(captured), model, number)
    except CaptureError as error:
        return Found(refused=_first_line(error))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        found.incorrect.append(f"{Path(at.filename).name}:{at.lineno} {_first_line(error)}")
    return found


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _values(
    graph: OperatorGraph, held: Mapping[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Every tensor of the graph, run operator by operator."""
    # A constant of equal elements is kept as one of them.
    values = {name: value.expand(graph.tensors[name].shape) for name, value in graph.constants.items()}
    values |= {name: value.detach() for name, value in held.items()}
    values |= dict(zip(graph.inputs, inputs, strict=True))

    with torch.no_grad():
        for op in graph.operators:
            call = LocalCall(op.target, op.args, op.kwargs, op.name)
            args, kwargs = call.arguments(values.__getitem__)
            result = bind(call, SingleDevice())(*args, **kwargs)
            parts = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
            # As ranks have them: a view of what does not lie in one piece is a reshape there.
            values |= {n: part.contiguous() for n, part in zip(op.outputs, parts, strict=False)}
    return values


def _check_splits(found: Found, atoms: AtomGraph, seen: set[Any]) -> None:
    report = check_graph(atoms, parts=PARTS, seen=seen)
    found.incorrect += map(str, report.mismatches)
    for op in atoms.graph.operators:
        space = atoms.spaces[op.name]
        counts = found.targets.setdefault(op.target, [0, 0])
        counts[0] += 1
        counts[1] += sum(dim.splittable for dim in space.dims)
        if not any(dim.splittable for dim in space.dims) and op.name in atoms.discovered:
            found.missing.setdefault(
                op.target, atoms.discovered[op.name].refused or "discovery finds no split"
            )


def _check_memory(found: Found, graph: GroupGraph, training: bool, seen: set[str]) -> None:
    """What workloads keep, and their peaks, on fake tensors and on real ones."""
    micro = micro_strategies(graph, 1)
    for group in graph.groups:
        offered = enumerate_configurations(graph.atoms, group, (1, 2), micro[group.name])
        for configuration in {offered[0].labels: offered[0], offered[-1].labels: offered[-1]}.values():
            work = workload(graph, configuration, (1, 2))
            if work.key in seen:
                continue
            seen.add(work.key)
            predicted = find_facts(work, training)
            operands = {name: random_tensor(spec) for name, spec, _ in work.inputs}
            try:
                real = _Probe(work, operands, training).observe()
            except Exception:
                found.unrun.append(work.describe())
                continue
            for name in ("kept_bytes", "forward_peak_bytes", "backward_peak_bytes"):
                said, had = getattr(predicted, name), getattr(real, name)
                if abs(said - had) > max(WITHIN * had, FEWEST_BYTES):
                    where = f"{work.describe()} {configuration.labels}"
                    found.incorrect.append(f"{where}: {name} {said} for {had}")


def _check_strategies(
    found: Found, graph: GroupGraph, values: Mapping[str, torch.Tensor], model: Together, seed: int
) -> None:
    whole = step(unsplit_engine(graph, values), model.inputs)
    rng, micro = random.Random(seed), micro_strategies(graph, 1)
    allowed = max(FAR.get(value.dtype, FAR[torch.float32]) for value in (*values.values(), *model.inputs))
    for parts in PARTS:
        strategy = random_strategy(graph, (1, parts), micro, rng)
        loss, gradient, worst = largest_differences(strategy, values, model.inputs, whole)
        # The loss is the sum of those of all samples.
        if max(loss * len(model.parts), gradient) > allowed:
            chosen = {n: c.labels for n, c in strategy.configurations.items()}
            found.incorrect.append(f"{parts} ranks: loss {loss:.1e}, {worst} {gradient:.1e} off: {chosen}")
