"""The individual collectives of one step, in the order in which a rank issues them.

All ranks issue the same collectives in the same order; otherwise they would wait for each other forever. The
order follows from the graph, the strategy and the way in which autograd runs backward: it first runs what
forward made last, whatever belongs to which group. A leaf takes its gradient as soon as that is complete, so
a bucket is reduced right after the node that delivers its last gradient. Whatever autograd does not keep is
made again by the first node that needs it: a gathered parameter, or a whole recomputed region.

Nothing here queries the executor: ``verify`` compares the result with what it really issues.

Forward adds the nodes of the strategy's program (:mod:`tensoropt.sharding.program`) to autograd's graph, and
backward passes them in reverse; what each of them sends follows from the effects.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from tensoropt.costs.effects import (
    BACK_BEFORE,
    BACK_BEGIN,
    BACK_NEXT,
    BEGIN,
    BEGIN_BEFORE,
    COMPUTE,
    COMPUTE_AGAIN,
    COMPUTE_BACK,
    FIRST_BEFORE,
    FIRST_BEGIN,
    GATHER,
    GATHER_AGAIN,
    GATHER_BACK,
    GATHER_ONCE,
    HUB,
    HUB_AGAIN,
    HUB_BACK,
    INNER,
    INNER_AGAIN,
    INNER_BACK,
    LAST_NEXT,
    OUTPUT,
    OUTPUT_BACK,
    PARAMETERS,
    READ,
    READ_AGAIN,
    READ_ANEW,
    READ_ANEW_AGAIN,
    READ_BACK,
    REDUCE_LAST,
    USED_BACK,
    Effect,
    SharedCollective,
    When,
    reader,
)
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.parameter_effects import StoredUse, Use
from tensoropt.costs.prices import Send, free_prices
from tensoropt.graph import DTYPE_BYTES, Operator
from tensoropt.ops.layouts import Layout
from tensoropt.ops.localise import draws_numbers
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.groups import Group
from tensoropt.sharding.program import (
    Argument,
    BeginBlock,
    BeginBlockBackward,
    Compute,
    GatherAgain,
    Move,
    Node,
    lower_program,
)
from tensoropt.sharding.storage import whole_layout
from tensoropt.sharding.strategy import Edge, Scattered, Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.collectives import Collective

Sends = tuple[Send, ...]


class ParameterUse(NamedTuple):
    """A parameter, and the name of a group that uses it."""

    parameter: str
    group: str


class _Moments:
    """The collectives of one owner's effects, by the moments as the owner names them."""

    def __init__(self, effects: Iterable[Effect] = ()):
        self._sends: dict[When, list[Send]] = {}
        self._beside: dict[When, list[SharedCollective]] = {}
        for effect in effects:
            self._sends.setdefault(effect.when, []).extend(effect.sends)
            self._beside.setdefault(effect.when, []).extend(effect.beside)

    def at(self, when: When) -> Sends:
        """Return the collectives that the device waits for."""
        return tuple(self._sends.get(when, ()))

    def sent(self, forward: When, again: When, back: When) -> _Sent:
        """Return the collectives that the device waits for at three moments."""
        return _Sent(self.at(forward), self.at(again), self.at(back))

    def beside(self, when: When) -> tuple[SharedCollective, ...]:
        """Return the parts that are combined with others of the same moment."""
        return tuple(self._beside.get(when, ()))


class _Sent(NamedTuple):
    """What a node of the program sends, and what it hands on in backward.

    Attributes:
        forward, again, back: in forward, in the second forward of a recomputed region, and in backward; for
            an operator, what its own kernels send.
        gathers_back: what its backward gathers before its kernels send, because autograd does not keep it;
            each with the number of the operator's own gradients that are delivered before it: an operator
            with several layers has one autograd node for each.
        delivers: the parameters to whose leaves, or copies, it delivers a gradient, in order.
        leaves_behind: the use whose gradient it hands over, to be scattered with others of the block.
        keeps: whether its backward needs more than the gradient.
    """

    forward: Sends = ()
    again: Sends = ()
    back: Sends = ()
    gathers_back: tuple[tuple[Send, int], ...] = ()
    delivers: tuple[str, ...] = ()
    leaves_behind: Edge | None = None
    keeps: bool = False


class StepSends:
    """The effects of one strategy, as far as they send.

    Args:
        facts: by group name, the facts of its configuration.
    """

    def __init__(self, strategy: Strategy, facts: Mapping[str, Facts]):
        self.strategy, self.graph = strategy, strategy.graph
        self.tensors = strategy.graph.atoms.graph.tensors
        candidates = StrategyCandidates(strategy, facts)
        # The optimizer that runs afterwards does not change what is sent.
        self.prices = free_prices(strategy.graph, strategy.mesh, "sgd")
        self.batch = Batch(candidates, *candidates.row(), self.prices)
        self._of_groups = GroupEffects(self.prices)
        self._choices = {group.name: self._choice(candidates, group) for group in self.graph.groups}
        self._operators: dict[str, _Moments] = {}
        self._resolved: dict[str, _Moments] = {}
        for group in self.graph.groups:
            moments = [_Moments(e.effects) for e in self._of_groups.inside(self._choices[group.name])]
            if strategy.configurations[group.name].resolved is not None:
                self._resolved[group.name] = moments.pop(0)
            names = (op.name for op in group.operators)
            self._operators.update(zip(names, moments, strict=True))

    def _choice(self, candidates: StrategyCandidates, group: Group) -> Choice:
        stored = {name: self.strategy.stored[name] for name in (*group.parameters, *group.shared)}
        (configuration,), (work,) = candidates.configurations(group), candidates.works(group)
        (facts,), (recomputed,) = candidates.facts(group), candidates.again(group)
        tied = {name: parameter for name in group.shared if (parameter := self.batch.tied[name])}
        turns = {name: parameter.turns[group.name].at(0) for name, parameter in tied.items()}
        return Choice(configuration, work, facts, stored, recomputed, turns)

    # -- parameters ---------------------------------------------------------------------------------

    @cached_property
    def uses(self) -> Mapping[ParameterUse, StoredUse]:
        """All uses of parameters, in the order of groups."""
        return {
            ParameterUse(use.name, group.name): use
            for group in self.graph.groups
            for use in self._of_groups.stored_uses(self._choices[group.name])
        }

    def use(self, use: ParameterUse) -> _Moments:
        """Return the collectives of a use."""
        return _Moments(self.effects(use))

    def effects(self, place: ParameterUse) -> tuple[Effect, ...]:
        """Return all effects of a use in a micro-batch."""
        return self._of_groups.parameters.used(self.uses[place]).effects

    @cached_property
    def copies(self) -> Mapping[str, _Moments]:
        """The collectives for copies that stay gathered over the step, by parameter, in the order of
        groups."""
        copies, parameters = {}, self._of_groups.parameters
        for place, use in self.uses.items():
            name = place.parameter
            if name in self.graph.shared:
                first = self.batch.schedule.first_users[name]
                neighbours = self.strategy.blocks.neighbours(first)
                whole = whole_layout(self.strategy.tensor(name), self.strategy.mesh)
                of_copy = Use(whole, 0, neighbours=neighbours)
                use = parameters.stored_use(name, self.strategy.stored[name], of_copy)
            effects = parameters.unsharded(use).effects
            if effects:
                copies[name] = _Moments(effects)
        return copies

    def tensor(self, name: str) -> _Moments:
        """Return the collectives for an activation and for its gradient."""
        return _Moments(self.batch.owner("tensor", name).effects.at(0).effects)

    # -- nodes --------------------------------------------------------------------------------------

    def sent(self, node: Node) -> _Sent:
        """Return what a node of the strategy's program sends."""
        if isinstance(node, Compute):
            return self._compute(node)
        if isinstance(node, GatherAgain):
            names = self.strategy.gathered_again.intersection(node.reads)
            sends = (self._gathered_again(name, node) for name in node.reads if name in names)
            return _Sent(back=tuple(send for part in sends for send in part))
        return self._move(node.edge) if isinstance(node, Move) else _Sent()

    def _move(self, edge: Edge) -> _Sent:
        if edge.kind == "parameter":
            sent = self.use(ParameterUse(edge.tensor, edge.reader)).sent(GATHER, GATHER_AGAIN, PARAMETERS)
            if edge.behind is not None:
                return sent._replace(leaves_behind=edge)
            learns = self.graph.learns(edge.tensor, edge.reader)
            return sent._replace(delivers=(edge.tensor,) if learns else ())
        if edge.kind == "resolve":
            return self._resolved[edge.reader].sent(INNER, INNER_AGAIN, INNER_BACK)
        moments = self.tensor(edge.tensor)
        if edge.kind == "output":
            return _Sent(moments.at(OUTPUT), back=moments.at(OUTPUT_BACK))
        if not edge.reader:
            return moments.sent(HUB, HUB_AGAIN, HUB_BACK)
        number = self._number(edge.tensor, edge.reader)
        return moments.sent(*(reader(number, when) for when in (READ, READ_AGAIN, READ_BACK)))

    def _gathered_again(self, name: str, node: GatherAgain) -> Sends:
        """Return what gathers a tensor again as backward comes to an operator: to the last of its group that
        has read and keeps it."""
        group = self.graph.group_of[node.op.name]
        keeping = [op.name for op in group.operators if name in op.inputs() and self._keeps(op)]
        if keeping[-1:] != [node.op.name]:
            return ()
        return self.tensor(name).at(reader(self._number(name, group.name), READ_ANEW))

    def gathered_for_region(self, region: str) -> Sends:
        """Return what gathers tensors again for the second forward of a region."""
        (groups,) = (set(each.groups) for each in self.strategy.recomputed if each.name == region)
        sends: list[Send] = []
        for name in sorted(self.strategy.gathered_again):
            readers, moments = self.batch.schedule.readers[name], self.tensor(name)
            inside = (number for number, group in enumerate(readers) if group.name in groups)
            sends += (send for number in inside for send in moments.at(reader(number, READ_ANEW_AGAIN)))
        return tuple(sends)

    def _number(self, name: str, reading: str) -> int:
        return [group.name for group in self.batch.schedule.readers[name]].index(reading)

    def _compute(self, node: Compute) -> _Sent:
        inside = self._operators[node.op.name]
        sent = inside.sent(INNER, INNER_AGAIN, INNER_BACK)
        # Those that are under way while it computes, and the last one, are alike.
        beside = inside.sent(COMPUTE, COMPUTE_AGAIN, COMPUTE_BACK)
        sent = _Sent(beside.forward + sent.forward, beside.again + sent.again, beside.back + sent.back)
        if node.product is not None:
            # The gradient of its input is reduced before its weight's is computed.
            reduced = self.tensor(node.product.read).at(reader(0, USED_BACK))
            sent = sent._replace(back=(*sent.back, *reduced))
        group = self.graph.group_of[node.op.name]
        runs = self._choices[group.name].facts.backward_runs
        made = _first_runs(group, (run.made for run in runs))
        # The parameters that it reads as they are stored, in the order of their gradients.
        leaves = [name for name, provider in node.reads.items() if isinstance(provider, Argument)]
        leaves = [name for name in self._parameters(leaves) if self.graph.learns(name, group.name)]
        delivers = tuple(sorted(leaves, key=lambda name: made.get(name, sys.maxsize)))
        gathers = self._gathered_back(node, group, [made[name] for name in delivers if name in made])
        return sent._replace(gathers_back=tuple(gathers), delivers=delivers, keeps=self._keeps(node.op))

    def _gathered_back(self, node: Compute, group: Group, delivered: list[int]) -> Iterator[tuple[Send, int]]:
        """Yield what the backward of an operator gathers again, in the order in which it needs it."""
        runs = self._choices[group.name].facts.backward_runs
        order = _first_runs(group, (run.reads for run in runs))
        for name in sorted(self._parameters(node.reads), key=lambda name: order.get(name, sys.maxsize)):
            gathers = self.use(ParameterUse(name, group.name)).at(GATHER_BACK)
            readers = [reader.name for reader in group.operators if name in reader.inputs()]
            # It is known how often a group's backward needs a parameter, but not in which of its operators:
            # each gets the same share, and the first one gets the remainder.
            share = len(gathers) // len(readers)
            rest = len(gathers) - share * len(readers) if node.op.name == readers[0] else 0
            behind = sum(run < order.get(name, 0) for run in delivered)
            yield from ((send, behind) for send in gathers[: share + rest])

    def _parameters(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.tensors[name].kind == "parameter"]

    def _keeps(self, op: Operator) -> bool:
        if not any(self.tensors[name].requires_grad for name in op.outputs):
            return False
        linear = self.graph.atoms.spaces[op.name].linear
        return bool(self._parameters(op.inputs())) or not linear or draws_numbers(op)


def _first_runs(group: Group, runs: Iterable[tuple[str, ...]]) -> Mapping[str, int]:
    """Return the first run of a group's backward that has each of its tensors: a run begins with each
    parameter that is needed, and with each gradient that was made."""
    names = {short: name for name, short in group.short_names.items()}
    first: dict[str, int] = {}
    for number, run in enumerate(runs):
        for short in run:
            first.setdefault(names[short], number)
    return first


def collectives_in_order(strategy: Strategy, facts: Mapping[str, Facts]) -> tuple[Collective, ...]:
    """Return the collectives of one training step (or inference call) of a strategy, in the order in which
    every rank issues them; they are those that :func:`~tensoropt.simulate.collectives.predicted_collectives`
    counts.

    Args:
        facts: by group name, the facts of its configuration (which gathered parameters backward needs).
    """
    step = _Step(strategy, facts)
    step.run()
    return tuple(step.issued)


class _Step:
    """One step while it is being traversed.

    Attributes:
        issued: the collectives issued so far.
    """

    def __init__(self, strategy: Strategy, facts: Mapping[str, Facts]):
        self.strategy = strategy
        self.sends = StepSends(strategy, facts)
        self.program = lower_program(strategy)
        self.nodes = [(node, self.sends.sent(node)) for unit in self.program.units() for node in unit]
        self.issued: list[Collective] = []
        self._buckets = _Buckets(self.sends)

    def run(self) -> None:
        """Traverse the whole step."""
        training, last = self.sends.prices.training, self.strategy.micro_batches - 1
        self._begin_step()
        for number in range(self.strategy.micro_batches):
            self._forward(first=number == 0)
            if training:
                self._buckets.complete = number == last
                _Backward(self, self._buckets).run()
        if training:
            self._end_step()

    def issue(self, sends: Iterable[Send]) -> None:
        """Issue collectives one by one."""
        self.issued += [Collective(send.kind, send.axes, send.bytes) for send in sends]

    def issue_together(self, members: Iterable[SharedCollective]) -> None:
        """Issue one collective for all members with the same ranks and type, in the order of the first
        member."""
        sizes: Counter[tuple[str, tuple[int, ...], str]] = Counter()
        for member in members:
            sizes[member.send.kind, member.send.axes, member.dtype] += member.send.bytes
        self.issued += [Collective(kind, axes, size) for (kind, axes, _), size in sizes.items()]

    def issue_gathers(self, block: int, when: When) -> None:
        """Issue the gathers of what a block uses, ahead of it."""
        self.issue_together(
            part
            for steps in self.program.ahead.get(block, ())
            for reader in steps.readers
            for part in self.sends.use(ParameterUse(steps.edge.tensor, reader)).beside(when)
        )

    def issue_copies(self, block: int, when: When) -> None:
        """Issue the gathers of the copies that a block uses, ahead of it."""
        copies = self.sends.copies.items()
        self.issue_together(
            part
            for name, moments in copies
            if self.strategy.unsharded[name].block == block
            for part in moments.beside(when)
        )

    def last_block(self, name: str) -> int | None:
        """Return the block behind which a gradient that waits for the last micro-batch is scattered with
        others; None if it is not."""
        return self.strategy.unsharded[name].block if self.strategy.micro_batches > 1 else None

    # -- moments ------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        # Copies that stay gathered are made when the step begins, so that any change of the shards is seen;
        # the step schedule has those that come alone at the end of the previous step, when the same amount is
        # alive.
        for moments in self.sends.copies.values():
            self.issue(moments.at(GATHER_ONCE))

    def _forward(self, *, first: bool) -> None:
        for node, sent in self.nodes:
            if isinstance(node, BeginBlock):
                self._begin_block(node.block, first=first)
            self.issue(sent.forward)

    def _begin_block(self, block: int, *, first: bool) -> None:
        if block == 0:
            self.issue_gathers(0, BEGIN)
            if first:
                self.issue_copies(0, FIRST_BEGIN)
        self.issue_gathers(block + 1, BEGIN_BEFORE)
        if first:
            self.issue_copies(block + 1, FIRST_BEFORE)

    def _end_step(self) -> None:
        """Issue the gradients that were collected with copies, and the buckets that wait for them."""
        for name, moments in self.sends.copies.items():
            if self.strategy.reduced_last(name) and self.last_block(name) is None:
                self.issue(moments.at(REDUCE_LAST))
                self.issue(self._buckets.arrived(name))
        self.issue(self._buckets.rest())


class _Backward:
    """The backward of one micro-batch."""

    def __init__(self, step: _Step, buckets: _Buckets):
        self.step, self.sends, self.buckets = step, step.sends, buckets
        self.blocks = step.strategy.blocks
        tensors = step.strategy.graph.atoms.graph.tensors
        # Recomputed regions that have not run a second time yet.
        self._regions: dict[str, list[_Sent]] = {}
        # The blocks that begin as backward comes to a node.
        self._begins: dict[Node, int] = {}
        for node, sent in step.nodes:
            if node.region is not None:
                self._regions.setdefault(node.region, []).append(sent)
            if isinstance(node, BeginBlockBackward):
                learning = (p for name, p in node.reads.items() if tensors[name].requires_grad)
                self._begins.update(dict.fromkeys(learning, node.block))
        # For each parameter, the number of gradients that its leaf waits for.
        self._missing = Counter(name for _, sent in step.nodes for name in sent.delivers)
        # What waits to be scattered, by whether it has waited for the last micro-batch, and block, the last
        # one first; then by parameter and the way of reading it. What was scattered, until it is waited for.
        self._left: dict[tuple[bool, int], dict[tuple[str, Layout], list[SharedCollective]]] = {}
        self._scattered: list[str] = []

    def run(self) -> None:
        """Run backward as autograd does: what was made last comes first."""
        for node, sent in reversed(self.step.nodes):
            # A block begins before its operator gathers anything again.
            at = next(iter(node.reads.values())) if isinstance(node, GatherAgain) else node
            if at in self._begins:
                self._begin(self._begins.pop(at))
            if sent.keeps and node.region in self._regions:
                # The whole region runs again, as one, when the first tensor that it did not keep is needed.
                self.step.issue(self.sends.gathered_for_region(node.region))
                for member in self._regions.pop(node.region):
                    self.step.issue(member.again)
            self._pass(sent)
        self._arrive()
        self._scatter()
        self._arrive()

    def _pass(self, sent: _Sent) -> None:
        """Pass one node: it gathers, its kernels send, and it passes gradients on."""
        delivered = 0
        for send, behind in sent.gathers_back:
            self._deliver(sent.delivers[delivered:behind])
            self.step.issue([send])
            delivered = behind
        self.step.issue(sent.back)
        if (edge := sent.leaves_behind) is not None and edge.behind is not None:
            use = self.sends.use(ParameterUse(edge.tensor, edge.reader))
            self._leave(edge, (False, -edge.behind), use.beside(BACK_NEXT))
        self._deliver(sent.delivers[delivered:])

    def _leave(self, edge: Edge, left: tuple[bool, int], gradient: Iterable[SharedCollective]) -> None:
        """Hand over a gradient, and add it to those of other uses that read the parameter in the same way."""
        self._left.setdefault(left, {}).setdefault((edge.tensor, edge.target), []).extend(gradient)

    def _deliver(self, names: Iterable[str]) -> None:
        for name in names:
            self._missing[name] -= 1
            if self._missing[name]:
                continue
            if not self.step.strategy.reduced_last(name):
                self.step.issue(self.buckets.arrived(name))
            elif self.buckets.complete and (block := self.step.last_block(name)) is not None:
                gradient = self.sends.copies[name].beside(LAST_NEXT)
                self._leave(self.step.strategy.unsharded[name], (True, -block), gradient)

    # -- blocks -------------------------------------------------------------------------------------

    def _begin(self, block: int) -> None:
        """Begin a block: what was scattered has arrived, the next block's parameters are gathered, and the
        gradients of the blocks that backward has left are scattered."""
        self._arrive()
        if block not in self.blocks.behind.values():
            self.step.issue_gathers(block, BACK_BEGIN)
        self.step.issue_gathers(self.blocks.behind.get(block, -1), BACK_BEFORE)
        self._scatter(above=block)

    def _scatter(self, above: int = -1) -> None:
        """Scatter the gradients of each block together; they arrive collective by collective."""
        for key in sorted(key for key in self._left if -key[1] > above):
            gradients = self._left.pop(key)
            self.step.issue_together(member for members in gradients.values() for member in members)
            arriving: dict[tuple[tuple[int, ...], str], list[str]] = {}
            for (name, _), members in gradients.items():
                for member in members:
                    arriving.setdefault((member.send.axes, member.dtype), []).append(name)
            self._scattered += [name for names in arriving.values() for name in names]

    def _arrive(self) -> None:
        for name in self._scattered:
            self.step.issue(self.buckets.arrived(name))
        self._scattered.clear()


class _Buckets:
    """Gradients that are reduced together, as they arrive.

    Attributes:
        complete: whether an arriving gradient is complete: so in the last micro-batch.
    """

    def __init__(self, sends: StepSends):
        self.complete = False
        self._of: dict[str, int] = {}
        self._parts: dict[str, int] = {}
        self._missing: list[int] = []
        self._waiting: dict[int, Send] = {}
        for number, bucket in enumerate(gradient_buckets(sends.strategy)):
            self._of.update(dict.fromkeys(bucket.parameters, number))
            # Each sum that is scattered comes separately, and one part for those that come by themselves.
            scattered = (
                (name, sends.strategy.scattered.get(name, Scattered(1))) for name in bucket.parameters
            )
            self._parts.update((name, sum(parts)) for name, parts in scattered)
            self._missing.append(len(bucket.parameters))
            size = bucket.elements * DTYPE_BYTES[bucket.dtype]
            # Gradients that no rank sends are in no reduction.
            if (send := sends.prices.send("all_reduce", bucket.axes, size)) is not None:
                self._waiting[number] = send

    def arrived(self, name: str) -> Sends:
        """Record that a gradient is where its parameter is stored; return what is reduced as a result."""
        if not self.complete or name not in self._of:
            return ()
        self._parts[name] -= 1
        if self._parts[name]:
            return ()
        number = self._of[name]
        self._missing[number] -= 1
        return (self._waiting.pop(number),) if not self._missing[number] and number in self._waiting else ()

    def rest(self) -> Iterator[Send]:
        """Yield what is reduced when no more gradients come: buckets that some gradients never reached."""
        yield from self._waiting.values()
        self._waiting.clear()
