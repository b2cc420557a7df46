"""What a device of a placed plan asks PyTorch's allocator for in a step: all that it holds, in the order in
which the simulated step allocates and frees it.

The workspace of a backward may be below 0 bytes: it releases tensors before it makes others. Those that end
with it are freed when it begins; what they are more is one block until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from tensoropt.placement.simulate import OPTIMIZER_TEMPORARIES, SimulatedPlacement, device_name, holders
from tensoropt.simulate.caching_allocator import RankRequests, Request, state_blocks


def device_requests(simulated: SimulatedPlacement, device: int, optimizer: str) -> RankRequests:
    """Return the requests of a device.

    Args:
        optimizer: the optimizer, by whose tensors the state is divided into blocks.
    """
    timeline, owned = holders(simulated)
    stored, *changes = timeline.steps(device_name(device))
    lasting: list[int] = []
    state: list[int] = []
    for name, size in stored:
        if owned[int(name)][1] == "optimizer":
            state += state_blocks(round(size), optimizer)
        else:
            lasting.append(round(size))
    of_points = list(_requests(changes))
    update = (
        point
        for point, changed in enumerate(changes)
        if any(owned[int(name)][0].what == OPTIMIZER_TEMPORARIES for name, _ in changed)
    )
    end = next(update, len(changes))
    return RankRequests(lasting, state, [*chain(*of_points[:end])], [*chain(*of_points[end:])])


def _requests(changes: Sequence[Sequence[tuple[str, float]]]) -> Iterator[list[Request]]:
    """Yield the requests at each change of a device's memory.

    Args:
        changes: (name, bytes) of what is allocated or freed at each; every name occurs twice.
    """
    ends = {name: point for point, changed in enumerate(changes) for name, _ in changed}
    alive: dict[str, int] = {}
    begun: set[str] = set()
    for changed in changes:
        requests = [Request(name, 0) for name, _ in changed if alive.pop(name, 0)]
        new = {name: round(size) for name, size in changed if name not in begun}
        begun.update(new)
        for name, size in new.items():
            early = [other for other in alive if size < 0 and ends[other] == ends[name]]
            while size < 0 and early:
                requests.append(Request(early[0], 0))
                size += alive.pop(early.pop(0))
            new[name] = size
        alive |= {name: size for name, size in new.items() if size > 0}
        yield requests + [Request(name, size) for name, size in new.items() if size > 0]
