"""Seconds of every operator and edge in a real step of a sharded plan, forward and backward."""

from __future__ import annotations

import bisect
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from tensoropt.engine.sharded_engine import ShardedEngine

_UNNUMBERED = 2**63
"""Autograd's sequence numbers from here on mark leaves."""
_NODES = 200


class StepStamps:
    """The seconds of one step's operators and edges on this rank.

    Attributes:
        forward_s, backward_s: by operator name, or by lowered node for edges and whole recomputed regions;
            summed over micro-batches. "" is the backward of leaves.
    """

    def __init__(self) -> None:
        self.forward_s = defaultdict[str, float](float)
        self.backward_s = defaultdict[str, float](float)
        self._numbers: list[int] = []
        self._owners: list[str] = []
        self._running: tuple[str, float] | None = None
        self.hooks: list[RemovableHandle] = []

    def forward(self, owner: str, number: int, seconds: float) -> None:
        """Record a node of the module and the sequence number of its first autograd node."""
        self.forward_s[owner] += seconds
        self._numbers.append(number)
        self._owners.append(owner)

    def owner_of(self, number: int) -> str:
        """Return the module node that made an autograd node."""
        if number >= _UNNUMBERED:
            return ""
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._owners[place] if place >= 0 else ""

    def begin_backward(self, owner: str) -> None:
        """Record the start of an autograd node."""
        if self._running is None:
            # The last node ends with its backward: what follows is the next micro-batch's forward.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self.end_backward()
        self._running = owner, time.perf_counter()

    def end_backward(self) -> None:
        """Record the end of the running autograd node."""
        if self._running is not None:
            owner, since = self._running
            self.backward_s[owner] += time.perf_counter() - since
        self._running = None


def median_seconds(steps: Sequence[StepStamps]) -> dict[str, dict[str, float]]:
    """Return ``forward_s`` and ``backward_s`` as medians over steps."""
    found: dict[str, dict[str, float]] = {}
    for way in ("forward_s", "backward_s") if steps else ():
        of_steps = [getattr(step, way) for step in steps]
        names = dict.fromkeys(name for seconds in of_steps for name in seconds)
        found[way] = {n: statistics.median(seconds.get(n, 0.0) for seconds in of_steps) for n in names}
    return found


class _Interpreter(fx.Interpreter):
    """Runs a lowered module and stamps its nodes. ``own_s``: the interpreter's seconds per node."""

    def __init__(self, module: fx.GraphModule, stamps: StepStamps, own_s: float = 0.0):
        super().__init__(module)
        self.stamps, self.own_s = stamps, own_s

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        since = time.perf_counter()
        result = super().run_node(n)
        seconds = time.perf_counter() - since - self.own_s
        self.stamps.forward(n.meta.get("operator", n.name), number, max(seconds, 0.0))
        return result

    def stamped(self, *args: Any) -> Any:
        results = self.run(*args)
        ends = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        seen = set(ends)
        while ends:
            node = ends.pop()
            owner = self.stamps.owner_of(node._sequence_nr())
            self.stamps.hooks.append(
                node.register_prehook(lambda _, owner=owner: self.stamps.begin_backward(owner))
            )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    ends.append(following)
        return results


@cache
def _interpreting_s() -> float:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(_NODES):
        node = graph.call_function(_nothing, (node,))
    graph.output((node,))
    stamps = StepStamps()
    _Interpreter(fx.GraphModule(torch.nn.Module(), graph), stamps).run(torch.zeros(1))
    return statistics.median(stamps.forward_s.values())


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x


@contextmanager
def stamped(engine: ShardedEngine) -> Iterator[StepStamps]:
    """Stamp the steps of an engine inside the context; ValueError if its device is not a CPU."""
    if engine.runtime.device.type != "cpu":
        raise ValueError("steps of GPUs are stamped by their profiler, not by the host's clock")
    stamps, module = StepStamps(), engine.lowered.module
    module.forward = _Interpreter(module, stamps, _interpreting_s()).stamped  # type: ignore[method-assign]
    try:
        yield stamps
    finally:
        del module.forward
        # Nodes of leaves outlive the step.
        for hook in stamps.hooks:
            hook.remove()
