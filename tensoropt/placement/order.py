"""One global order of a step's operators and messages, so that devices that follow it never deadlock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tensoropt.errors import PlanError
from tensoropt.placement.problem import Placement


class Flow(NamedTuple):
    """The data flow between the operators of one micro-batch; operators and tensors are given by number.

    Attributes:
        names: the name of each operator.
        read: the tensors that each operator reads, possibly repeated.
        makers: the operator that makes each tensor.
        gradient: whether each tensor has a gradient.
    """

    names: Sequence[str]
    read: Sequence[Sequence[int]]
    makers: Sequence[int]
    gradient: Sequence[bool]


class TensorTransfer(NamedTuple):
    """A message between two devices with a tensor (its number) or, if ``backward``, with its gradient."""

    tensor: int
    source: int
    target: int
    backward: bool


def ordered(
    flow: Flow, placement: Placement, routes: Sequence[TensorTransfer], *, backward: bool
) -> tuple[tuple[bool, int], ...]:
    """Return the operators and messages of forward or backward, in an order that all devices can follow.

    It is the order in time of a step whose operators take equal time and whose messages take none. A receive
    is then ordered close to its send, so that the receiving device neither waits nor allocates early.

    Args:
        routes: the messages of forward or, if ``backward``, of backward, in the plan's order.

    Returns:
        (True, number of an operator) or (False, index of a message in ``routes``), in order.

    Raises:
        PlanError: the devices' orders and the messages wait for each other in a cycle.
    """
    waiting, after = _links(flow, placement, routes, backward=backward)
    first, count = len(flow.names), len(waiting)
    start = [0] * count
    # By time, and at one time transfers before operators, so that a message is on its way while its device
    # computes on; each as one number, which is compared faster than a tuple.
    ready = [node + count * (node < first) for node, links in enumerate(waiting) if not links]
    heapq.heapify(ready)
    order: list[tuple[bool, int]] = []
    while ready:
        when, node = divmod(heapq.heappop(ready), count)
        is_operator = node < first
        order.append((is_operator, node if is_operator else node - first))
        # An operator takes one unit of time, a message none.
        time = when // 2 + is_operator
        for neighbour in after[node]:
            start[neighbour] = max(start[neighbour], time)
            waiting[neighbour] -= 1
            if not waiting[neighbour]:
                heapq.heappush(ready, (2 * start[neighbour] + (neighbour < first)) * count + neighbour)
    if len(order) < count:
        stuck = [name for number, name in enumerate(flow.names) if waiting[number]]
        names = ", ".join(stuck[:3]) or "transfers"
        raise PlanError(
            f"operators of the plan wait for each other in a cycle, among them {names}; make the plan again"
        )
    return tuple(order)


def _links(
    flow: Flow, placement: Placement, routes: Sequence[TensorTransfer], *, backward: bool
) -> tuple[list[int], list[list[int]]]:
    first, device = len(flow.names), placement.device
    waiting = [0] * (first + len(routes))
    after: list[list[int]] = [[] for _ in waiting]

    def link(node: int, successor: int) -> None:
        after[node].append(successor)
        waiting[successor] += 1

    for order in placement.backward if backward else placement.forward:
        for node, successor in itertools.pairwise(order):
            link(node, successor)
    # Transfers keep the plan's order on all ranks, so that sends and receives between two of them pair up.
    for node, successor in itertools.pairwise(range(first, len(waiting))):
        link(node, successor)
    # By the value and the device that reads it.
    messages = {(r.tensor, r.source if backward else r.target): first + n for n, r in enumerate(routes)}
    for reader, values in enumerate(flow.read):
        for value in values:
            maker = flow.makers[value]
            if backward and not flow.gradient[value]:
                continue
            way = [maker, reader]
            if device[maker] != device[reader]:
                way.insert(1, messages[value, device[reader]])
            for node, successor in itertools.pairwise(way[::-1] if backward else way):
                link(node, successor)
    return waiting, after
