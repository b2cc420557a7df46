"""The owners of the bytes on the fullest rank of a pipeline, action by action.

Bytes are attributed to a stage and a micro-batch: the memory of a pipeline is composed of its stages' own
figures, which do not say what is alive tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.pipeline.memory import MemoryLedger, memory_of_actions
from tensoropt.pipeline.schedules import Action
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan.evaluate import Evaluation
from tensoropt.simulate.recording import MEMORY_KINDS, Owned

WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
LASTING = ("parameters", "gradients", "optimizer state")


def owned_by_place(
    strategy: PipelinedStrategy, stages: Sequence[Evaluation], place: int, actions: Sequence[Action]
) -> list[Owned]:
    """Return everything that a rank of a place has alive, each with the points of its memory curve between
    which it is alive."""
    ledger: MemoryLedger = []
    points = len(list(memory_of_actions(strategy, stages, place, actions, ledger)))
    words = [f"{WORDS[kind]} of micro-batch {m}, stage {stage}" for kind, stage, m in actions]
    words.append("the end of the step")
    found: list[Owned] = []
    for number in strategy.stages_at(place):
        sizes = stages[number].metrics.memory[0].tolist()
        for what, kind, size in zip(LASTING, MEMORY_KINDS, sizes, strict=False):
            if size:
                found.append((f"stage {number}", f"stage {number}", what, kind, size, 0, points, "", ""))
    alive: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    for point, sizes_at in enumerate([*ledger, {}]):
        # A change of size starts another row.
        for key, (first, size) in list(alive.items()):
            if sizes_at.get(key, 0.0) != size:
                del alive[key]
                until = words[point] if point < points else "the end of the step"
                found.append((*key, size, first, point, words[first], until))
        for key, size in sizes_at.items():
            if size and key not in alive:
                alive[key] = point, size
    return found
