"""Replacement of each operator that stands for a block with a copy of the traced block's nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tensoropt.capture.blocks.likeness import stored_tensors
from tensoropt.capture.blocks.tracing import OPS, Traced, TracedBlocks, Unlike


def write_out(blocks: TracedBlocks, exported: torch.export.ExportedProgram) -> None:
    """Replace every operator that stands for a block with the nodes of the traced block.

    Args:
        exported: a functional and decomposed program, whose graph is changed in place.

    Raises:
        Unlike: the trace of a block cannot represent another block of equal structure.
    """
    graph = exported.graph
    stored = _Stored.of(blocks.model, exported)
    marks: dict[Any, dict[int, fx.Node]] = {OPS.enter: {}, OPS.leave: {}, OPS.repeat: {}}
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in marks:
            marks[packet][_arguments(node)[1]] = node
    bodies = {
        traced.number: _Body(traced, marks[OPS.enter].get(traced.number), leave, stored)
        for traced in blocks.traced
        if (leave := marks[OPS.leave].get(traced.number)) is not None
    }
    for traced in blocks.traced:
        if traced.confirms is not None and traced.number in bodies:
            first = bodies[traced.confirms.number]
            if not bodies[traced.number].computes_as(first, stored):
                raise Unlike(traced.block.likeness, "computes something else the second time")
    paths = {id(module): path for path, module in blocks.model.named_modules()}
    for number, repeat in marks[OPS.repeat].items():
        block, operands = blocks.called[number], _arguments(repeat)[2]
        if operands not in bodies:
            raise Unlike(block.likeness, "nothing reads what the traced one returns")
        _exchange(repeat, bodies[operands].copied(repeat, stored, block.module, paths))
    for node in (*marks[OPS.enter].values(), *marks[OPS.leave].values()):
        _exchange(node, _arguments(node)[0])


@dataclass(frozen=True)
class _Stored:
    """The placeholder nodes of a model's parameters and buffers.

    Attributes:
        name_of: name of the parameter or buffer, by placeholder.
        changed: names of the buffers that the program changes.
        node_of: placeholder by ``id`` of the model's tensor; tied tensors share one placeholder.
    """

    name_of: Mapping[fx.Node, str]
    changed: frozenset[str]
    node_of: Mapping[int, fx.Node]

    @classmethod
    def of(cls, model: nn.Module, exported: torch.export.ExportedProgram) -> _Stored:
        signature = exported.graph_signature
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        nodes = {
            spec.target: node
            for node, spec in zip(placeholders, signature.input_specs, strict=True)
            if spec.kind.name in ("PARAMETER", "BUFFER")
        }
        node_of = {id(tensor): nodes[name] for name, tensor in stored_tensors(model) if name in nodes}
        changed = frozenset(signature.buffers_to_mutate.values())
        return cls({node: name for name, node in nodes.items()}, changed, node_of)

    def counterparts(self, module: nn.Module, other: nn.Module) -> dict[fx.Node, fx.Node]:
        """Map each placeholder of ``module``'s parameters and buffers to ``other``'s of the same name."""
        pairs = zip(stored_tensors(module), stored_tensors(other), strict=True)
        return {self.node_of[id(a)]: self.node_of[id(b)] for (_, a), (_, b) in pairs if id(a) in self.node_of}


class _Body:
    """The computation of a traced block.

    Attributes:
        nodes: the nodes on which the block's outputs depend, in execution order.

    Raises:
        Unlike: the block reads other tensors than its inputs and stored tensors, changes a stored tensor, or
            has results that are read outside but are no outputs.
    """

    def __init__(self, traced: Traced, enter: fx.Node | None, leave: fx.Node, stored: _Stored):
        self.traced = traced
        self.given = list(enter.users) if enter is not None else []
        self.leave = leave
        inside: set[fx.Node] = set(self.given)
        needed = set(leave.all_input_nodes)
        nodes: list[fx.Node] = []
        node = leave.prev
        while node is not enter and node.op != "placeholder":
            if node not in inside:
                inside.add(node)
                if node in needed:
                    nodes.append(node)
                    needed.update(node.all_input_nodes)
            node = node.prev
        self.nodes = nodes[::-1]
        likeness = traced.block.likeness
        for outer in needed - inside - {enter}:
            name = stored.name_of.get(outer)
            if name is None:
                raise Unlike(likeness, f"reads {outer.name}, which it is not given")
            if name in stored.changed:
                raise Unlike(likeness, f"changes {name}")
        for inner in inside:
            if any(user not in inside and user is not leave for user in inner.users):
                raise Unlike(likeness, f"{inner.name} is read outside it")

    def computes_as(self, other: _Body, stored: _Stored) -> bool:
        """Return whether this block computes the same as ``other``, apart from the parameters and buffers it
        reads."""
        if len(self.nodes) != len(other.nodes):
            return False
        own = dict(zip(other.nodes, self.nodes, strict=True))
        # Inputs come in the same order; an input that is not read has no node.
        inputs = {_arguments(node)[1]: node for node in self.given}
        own |= {node: inputs[_arguments(node)[1]] for node in other.given if _arguments(node)[1] in inputs}
        own |= stored.counterparts(other.traced.block.module, self.traced.block.module)

        def same(first: fx.Node, second: fx.Node) -> bool:
            moved = fx.map_arg((second.args, second.kwargs), lambda node: own.get(node, node))
            return first.target == second.target and repr((first.args, first.kwargs)) == repr(moved)

        pairs = zip(self.nodes, other.nodes, strict=True)
        return all(same(*pair) for pair in pairs) and (
            repr(_arguments(self.leave)[0])
            == repr(fx.map_arg(_arguments(other.leave)[0], lambda node: own.get(node, node)))
        )

    def copied(
        self, repeat: fx.Node, stored: _Stored, module: nn.Module, paths: Mapping[int, str]
    ) -> list[fx.Node]:
        """Insert copies of the block's nodes before ``repeat``, which read ``module``'s parameters and
        buffers; return the copied outputs. ``paths`` has the name of each module, by ``id``."""
        counterparts = stored.counterparts(self.traced.block.module, module)
        new = {node: _arguments(repeat)[0][_arguments(node)[1]] for node in self.given}
        before, after = paths[id(self.traced.block.module)], paths[id(module)]

        def moved(node: fx.Node) -> fx.Node:
            return new[node] if node in new else counterparts.get(node, node)

        with repeat.graph.inserting_before(repeat):
            for node in self.nodes:
                new[node] = copy = repeat.graph.node_copy(node, moved)
                copy.meta = {**node.meta, "nn_module_stack": _stack(node, before, after)}
        return [moved(node) for node in _arguments(self.leave)[0]]


def _exchange(marker: fx.Node, values: Sequence[fx.Node]) -> None:
    for result in list(marker.users):
        assert result.target is operator.getitem
        result.replace_all_uses_with(values[_arguments(result)[1]])
        result.graph.erase_node(result)
    marker.graph.erase_node(marker)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _stack(node: fx.Node, before: str, after: str) -> dict[str, Any]:
    def path(old: str) -> str:
        return after + old.removeprefix(before) if old == before or old.startswith(before + ".") else old

    stack = node.meta.get("nn_module_stack") or {}
    return {key: (path(where), cls) for key, (where, cls) in stack.items()}
