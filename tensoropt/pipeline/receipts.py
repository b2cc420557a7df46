"""When the places of a pipeline allocate buffers for what they receive, and when what they sent has surely
arrived.

PyTorch's schedules with one stage per place ask for a message just before they need it. Those with several
ask for it as soon as it is under way by a count of turns, which the places take in order, so the buffer may
be allocated long before it is used. The same PyTorch code that lowers such schedules for a run lowers them
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tensoropt.pipeline.schedules import Action, place_actions, schedule_named, stage_place


class Receipt(NamedTuple):
    """A message that a stage waits for.

    Attributes:
        back: whether it brings a gradient, from the next stage.
        stage: the stage that receives it.
        micro_batch: the micro-batch that it belongs to.
    """

    back: bool
    stage: int
    micro_batch: int


@lru_cache(maxsize=256)
def receipts(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[tuple[tuple[Receipt, ...], ...], ...]:
    """Return, for each place and action, the messages that are asked for after the previous action.

    Raises:
        PlanError: such a pipeline cannot be run.
    """
    actions = place_actions(name, places, per_place, micro_batches)
    if not schedule_named(name).several:
        return tuple(tuple(_needed(name, places, per_place, one) for one in own) for own in actions)
    return _early(name, places, per_place, actions)


def _needed(name: str, places: int, per_place: int, action: Action) -> tuple[Receipt, ...]:
    """Return what an action has to wait for, if another place sends it."""
    kind, stage, micro_batch = action
    sender = stage - 1 if kind == "F" else stage + 1
    if kind == "W" or not 0 <= sender < places * per_place:
        return ()
    own, other = (stage_place(name, places, one) for one in (stage, sender))
    return () if own == other else (Receipt(kind != "F", stage, micro_batch),)


def _early(
    name: str, places: int, per_place: int, actions: Sequence[Sequence[Action]]
) -> tuple[tuple[tuple[Receipt, ...], ...], ...]:
    # Imported only here, as importing PyTorch's distributed part takes a while.
    from torch.distributed.pipelining.schedules import (
        _Action,
        _add_reduce_grad,
        _add_send_recv,
        _add_unshard_reshard,
        _ComputationType,
    )

    kinds = {
        "F": _ComputationType.FORWARD,
        "B": _ComputationType.FULL_BACKWARD,
        "I": _ComputationType.BACKWARD_INPUT,
        "W": _ComputationType.BACKWARD_WEIGHT,
    }
    words = {kind: letter for letter, kind in kinds.items()}
    taken = {}
    micro_batches = 1 + max(action.micro_batch for own in actions for action in own)
    for place, own in enumerate(actions):
        theirs = [_Action(action.stage, kinds[action.kind], action.micro_batch) for action in own]
        taken[place] = _add_reduce_grad(_add_unshard_reshard([*theirs]), micro_batches)  # type: ignore[arg-type]
    lowered = _add_send_recv(
        taken,  # type: ignore[arg-type]
        stage_to_rank=lambda stage: stage_place(name, places, stage),
        num_stages=places * per_place,
    )
    found = []
    for place in range(places):
        rows: list[tuple[Receipt, ...]] = []
        asked: list[Receipt] = []
        for one in lowered[place]:
            if one.computation_type in (_ComputationType.RECV_F, _ComputationType.RECV_B):
                assert one.microbatch_index is not None
                back = one.computation_type == _ComputationType.RECV_B
                asked.append(Receipt(back, one.stage_index, one.microbatch_index))
            elif one.computation_type in words:
                rows.append(tuple(asked))
                asked = []
        found.append(tuple(rows))
    return tuple(found)


def taken_back(name: str, actions: Sequence[Sequence[Action]], stage: int) -> dict[int, tuple[int, ...]]:
    """Return, for each micro-batch of a stage, the micro-batches whose gradients, sent back by the stage,
    have surely reached the previous stage once the input of this forward has arrived from there.

    What a stage sends after a backward proves that it had received the input of this backward. A schedule
    that waits for what it sends has waited for all of it.
    """
    if not stage:
        return {}
    # The stage whose messages prove it: the sender of the gradient, or its receiver.
    told = stage if schedule_named(name).waits else stage - 1
    own = next(of for of in actions if any(action.stage == told for action in of))
    found, taken, reported = {}, list[int](), 0
    for action in own:
        if action.stage == told and action.kind in "BI":
            taken.append(action.micro_batch)
        elif action.stage == told and action.kind == "F":
            found[action.micro_batch] = tuple(taken[reported:])
            reported = len(taken)
    return found
