"""The individual collectives of one step, in the order in which a rank issues them.

All ranks issue the same collectives in the same order; otherwise they would wait for each other forever. The
order follows from the graph, the strategy and the way in which autograd runs backward: it first runs what
forward made last, whatever belongs to which group. A leaf takes its gradient as soon as that is complete, so
a bucket is reduced right after the node that delivers its last gradient. Whatever autograd does not keep is
made again by the first node that needs it: a gathered parameter, or a whole recomputed region.

Nothing here queries the executor: ``verify`` compares the result with what it really issues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tensoropt.costs.effects import (
    BACK_BEFORE,
    BACK_BEGIN,
    BACK_NEXT,
    BEGIN,
    BEGIN_BEFORE,
    FIRST_BEFORE,
    FIRST_BEGIN,
    GATHER_ONCE,
    LAST_NEXT,
    REDUCE_LAST,
    SharedCollective,
    When,
)
from tensoropt.costs.prices import Send
from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.issue_nodes import Node, forward_nodes
from tensoropt.simulate.step_sends import ParameterUse, Sends, StepSends


def collectives_in_order(strategy: Strategy, facts: Mapping[str, Facts]) -> tuple[Collective, ...]:
    """The collectives of one training step (or inference call) of a strategy, in the order in which every
    rank issues them; they are those that :func:`~tensoropt.simulate.collectives.predicted_collectives`
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
        self.nodes = forward_nodes(self.sends)
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
        self.issued += [Collective(one.kind, one.axes, one.bytes) for one in sends]

    def issue_together(self, members: Iterable[SharedCollective]) -> None:
        """Issue one collective for all members with the same ranks and type, in the order of the first
        member."""
        sizes: Counter[tuple[str, tuple[int, ...], str]] = Counter()
        for one in members:
            sizes[one.send.kind, one.send.axes, one.dtype] += one.send.bytes
        self.issued += [Collective(kind, axes, size) for (kind, axes, _), size in sizes.items()]

    def issue_gathers(self, block: int, when: When) -> None:
        """Issue the gathers of what a block uses, ahead of it."""
        uses = self.sends.ahead.get(block, ())
        self.issue_together(one for use in uses for one in self.sends.use(use).beside(when))

    def issue_copies(self, block: int, when: When) -> None:
        """Issue the gathers of the copies that a block uses, ahead of it."""
        names = self.sends.copies_of.get(block, ())
        self.issue_together(one for name in names for one in self.sends.copies[name].beside(when))

    @property
    def scatters_last(self) -> frozenset[str]:
        """The parameters whose gradients wait for the last micro-batch and are then scattered behind."""
        if self.strategy.micro_batches == 1:
            return frozenset()
        names = (name for of_block in self.sends.copies_of.values() for name in of_block)
        return frozenset(filter(self.strategy.reduced_last, names))

    # -- moments ------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        # Copies that stay gathered are made when the step begins, so that any change of the shards is seen;
        # the step schedule has those that come alone at the end of the previous step, when the same amount is
        # alive.
        for moments in self.sends.copies.values():
            self.issue(moments.at(GATHER_ONCE))

    def _forward(self, *, first: bool) -> None:
        for node in self.nodes:
            if node.begins == 0:
                self.issue_gathers(0, BEGIN)
                if first:
                    self.issue_copies(0, FIRST_BEGIN)
            if node.begins is not None:
                self.issue_gathers(node.begins + 1, BEGIN_BEFORE)
                if first:
                    self.issue_copies(node.begins + 1, FIRST_BEFORE)
            self.issue(node.sends.forward)

    def _end_step(self) -> None:
        """Issue the gradients that were collected with copies, and the buckets that wait for them."""
        for name, moments in self.sends.copies.items():
            if self.strategy.reduced_last(name) and name not in self.scatters_last:
                self.issue(moments.at(REDUCE_LAST))
                self.issue(self._buckets.arrived(name))
        self.issue(self._buckets.rest())


class _Backward:
    """The backward of one micro-batch."""

    def __init__(self, step: _Step, buckets: _Buckets):
        self.step, self.sends, self.buckets = step, step.sends, buckets
        self.blocks = step.strategy.blocks
        # Recomputed regions that have not run a second time yet.
        self._regions: dict[str, list[Node]] = {}
        for node in step.nodes:
            if node.region is not None:
                self._regions.setdefault(node.region, []).append(node)
        # For each parameter, the number of gradients that its leaf waits for.
        self._missing = Counter(name for node in step.nodes for name in node.delivers)
        # For each block, what waits to be scattered; and what was scattered, until it is waited for.
        self._left: dict[int, dict[tuple[str, Layout], list[ParameterUse]]] = {}
        self._left_last: dict[int, list[str]] = {}
        self._scattered: list[str] = []
        self._scatters_last = step.scatters_last if buckets.complete else frozenset[str]()

    def run(self) -> None:
        """Run backward as autograd does: what was made last comes first."""
        for node in reversed(self.step.nodes):
            if node.begins_back is not None:
                self._begin(node.begins_back)
            if node.keeps and node.region in self._regions:
                # The whole region runs again, as one, when the first tensor that it did not keep is needed.
                for member in self._regions.pop(node.region):
                    self.step.issue(member.sends.again)
            self._node(node)
        self._arrive()
        self._scatter()
        self._arrive()

    def _node(self, node: Node) -> None:
        """Run one node: it gathers, its kernels send, and it passes gradients on."""
        delivered = 0
        for send, behind in node.gathers_back:
            self._deliver(node.delivers[delivered:behind])
            self.step.issue([send])
            delivered = behind
        self.step.issue(node.sends.back)
        if node.leaves_behind is not None:
            self._leave(node.leaves_behind)
        self._deliver(node.delivers[delivered:])

    def _leave(self, use: ParameterUse) -> None:
        """Hand over a gradient, and add it to those of other uses that read the parameter in the same way."""
        key = use.parameter, self.sends.uses[use].layout
        self._left.setdefault(self.sends.last_block[key], {}).setdefault(key, []).append(use)

    def _deliver(self, names: Iterable[str]) -> None:
        for name in names:
            self._missing[name] -= 1
            if self._missing[name]:
                continue
            if name in self._scatters_last:
                block = self.step.strategy.unsharded[name].block
                assert block is not None
                self._left_last.setdefault(block, []).append(name)
            elif not self.step.strategy.reduced_last(name):
                self.step.issue(self.buckets.arrived(name))

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
        for block in sorted((number for number in self._left if number > above), reverse=True):
            for_each = [
                (name, [one for use in uses for one in self.sends.use(use).beside(BACK_NEXT)])
                for (name, _), uses in self._left.pop(block).items()
            ]
            self._scatter_together(for_each)
        for block in sorted((number for number in self._left_last if number > above), reverse=True):
            names = self._left_last.pop(block)
            self._scatter_together([(name, self.sends.copies[name].beside(LAST_NEXT)) for name in names])

    def _scatter_together(self, gradients: Sequence[tuple[str, Sequence[SharedCollective]]]) -> None:
        """Scatter the gradients of a block, each given with its parameter; they arrive collective by
        collective."""
        arriving: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for name, members in gradients:
            for one in members:
                arriving.setdefault((one.send.axes, one.dtype), []).append(name)
        self.step.issue_together(one for _, members in gradients for one in members)
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
            self._parts.update((name, sends.arrivals(name)) for name in bucket.parameters)
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
