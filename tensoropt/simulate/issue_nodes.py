"""The nodes that forward adds to autograd's graph, in order of creation, and what each node sends.

Operators come in the order of the graph, whatever their groups. Operand by operand, the first operator of a
group that needs a tensor brings it to the group, right before itself; the group's other operators then use
the same tensor. After the operator its partial sum is resolved, and a result with several readers is put
where they find it. Backward passes the nodes in reverse (:mod:`tensoropt.simulate.issue_order`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tensoropt.costs.effects import (
    GATHER,
    GATHER_AGAIN,
    GATHER_BACK,
    HUB,
    HUB_AGAIN,
    HUB_BACK,
    INNER,
    INNER_AGAIN,
    INNER_BACK,
    OUTPUT,
    OUTPUT_BACK,
    PARAMETERS,
    READ,
    READ_AGAIN,
    READ_BACK,
    USED_BACK,
    reader,
)
from tensoropt.costs.prices import Send
from tensoropt.costs.tables import leaves_model
from tensoropt.graph import Operator, iter_refs
from tensoropt.ops.localise import localise
from tensoropt.sharding.groups import Group
from tensoropt.simulate.step_sends import ParameterUse, StepSends, Ways

NOTHING = Ways()


class GatherBack(NamedTuple):
    """A gather for an operator's backward.

    Attributes:
        behind: the number of the operator's own gradients that are delivered before it: an operator with
            several layers has one autograd node for each.
    """

    send: Send
    behind: int


@dataclass(eq=False, kw_only=True)
class Node:
    """An operator, a tensor's move from one layout to another, or the beginning of a block in forward.

    Attributes:
        sends: what it sends; for an operator, what its own kernels send.
        after: the nodes whose results it uses.
        region: the recomputed region that it runs in.
        gathers_back: what its backward gathers before its kernels send, because autograd does not keep it.
        delivers: the parameters to whose leaves, or copies, it delivers a gradient, in order.
        leaves_behind: the use whose gradient it hands over, to be scattered with others of the block.
        begins: the block that begins in forward.
        begins_back: the block that begins when backward reaches this node.
        keeps: whether its backward needs more than the gradient.
    """

    sends: Ways = NOTHING
    after: tuple[Node, ...] = ()
    region: str | None = None
    gathers_back: tuple[GatherBack, ...] = ()
    delivers: tuple[str, ...] = ()
    leaves_behind: ParameterUse | None = None
    begins: int | None = None
    begins_back: int | None = None
    keeps: bool = False


def forward_nodes(sends: StepSends) -> list[Node]:
    """Return all nodes of a strategy's forward, in the order in which they run."""
    return list(_regions_together(_Forward(sends).nodes()))


class _Forward:
    """The nodes as lowering creates them, and what has been made and brought so far."""

    def __init__(self, sends: StepSends):
        self.sends, self.strategy, self.graph = sends, sends.strategy, sends.graph
        self.source = self.graph.atoms.graph
        self._inside = {group.name: sends.inside(group) for group in self.graph.groups}
        # The tensor whose gradient is reduced in an operator's backward, by operator.
        self._beside = {product.operator: name for name, (product, _) in self.strategy.reduced_beside.items()}
        self._nodes: list[Node] = []
        self._made: dict[str, Node] = {}
        self._brought: dict[tuple[str, str], Node | None] = {}
        self._begun = -1

    def nodes(self) -> list[Node]:
        for op in self.source.operators:
            group = self.graph.group_of[op.name]
            region = self.strategy.region_of.get(group.name)
            self._begin(self.strategy.blocks.of[group.name])
            self._operator(op, group, None if region is None else region.name)
        for name in dict.fromkeys((*self.source.outputs, *self.source.mutations.values())):
            if name in self._made and leaves_model(self.graph, name):
                moments = self.sends.tensor(name)
                self._add(sends=Ways(moments.at(OUTPUT), (), moments.at(OUTPUT_BACK)), after=self._made[name])
        return self._nodes

    def _add(
        self, *, sends: Ways, after: Node | None = None, region: str | None = None, delivers: str = ""
    ) -> Node:
        """Add a node for a tensor on its way."""
        node = Node(sends=sends, after=() if after is None else (after,), region=region)
        if delivers:
            node.delivers = (delivers,)
        self._nodes.append(node)
        return node

    def _begin(self, block: int) -> None:
        self._nodes += [Node(begins=number) for number in range(self._begun + 1, block + 1)]
        self._begun = max(self._begun, block)

    # -- operators ----------------------------------------------------------------------------------

    def _operator(self, op: Operator, group: Group, region: str | None) -> None:
        configuration, blocks = self.strategy.configurations[group.name], self.strategy.blocks
        call = localise(configuration.placed(op.name, self.graph.atoms, self.strategy.mesh, None))
        # In the order of the rank's kernel, which may differ from that of the graph's operator.
        names = tuple(dict.fromkeys(iter_refs((call.args, tuple(call.kwargs.values())))))
        operands = [self._operand(name, group, region) for name in names]
        resolving, own = self._inside[group.name]
        ways = own[op.name].ways(INNER, INNER_AGAIN, INNER_BACK)
        if (read := self._beside.get(op.name)) is not None:
            # The gradient of its input is reduced before its weight's is computed.
            ways = ways._replace(back=(*ways.back, *self.sends.tensor(read).at(reader(0, USED_BACK))))
        node = Node(
            sends=ways,
            after=tuple(operand for operand in operands if operand is not None),
            region=region,
            gathers_back=tuple(self._gathered_back(op, group, names)),
            delivers=self._delivered(group, names),
            keeps=self._keeps(op),
        )
        self._nodes.append(node)
        self._made.update(dict.fromkeys(op.outputs, node))
        if configuration.resolved is not None and configuration.resolved[0] in op.outputs:
            ways = resolving.ways(INNER, INNER_AGAIN, INNER_BACK)
            node = self._made[configuration.resolved[0]] = self._add(sends=ways, after=node, region=region)
        block = blocks.of[group.name]
        if group.name == blocks.last[block] and op is group.operators[-1] and self._learns(op):
            node.begins_back = block
        for name in op.outputs:
            if name in self.strategy.hubs:
                ways = self.sends.tensor(name).ways(HUB, HUB_AGAIN, HUB_BACK)
                self._made[name] = self._add(sends=ways, after=self._made[name], region=region)

    def _gathered_back(self, op: Operator, group: Group, names: tuple[str, ...]) -> Iterator[GatherBack]:
        """Yield what the backward of an operator gathers again, in the order in which it needs it."""
        order, made = self.sends.reads_back(group), self.sends.made_back(group)
        delivered = [made[name] for name in self._delivered(group, names) if name in made]
        for name in sorted(names, key=lambda name: order.get(name, sys.maxsize)):
            if (use := ParameterUse(name, group.name)) not in self.sends.uses:
                continue
            gathers = self.sends.use(use).at(GATHER_BACK)
            readers = [one.name for one in group.operators if name in one.inputs()]
            # It is known how often a group's backward needs a parameter, but not in which of its operators:
            # each gets the same share, and the first one gets the remainder.
            share = len(gathers) // len(readers)
            rest = len(gathers) - share * len(readers) if op.name == readers[0] else 0
            behind = sum(run < order.get(name, 0) for run in delivered)
            yield from (GatherBack(send, behind) for send in gathers[: share + rest])

    def _delivered(self, group: Group, names: tuple[str, ...]) -> tuple[str, ...]:
        """The parameters that an operator reads as they are stored, in the order of their gradients."""
        order, found = self.sends.made_back(group), []
        for name in names:
            use = ParameterUse(name, group.name)
            if use in self.sends.uses and not self.sends.changes(use) and self.sends.delivers(use):
                found.append(name)
        return tuple(sorted(found, key=lambda name: order.get(name, sys.maxsize)))

    def _learns(self, op: Operator) -> bool:
        """Whether backward reaches an operator."""
        return any(self.source.tensors[name].requires_grad for name in op.outputs)

    def _keeps(self, op: Operator) -> bool:
        if not self._learns(op):
            return False
        reads_parameter = any(self.source.tensors[name].kind == "parameter" for name in op.inputs())
        return reads_parameter or not self.graph.atoms.spaces[op.name].linear

    # -- operands -----------------------------------------------------------------------------------

    def _operand(self, name: str, group: Group, region: str | None) -> Node | None:
        """The node that provides an operand; None for one that exists before the step."""
        kind = self.source.tensors[name].kind
        if kind == "activation" and name not in group.reads:
            return self._made[name]
        if kind not in ("activation", "parameter"):
            return None
        key = name, group.name
        if key not in self._brought:
            bring = self._parameter if kind == "parameter" else self._activation
            self._brought[key] = bring(name, group, region)
        return self._brought[key]

    def _activation(self, name: str, group: Group, region: str | None) -> Node:
        number = self.sends.reader(name, group.name)
        ways = self.sends.tensor(name).ways(*(reader(number, when) for when in (READ, READ_AGAIN, READ_BACK)))
        return self._add(sends=ways, after=self._made[name], region=region)

    def _parameter(self, name: str, group: Group, region: str | None) -> Node | None:
        use = ParameterUse(name, group.name)
        if not self.sends.changes(use):
            return None
        ways = self.sends.use(use).ways(GATHER, GATHER_AGAIN, PARAMETERS)
        if self.sends.leaves_behind(use):
            node = self._add(sends=ways, region=region)
            node.leaves_behind = use
            return node
        return self._add(sends=ways, region=region, delivers=name if self.sends.delivers(use) else "")


def _regions_together(nodes: list[Node]) -> Iterator[Node]:
    """Yield the nodes with those of each recomputed region together, after everything that any of them needs;
    otherwise in the given order."""
    members: dict[str, list[Node]] = {}
    for node in nodes:
        if node.region is not None:
            members.setdefault(node.region, []).append(node)
    done: set[Node] = set()

    def unit(node: Node) -> list[Node]:
        return [node] if node.region is None else members[node.region]

    for node in nodes:
        # Depth first with an explicit stack: a graph's chains are longer than Python's recursion allows.
        waiting = [unit(node)]
        while waiting:
            first = waiting[-1][0]
            missing = {
                unit(needed)[0]: None
                for member in waiting[-1]
                for needed in member.after
                if needed not in done and unit(needed)[0] is not first
            }
            if missing and first not in done:
                waiting += [unit(needed) for needed in reversed(missing)]
                continue
            together = waiting.pop()
            if first not in done:
                done.update(together)
                yield from together
