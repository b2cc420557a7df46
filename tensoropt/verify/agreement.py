"""A check that ranks issue their common collectives in the same order, without which they deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from tensoropt.ops.calls import BY_VALUES, RING_SEND

_MESSAGES = frozenset({"send", RING_SEND})


class JointCall(NamedTuple):
    """A collective or message, as one of its ranks issues it.

    Attributes:
        kind: the collective's kind; ``send`` or ``ring_send`` at both ends of a message.
        ranks: the ranks of the process group, or the sender and the receiver.
        bytes: the size in bytes; 0 if it depends on values of tensors (expert routing).
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, kind: str, ranks: Sequence[int], size: int) -> JointCall:
        return cls(kind, tuple(ranks), 0 if kind == BY_VALUES else size)

    def __str__(self) -> str:
        size = f" of {self.bytes} bytes" if self.bytes else ""
        if self.kind in _MESSAGES:
            return f"{self.kind}{size} from rank {self.ranks[0]} to {self.ranks[1]}"
        return f"{self.kind}{size} among ranks {list(self.ranks)}"


_Shared = dict[tuple[int, tuple[int, ...]], list[JointCall]]


def disagreements(issued: Mapping[int, Sequence[JointCall]]) -> list[str]:
    """Return a line for each process group with two ranks that issue their common calls in different orders.

    Messages in the two directions are compared separately, as a rank may send or receive first.

    Args:
        issued: each rank's calls in order.
    """
    shared = {rank: _by_partner(rank, calls) for rank, calls in issued.items()}
    lines: dict[tuple[int, ...], str] = {}
    for rank, of_rank in shared.items():
        for other, ends in of_rank:
            if other not in shared:
                continue
            first, second = sorted((rank, other))
            ours, theirs = (shared[a].get((b, ends), []) for a, b in ((first, second), (second, first)))
            for position, (one, another) in enumerate(zip_longest(ours, theirs)):
                if one != another:
                    group = (one or another or ours[0]).ranks
                    lines.setdefault(group, _line(first, second, position, one, another))
                    break
    return list(lines.values())


def _by_partner(rank: int, calls: Sequence[JointCall]) -> _Shared:
    """Return (other rank, ends) -> the calls that both ranks take part in, in order. ``ends`` is (sender,
    receiver) for messages, and () for collectives."""
    shared: _Shared = defaultdict(list)
    for call in calls:
        ends = call.ranks if call.kind in _MESSAGES else ()
        for other in call.ranks:
            if other != rank:
                shared[other, ends].append(call)
    return shared


def _line(first: int, second: int, position: int, one: JointCall | None, another: JointCall | None) -> str:
    return (
        f"ranks {first} and {second} must issue their common collectives and messages in the same order, or "
        f"they deadlock; number {position} is {one or 'nothing'} on rank {first}, and "
        f"{another or 'nothing'} on rank {second}"
    )
