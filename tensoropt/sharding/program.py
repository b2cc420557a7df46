"""The program of a strategy: one rank's forward as a list of nodes, without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensoropt.graph import Operator, iter_refs
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout
from tensoropt.ops.localise import localise
from tensoropt.ops.registry import evaluated
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import Group, LinearProduct
from tensoropt.sharding.reshard.steps import ReshardingStep
from tensoropt.sharding.strategy import Edge, Strategy


@dataclass(frozen=True, eq=False)
class EdgeSteps:
    """A resharding (edge) with its collectives and local operations, compared by identity.

    Attributes:
        edge: the edge; if several groups share a prefetched parameter, the first group's.
        forward, backward: the steps of each direction; backward is empty without a gradient.
        casts: whether a parameter is cast before it moves, and its gradient afterwards.
        readers: the groups that share a prefetched parameter; otherwise the edge's reader.
        recomputed: whether the groups that share a prefetched parameter are recomputed.
        zigzag: the numbers of the atoms (factors of dims) in zig-zag order.
        gathered_again: whether backward repeats the forward steps.
    """

    edge: Edge
    forward: tuple[ReshardingStep, ...]
    backward: tuple[ReshardingStep, ...]
    casts: bool
    readers: tuple[str, ...]
    recomputed: bool = False
    zigzag: frozenset[int] = frozenset()
    gathered_again: bool = False

    @classmethod
    def of(
        cls, strategy: Strategy, edge: Edge, readers: tuple[str, ...] = (), *, recomputed: bool = False
    ) -> EdgeSteps:
        """Return the steps of a resharding (edge) for all ``readers`` that share its result; by default only
        the edge's own."""
        # An unsharded parameter was cast when it was gathered.
        unsharded = edge.kind == "parameter" and edge.tensor in strategy.unsharded
        casts = strategy.tensor(edge.tensor).master_dtype is not None and not unsharded
        zigzag = strategy.zigzag_atoms(edge.tensor)
        steps, again = strategy.steps(edge), strategy.gathers_again(edge)
        return cls(edge, *steps, casts, readers or (edge.reader,), recomputed, zigzag, again)


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One node of a program, compared by identity.

    Attributes:
        reads: tensor -> the node that provides it, in order.
        region: the name of the recomputed block to which the node belongs, or None.
        again: whether the block's second forward runs the node, too.
    """

    # Not in the repr, which would contain all earlier nodes.
    reads: Mapping[str, Node] = field(default_factory=dict, repr=False)
    region: str | None = None
    again: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Argument(Node):
    """An input, a parameter, a buffer or a constant, as the rank has it before the step."""

    name: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice(Node):
    """The rank's shard of a tensor that every rank has whole; ``zigzag``: its atoms (factors of dims) in
    zig-zag order."""

    layout: Layout
    mesh: AxisSizes
    zigzag: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False, kw_only=True)
class Detach(Node):
    """A parameter, detached from autograd for a use that gives it no gradient."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Move(Node):
    """A tensor, resharded along an edge.

    Attributes:
        steps: its steps, shared by all readers of a prefetched parameter.
        product: whether the linear reader reduces the tensor's gradient while it computes its weight's.
    """

    edge: Edge
    steps: EdgeSteps
    product: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Compute(Node):
    """A rank's part of an operator.

    Attributes:
        product: the linear operator's operands, if its backward reduces the gradient of its input.
        passes_on: the input that this operator also returns, for later readers: its backward then gets the
            sum of their gradients. "" for none.
    """

    op: Operator
    call: LocalCall
    product: LinearProduct | None = None
    passes_on: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class KeepViews(Node):
    """The point after which a gathered parameter is saved, not regathered, as later groups read its views."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GatherAgain(Node):
    """The repeated gathering of activations when backward reaches ``op``. ``reads``: a result of ``op``, then
    the gathered activations."""

    op: Operator
    group: str


@dataclass(frozen=True, eq=False, kw_only=True)
class BeginBlock(Node):
    """The start of a block (repeated layer) in forward.

    Attributes:
        own: the steps that gather this block's parameters if it is the first block; empty for later ones.
        following: the steps that start to gather the next block's parameters.
    """

    block: int
    own: tuple[EdgeSteps, ...]
    following: tuple[EdgeSteps, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class BeginBlockBackward(Node):
    """The start of a block in backward: when autograd reaches any of the tensors in ``reads``."""

    block: int


@dataclass(frozen=True)
class ForwardProgram:
    """One rank's forward.

    Attributes:
        nodes: in topological order.
        parameters, buffers: the names of its arguments after the model's inputs.
        outputs: the model's outputs, and tensors for the next pipeline stage; of placed plans, all results.
        results: (tensor, node) of each output, then of each changed buffer.
        ahead: block -> the gathering steps of its prefetched parameters, in order.
    """

    nodes: tuple[Node, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[tuple[str, Node], ...]
    ahead: Mapping[int, Sequence[EdgeSteps]]

    @property
    def gathers(self) -> bool:
        """Whether backward gathers anything again: parameters of groups that run once, or activations."""
        moves = (node for node in self.nodes if isinstance(node, Move) and not node.again)
        return any(node.edge.kind == "parameter" or node.steps.gathered_again for node in moves)

    @property
    def counts(self) -> bool:
        """Whether shards add up their numbers of targets, as for a mean loss; False if micro-batches split
        the targets."""
        calls = (node.call for node in self.nodes if isinstance(node, Compute))
        return any(collective.count for call in calls for collective in call.collectives)

    def units(self) -> Iterator[tuple[Node, ...]]:
        """Yield the nodes in topological order, each alone or with all others of its recomputed block."""
        regions: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.region is not None:
                regions.setdefault(node.region, []).append(node)
        members = {name: tuple(nodes) for name, nodes in regions.items()}
        unit = {node: (node,) if node.region is None else members[node.region] for node in self.nodes}
        outside = (node for node in self.nodes if node.region is None) if members else ()
        marks = [node for node in outside if isinstance(node, BeginBlockBackward)]
        done: set[Node] = set()
        for node in self.nodes:
            # Depth first with an explicit stack: a graph's chains are longer than Python's recursion limit.
            waiting = [unit[node]]
            while waiting:
                current = waiting[-1]
                read = (provider for member in current for provider in member.reads.values())
                missing = {unit[p]: None for p in read if p not in done and unit[p] is not current}
                if current[0] not in done and missing:
                    waiting += reversed(missing)
                    continue
                waiting.pop()
                if current[0] not in done:
                    done.update(current)
                    yield current
                    ready = [mark for mark in marks if done.issuperset(mark.reads.values())]
                    marks = [mark for mark in marks if mark not in ready]
                    done.update(ready)
                    yield from ((mark,) for mark in ready)


def lower_program(
    strategy: Strategy, place: tuple[int, ...] | None = None, *, evaluating: bool = False
) -> ForwardProgram:
    """Return the forward of one rank under a strategy.

    Args:
        place: the rank's coordinate, micro-batch first; by default a rank with the largest shards.
        evaluating: whether to run a training graph in eval mode.
    """
    return Lowering(strategy, place, evaluating, zigzag=strategy.zigzag).program()


_OUTSIDE: Mapping[str, Any] = {}
"""The fields of a node outside of recomputed regions."""
_WHOLE = (REPLICATE, PARTIAL_GRAD)
"""Placements of an axis along which every rank has the whole value."""


class Lowering:
    """The construction of the program of a strategy, or of a placed plan's operators on one device.

    Attributes:
        nodes: the nodes added so far.
        where: the fields ``region`` and ``again`` of the current operator's nodes.
        arguments: input, parameter, buffer or constant -> its node.
        made: tensor -> the node of the operator that makes it.
        brought: (group, tensor) -> the node of the tensor as resharded for the group.
    """

    def __init__(
        self, strategy: Strategy, place: tuple[int, ...] | None, evaluating: bool, *, zigzag: bool = False
    ):
        self.strategy, self.graph = strategy, strategy.graph
        self.source = strategy.graph.atoms.graph
        self.place, self.evaluating, self.zigzag = place, evaluating, zigzag
        self.nodes: list[Node] = []
        self.where = _OUTSIDE
        self.arguments: dict[str, Node] = {}
        self.made: dict[str, Node] = {}
        self.brought: dict[tuple[str, str], Node] = {}
        # Materialised hubs.
        self._hubs: dict[str, Node] = {}
        # Shards of tensors that every rank has whole, made once for all groups.
        self._slices: dict[tuple[str, Layout], Node] = {}
        self._views: dict[str, Mapping[str, Sequence[str]]] = {}
        self._reduced_beside: Mapping[str, tuple[LinearProduct, Edge]] = {}
        self._products: dict[str, LinearProduct] = {}
        # The parameters that are gathered ahead: by block, and by reader.
        self._ahead: dict[int, list[EdgeSteps]] = {}
        self._ahead_of: dict[tuple[str, str], EdgeSteps] = {}
        self._begun = -1

    def program(self) -> ForwardProgram:
        source, strategy = self.source, self.strategy
        # Also unused parameters, as the signature does not depend on the strategy.
        parameters = tuple(t.name for t in source.parameters)
        buffers = self.add_arguments(parameters)
        self._reduced_beside = {} if self.evaluating else strategy.reduced_beside
        self._products = {product.operator: product for product, _ in self._reduced_beside.values()}
        # Also the blocks of unsharded copies that are prefetched, and of gradients that are scattered later.
        self._blocks = {edge.block for edge in strategy.unsharded.values()}
        self._gather_ahead()
        once = self.strategy.once
        for group, op in ((of, op) for of in self.graph.groups for op in of.operators):
            region = self.strategy.region_of.get(group.name)
            if region is not None and group.name in region.rest and once.issuperset(region.rest):
                region = None  # neither it nor any reader in the region runs again
            self._begin(self.strategy.blocks.of[group.name])
            twice = self.strategy.forwards(group.name) > 1
            self.where = _OUTSIDE if region is None else {"region": region.name, "again": twice}
            self.operator(op, group)
            self._begin_backward(op, group)
            self._gather_again(op, group)
        self.where = _OUTSIDE
        departing = tuple(op.outputs[0] for op in source.operators if op.target == DEPART)
        outputs, changed = (*source.outputs, *departing), tuple(source.mutations.values())
        leaving = {name: self._output(name) for name in dict.fromkeys((*source.outputs, *changed))}
        # Departing tensors keep their layout: the next stage takes them over as they are.
        leaving |= {name: self.made[name] for name in departing}
        results = tuple((name, leaving[name]) for name in (*outputs, *changed))
        return ForwardProgram(tuple(self.nodes), parameters, buffers, outputs, results, self._ahead)

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def add_arguments(self, parameters: tuple[str, ...]) -> tuple[str, ...]:
        """Add the model's inputs, these parameters and all buffers; return the buffers' names."""
        buffers = tuple(t.name for t in self.source.tensors.values() if t.kind == "buffer")
        for name in (*self.source.inputs, *parameters, *buffers):
            self.argument(name)
        return buffers

    def argument(self, name: str) -> Node:
        if name not in self.arguments:
            self.arguments[name] = self.add(Argument(name=name))
        return self.arguments[name]

    # -- operators ----------------------------------------------------------------------------------

    def operator(self, op: Operator, group: Group) -> None:
        """Add the nodes of an operator, and those that reshard its operands and results."""
        configuration = self.strategy.configurations[group.name]
        if op.target == ARRIVE:
            # The stage receives the tensor in this layout.
            made = {op.outputs[0]: self.arguments[op.inputs()[0]]}
        else:
            made = dict.fromkeys(op.outputs, self._compute(op, group))
        if configuration.resolved is not None and configuration.resolved[0] in op.outputs:
            name, before, after = configuration.resolved
            made[name] = self.move(made[name], Edge(name, before, after, group.name, "resolve"))
        if group.name not in self._views:
            self._views[group.name] = _left_as_views(group)
        for name in self._views[group.name].get(op.name, ()):
            gathered = self.brought[group.name, name]
            if isinstance(gathered, Move):
                self.add(KeepViews(reads={name: gathered}, **self.where))
        for name, node in made.items():
            self.made[name] = node
            if name in self.strategy.hubs:
                # At once, where it is made: every reader then starts from this one copy, as priced.
                edge = Edge(name, self.strategy.made[name], self.strategy.hubs[name], "", "activation")
                self._hubs[name] = self.move(node, edge)

    def _gather_again(self, op: Operator, group: Group) -> None:
        again = self.strategy.gathered_again.intersection(group.reads, op.inputs())
        learns = (name for name in op.outputs if self.source.tensors[name].requires_grad)
        result = next(learns, None)
        if not again or result is None or self.evaluating or self.where.get("again"):
            return
        copies = {name: self.brought[group.name, name] for name in group.reads if name in again}
        reads = {result: self.made[result], **copies}
        self.add(GatherAgain(op=op, group=group.name, reads=reads, **self.where))

    def _compute(self, op: Operator, group: Group) -> Node:
        configuration = self.strategy.configurations[group.name]
        atoms, mesh = self.graph.atoms, self.strategy.mesh
        call = localise(configuration.placed(op.name, atoms, mesh, self.place, zigzag=self.zigzag))
        if self.evaluating:
            call = evaluated(op, call)
        # In the order of the rank's kernel, which may differ from that of the graph's operator.
        names = dict.fromkeys(iter_refs((call.args, tuple(call.kwargs.values()))))
        reads = {name: self._operand(name, configuration.layout(name), group) for name in names}
        product = self._products.get(op.name)
        hub = product.read if product is not None and product.read in self._hubs else ""
        node = self.add(Compute(op=op, call=call, product=product, passes_on=hub, reads=reads, **self.where))
        if hub:
            self._hubs[hub] = node
        return node

    # -- blocks -------------------------------------------------------------------------------------

    def _gather_ahead(self) -> None:
        uses: dict[tuple[int, str, Layout, bool, bool], list[Edge]] = {}
        for name, group in self.graph.uses:
            edge = self.strategy.use(name, group)
            if edge.block is None:
                continue
            self._blocks |= {edge.block, edge.behind}
            if edge.back is None:
                recomputed = self.strategy.forwards(group.name) > 1
                learns = self.graph.learns(name, group.name)
                uses.setdefault((edge.block, name, edge.target, recomputed, learns), []).append(edge)
        for (block, name, _, recomputed, _), edges in uses.items():
            readers = tuple(edge.reader for edge in edges)
            steps = EdgeSteps.of(self.strategy, edges[0], readers, recomputed=recomputed)
            self._ahead.setdefault(block, []).append(steps)
            self._ahead_of.update(((name, reader), steps) for reader in readers)

    def _begin(self, block: int) -> None:
        for number in range(self._begun + 1, block + 1):
            # Nothing precedes the first block, whose own parameters are gathered as it begins.
            own = tuple(self._ahead.get(number, ())) if number == 0 else ()
            following = tuple(self._ahead.get(number + 1, ()))
            if {number, number + 1} & self._blocks:
                names = (steps.edge.tensor for steps in (*own, *following))
                shards = {name: self.arguments[name] for name in names}
                # In no recomputed region, as the second forward must not gather ahead.
                self.add(BeginBlock(block=number, own=own, following=following, reads=shards))
        self._begun = max(self._begun, block)

    def _begin_backward(self, op: Operator, group: Group) -> None:
        block = self.strategy.blocks.of[group.name]
        if group.name != self.strategy.blocks.last[block] or op is not group.operators[-1]:
            return
        if not {block - 1, block, block + 1, block + 2} & self._blocks:
            return
        reads = {name: self.made[name] for name in op.outputs}
        self.add(BeginBlockBackward(block=block, reads=reads, **self.where))

    # -- operands -----------------------------------------------------------------------------------

    def _operand(self, name: str, layout: Layout, group: Group) -> Node:
        kind = self.source.tensors[name].kind
        # Made inside the group, which passes it on unchanged.
        if kind == "activation" and name not in group.reads:
            return self.made[name]
        if kind not in ("activation", "parameter"):
            return self._slice(name, layout)
        # One copy per group: its operators share the values moved for the first of them.
        key = group.name, name
        if key not in self.brought:
            if kind == "parameter":
                self.brought[key] = self._parameter(name, group)
            else:
                edge = Edge(name, self.strategy.source_layout(name), layout, group.name, "activation")
                self.brought[key] = self.move(self._source(name), edge)
        return self.brought[key]

    def _parameter(self, name: str, group: Group) -> Node:
        origin = self.arguments[name]
        if self.source.training and not self.graph.learns(name, group.name):
            # It may be trained by other uses; here autograd would save tensors in vain.
            origin = self.add(Detach(reads={name: origin}, **self.where))
        return self.move(origin, self.strategy.use(name, group))

    def _slice(self, name: str, layout: Layout) -> Node:
        argument = self.argument(name)
        whole = all(self.strategy.mesh[a] == 1 or code in _WHOLE for a, code in enumerate(layout))
        # A constant may be kept at a reduced shape and expanded to the graph's; a slice does both.
        kept = self.source.constants.get(name)
        expanded = kept is not None and tuple(kept.shape) != self.source.tensors[name].shape
        if whole and not expanded:
            return argument
        if (name, layout) not in self._slices:
            zigzag = self.strategy.zigzag_atoms(name) if self.zigzag else frozenset[int]()
            node = Slice(layout=layout, mesh=self.strategy.mesh, zigzag=zigzag, reads={name: argument})
            self._slices[name, layout] = self.add(node)
        return self._slices[name, layout]

    def _source(self, name: str) -> Node:
        return self._hubs.get(name, self.made[name])

    # -- edges --------------------------------------------------------------------------------------

    def move(self, origin: Node, edge: Edge) -> Node:
        """Return the node of a resharded tensor; ``origin`` itself if nothing moves or is cast."""
        _, of_product = self._reduced_beside.get(edge.tensor, (None, None))
        steps = self._ahead_of.get((edge.tensor, edge.reader)) or EdgeSteps.of(self.strategy, edge)
        does = steps.casts or edge.back is not None or steps.forward or steps.backward
        if not does:
            return origin
        reads, product = {edge.tensor: origin}, edge == of_product
        return self.add(Move(edge=edge, steps=steps, product=product, reads=reads, **self.where))

    def _output(self, name: str) -> Node:
        if self.source.tensors[name].kind != "activation":
            return self._slice(name, (REPLICATE,) * len(self.strategy.mesh))
        return self.move(self._source(name), self.strategy.output_edge(name))


def _left_as_views(group: Group) -> Mapping[str, Sequence[str]]:
    views: dict[str, list[str]] = {}
    for name in (*group.parameters, *group.shared):
        made, last = {name}, None
        for op in group.operators:
            if made.intersection(op.inputs()):
                last = op.name
                if made.issuperset(op.inputs()):
                    made.update(op.outputs)
        if last is not None and made.intersection(group.writes):
            views.setdefault(last, []).append(name)
    return views
