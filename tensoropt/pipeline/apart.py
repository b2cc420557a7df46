"""Which stages can have their backward taken apart: first the gradients of what arrived, later those of the
parameters.

PyTorch's split backward (``torch.distributed.pipelining._backward``, 2.13) knows the nodes of autograd's
graph on a path from what arrived to what departs. For each parameter it looks for the first of these nodes
above it, keeps the gradients that reach them, and continues from there later. It finds the whole gradient if
there is exactly one such node. With several nodes it gave wrong gradients, and it never sees what reaches the
results without passing any of them, such as a transposed weight that departs for a later stage: that gradient
is lost. PyTorch raises no error in either case, so the decision is made here, from the stage's graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.errors import PlanError
from tensoropt.graph import Operator, map_refs
from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.context import SingleDevice
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.localise import localise
from tensoropt.ops.registry import bind
from tensoropt.sharding.groups import GroupGraph


@dataclass(frozen=True)
class Unfit:
    """A parameter whose gradient is not found by a backward that is taken apart.

    Attributes:
        why: what happens to it, in words that follow its name.
    """

    parameter: str
    why: str


def check_apart(schedule: str, number: int, graph: GroupGraph) -> None:
    """Refuse a stage whose backward cannot be taken apart.

    Args:
        number: the stage's number. The first stage's backward is not taken apart, as nobody waits for the
            gradients that it would return.

    Raises:
        PlanError: a parameter prevents it; the message names the parameter.
    """
    if number and (unfit := unfit_parameter(graph)) is not None:
        raise PlanError(
            f"the schedule {schedule} takes backward apart, where PyTorch finds the gradient of a parameter "
            f"if one operator alone brings it together with what arrived; of {unfit.parameter} in stage "
            f"{number}, {unfit.why}; use 1f1b or interleaved_1f1b"
        )


def unfit_parameter(graph: GroupGraph) -> Unfit | None:
    """Return a parameter of a stage (any but the first) whose gradient cannot be made apart; None for most
    stages."""
    number = id(graph)
    known = _KNOWN.get(number)
    if known is None or known[0]() is not graph:
        # An id may be reused after the graph is gone.
        found = _Ways(graph).unfit()
        known = weakref.ref(graph, lambda _: _KNOWN.pop(number, None)), found
        _KNOWN[number] = known
    return known[1]


_KNOWN: dict[int, tuple[weakref.ref[GroupGraph], Unfit | None]] = {}
_MEETINGS: dict[Hashable, int] = {}
"""How many of an operator's nodes meet its operands (:func:`_meetings`), by what the operator computes."""


class _Ways:
    """The paths that gradients take through one stage."""

    def __init__(self, graph: GroupGraph):
        self.graph, self.source = graph, graph.atoms.graph
        self.tensors = self.source.tensors
        self.readers: dict[str, list[Operator]] = {}
        # Tensors that depend on something that arrived and carry a gradient back to it.
        self.carried = set[str]()
        for op in self.source.operators:
            for name in dict.fromkeys(op.inputs()):
                self.readers.setdefault(name, []).append(op)
            grown = self._grown(op)
            if op.target == ARRIVE or not self.carried.isdisjoint(op.inputs()):
                self.carried.update(grown)

    def _grown(self, op: Operator) -> list[str]:
        """Return the results of an operator that have a gradient."""
        return [name for name in op.outputs if self.tensors[name].requires_grad]

    def unfit(self) -> Unfit | None:
        """Return the first parameter whose gradient cannot be made apart."""
        for tensor in self.source.parameters:
            if tensor.requires_grad and (why := self._why_not(tensor.name)):
                return Unfit(tensor.name, why)
        return None

    def _why_not(self, parameter: str) -> str:
        """Say why a parameter's gradient cannot be made apart; empty if it can."""
        made, waiting, meeting = {parameter}, [parameter], dict[str, Operator]()
        while waiting:
            for op in self.readers.get(waiting.pop(), ()):
                grown = self._grown(op)
                if not grown:
                    continue
                if not self.carried.isdisjoint(grown):
                    meeting[op.name] = op
                    continue
                if op.target == DEPART:
                    return f"{op.inputs()[0]}, which is made of it and of nothing that arrived, departs"
                if not set(grown).isdisjoint(self.source.outputs):
                    return "the loss is made of it and of nothing that arrived"
                new = [name for name in grown if name not in made]
                made.update(new)
                waiting += new
        count = sum(self._meetings(op, made) for op in meeting.values())
        if count > 1:
            names = ", ".join(meeting)
            return f"it is read {count} times (by {names}), itself or what is made of it"
        return ""

    def _meetings(self, op: Operator, made: Collection[str]) -> int:
        """Count the nodes that autograd makes for an operator and that are the first to meet something of
        ``made``."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(op.inputs()))}
        looks = [(n in made, n in self.carried, self.tensors[n]) for n in numbers]
        # By number instead of name, so that equal operators of all layers share an entry.
        given = [repr(map_refs(each, numbers.__getitem__)) for each in (op.args, *op.kwargs.values())]
        of_operands = tuple((m, c, t.shape, t.dtype, t.requires_grad) for m, c, t in looks)
        key = op.target, *given, *op.kwargs, of_operands
        if key not in _MEETINGS:
            _MEETINGS[key] = self._probed(op, made)
        return _MEETINGS[key]

    def _probed(self, op: Operator, made: Collection[str]) -> int:
        """Return the same count, taken from autograd's graph of the operator's call on tensors without
        memory."""
        group = self.graph.group_of[op.name]
        choices = (group.unsplit.choices[op.name],)
        call = localise(OperatorShard(op, self.graph.atoms, choices, (1,)))
        with FakeTensorMode(), torch.enable_grad():
            leaves = {
                name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)).requires_grad_(
                    tensor.requires_grad
                )
                for name in dict.fromkeys(op.inputs())
                for tensor in (self.tensors[name],)
            }
            # Each operand gets a node of its own, which comes before everything that reads it.
            given = {name: leaf.view_as(leaf) for name, leaf in leaves.items()}
            args, kwargs = call.arguments(given.__getitem__)
            result = bind(call, SingleDevice())(*args, **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        roots = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        own = [given[name].grad_fn for name in given if name in made]
        carried = [given[name].grad_fn for name in given if name in self.carried]
        return _first_to_meet(roots, own, carried)


def _first_to_meet(roots: Sequence[object], own: Sequence[object], carried: Sequence[object]) -> int:
    """Count the nodes on the paths up from ``carried`` that are also the first on the paths up from
    ``own``."""
    above: dict[object, list[object]] = {}
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        for below, _ in getattr(node, "next_functions", ()):
            if below is not None:
                above.setdefault(below, []).append(node)
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)

    def upwards(starts: Sequence[object], stop: Collection[object]) -> tuple[set[object], set[object]]:
        reached, met, left = set(starts), set[object](), list(starts)
        while left:
            for node in above.get(left.pop(), ()):
                if node in stop:
                    met.add(node)
                elif node not in reached:
                    reached.add(node)
                    left.append(node)
        return reached, met

    closure, _ = upwards([node for node in carried if node is not None], ())
    _, met = upwards([node for node in own if node is not None], closure)
    return len(met)
