"""Which stages may have their backward taken apart: first gradients of what arrived, later those of
parameters.

PyTorch's split backward (``torch.distributed.pipelining._backward``, 2.13) knows the nodes of autograd's
graph on a way from what arrived to what departs. For each parameter it looks for the first of these above it,
keeps the gradients that come to them, and goes on from there later. It finds a gradient whole where there is
exactly one such node. Where there are several it gave wrong ones, and it never sees what goes to the results
beside all of them, such as a transposed weight that departs for a later stage: that gradient is lost. Neither
is an error there, so that it is decided here, by the stage's graph.
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
    """A parameter whose gradient a backward that is taken apart does not find.

    Attributes:
        why: what happens to it, in words that follow its name.
    """

    parameter: str
    why: str


def check_apart(schedule: str, number: int, graph: GroupGraph) -> None:
    """Refuse a stage whose backward cannot be taken apart.

    Args:
        number: of the stage. The first one's backward is not taken apart, as nobody waits for what it would
            give back.

    Raises:
        PlanError: says which parameter is in the way.
    """
    if number and (unfit := unfit_parameter(graph)) is not None:
        raise PlanError(
            f"the schedule {schedule} takes backward apart, where PyTorch finds the gradient of a parameter "
            f"if one operator alone brings it together with what arrived; of {unfit.parameter} in stage "
            f"{number}, {unfit.why}; use 1f1b or interleaved_1f1b"
        )


def unfit_parameter(graph: GroupGraph) -> Unfit | None:
    """A parameter of a stage, any but the first, that cannot have its gradient apart; None of most stages."""
    number = id(graph)
    known = _KNOWN.get(number)
    if known is None or known[0]() is not graph:
        # An id may be used again after the graph is gone.
        found = _Ways(graph).unfit()
        known = weakref.ref(graph, lambda _: _KNOWN.pop(number, None)), found
        _KNOWN[number] = known
    return known[1]


_KNOWN: dict[int, tuple[weakref.ref[GroupGraph], Unfit | None]] = {}
_MEETINGS: dict[Hashable, int] = {}
"""By what an operator computes how many of its nodes meet its operands (:func:`_meetings`)."""


class _Ways:
    """The ways of gradients through one stage."""

    def __init__(self, graph: GroupGraph):
        self.graph, self.source = graph, graph.atoms.graph
        self.tensors = self.source.tensors
        self.readers: dict[str, list[Operator]] = {}
        # What depends on something that arrived and takes a gradient back to it.
        self.carried = set[str]()
        for op in self.source.operators:
            for name in dict.fromkeys(op.inputs()):
                self.readers.setdefault(name, []).append(op)
            grown = self._grown(op)
            if op.target == ARRIVE or not self.carried.isdisjoint(op.inputs()):
                self.carried.update(grown)

    def _grown(self, op: Operator) -> list[str]:
        """Results of an operator that have a gradient."""
        return [name for name in op.outputs if self.tensors[name].requires_grad]

    def unfit(self) -> Unfit | None:
        """The first parameter that is no good."""
        for tensor in self.source.parameters:
            if tensor.requires_grad and (why := self._why_not(tensor.name)):
                return Unfit(tensor.name, why)
        return None

    def _why_not(self, parameter: str) -> str:
        """What is wrong with a parameter; empty of one that is fine."""
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
        """How many nodes that autograd makes of an operator are the first to meet something of ``made``."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(op.inputs()))}
        looks = [(n in made, n in self.carried, self.tensors[n]) for n in numbers]
        # By number instead of name, so that alike operators of all layers are one.
        given = [repr(map_refs(each, numbers.__getitem__)) for each in (op.args, *op.kwargs.values())]
        of_operands = tuple((m, c, t.shape, t.dtype, t.requires_grad) for m, c, t in looks)
        key = op.target, *given, *op.kwargs, of_operands
        if key not in _MEETINGS:
            _MEETINGS[key] = self._probed(op, made)
        return _MEETINGS[key]

    def _probed(self, op: Operator, made: Collection[str]) -> int:
        """The same, counted in autograd's graph of the operator's call on tensors without memory."""
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
            # A node of its own for each operand, which everything that reads it is behind.
            given = {name: leaf.view_as(leaf) for name, leaf in leaves.items()}
            args, kwargs = call.arguments(given.__getitem__)
            result = bind(call, SingleDevice())(*args, **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        roots = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        own = [given[name].grad_fn for name in given if name in made]
        carried = [given[name].grad_fn for name in given if name in self.carried]
        return _first_to_meet(roots, own, carried)


def _first_to_meet(roots: Sequence[object], own: Sequence[object], carried: Sequence[object]) -> int:
    """How many nodes on the ways up from ``carried`` are the first on ways up from ``own``."""
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
