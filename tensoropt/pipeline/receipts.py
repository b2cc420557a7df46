"""The actions at which a pipeline's ranks post receives, and know that their messages have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tensoropt.pipeline.strategy import Action, place_actions, schedule_named, stage_place


def taken_back(name: str, actions: Sequence[Sequence[Action]], stage: int) -> dict[int, tuple[int, ...]]:
    """Return, for each forward, the micro-batches whose gradients the previous stage has surely received.

    The arrival of the forward's input proves it: the previous stage sent the input after its own backwards,
    which needed these gradients. In a schedule that waits for each send, the end of the send proves it.
    """
    if not stage:
        return {}
    # The stage whose messages are the proof: the sender of the gradient, or its receiver.
    witness = stage if schedule_named(name).waits else stage - 1
    own = (action for actions_at in actions for action in actions_at if action.stage == witness)
    reached, received = dict[int, tuple[int, ...]](), list[int]()
    for kind, _, micro_batch in own:
        if kind in "BI":
            received.append(micro_batch)
        elif kind == "F":
            reached[micro_batch] = tuple(received)
            received.clear()
    return reached


def taken_on(
    name: str, actions: Sequence[Sequence[Action]], stage: int
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the micro-batches that the next stage has surely received from a stage without backward.

    Keys name the moment: ``("F", m)`` when activations of micro-batch m are sent, ``("B", m)`` when its
    backward would run. No gradient proves the receipt. A schedule with one stage per device group waits for
    its sends before the first backward. With several, a later stage on the same devices, if there is one, has
    then run the micro-batch's forward, which proves it.
    """
    schedule, found = schedule_named(name), dict[tuple[str, int], tuple[int, ...]]()
    if stage == max(action.stage for actions_at in actions for action in actions_at):
        return found
    own = next(actions_at for actions_at in actions if any(action.stage == stage for action in actions_at))
    proven = any(action.stage > stage for action in own)
    sent: list[int] = []
    for kind, of_stage, micro_batch in own:
        if of_stage != stage or kind == "W":
            continue
        if schedule.several:
            found["F" if kind == "F" else "B", micro_batch] = (micro_batch,) * (proven and kind != "F")
            continue
        taken = sent if kind != "F" or schedule.waits else []
        found["F" if kind == "F" else "B", micro_batch] = tuple(taken)
        taken.clear()
        if kind == "F":
            sent.append(micro_batch)
    return found


def _asked_for(name: str, places: int, per_place: int, micro_batches: int) -> dict[Action, int]:
    """Return action that needs a message -> index of the action right before which its receive is posted.

    Indices count the actions of the receiving rank from 0. In schedules with several stages per device group,
    PyTorch orders all actions by turns of the groups, one action per turn, and a receive is posted directly
    after the turn that sends the message. In other schedules each receive is posted directly before the
    action that needs the message, and the result is empty.
    """
    schedule, every = schedule_named(name), place_actions(name, places, per_place, micro_batches)
    asked, done, stages = dict[Action, int](), [0] * places, places * per_place
    back = "I" if schedule.apart else "B"
    while schedule.several and any(n < len(own) for n, own in zip(done, every, strict=True)):
        before = sum(done)
        for place, own in enumerate(every):
            if done[place] == len(own):
                continue
            kind, stage, micro_batch = action = own[done[place]]
            sender, to = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            remote = 0 <= sender < stages and stage_place(name, places, sender) != place
            if kind != "W" and remote and action not in asked:
                continue
            done[place] += 1
            if kind != "W" and 0 <= to < stages and (there := stage_place(name, places, to)) != place:
                asked[Action("F" if kind == "F" else back, to, micro_batch)] = done[there]
        assert sum(done) > before, f"the places of {name} wait for each other"
    return asked


class _Messages(NamedTuple):
    """The actions (forwards and backwards) at which receives are posted, and at which receipt is proven.

    Attributes:
        asked: action that needs a message -> the index, among its rank's actions, of the action right before
            which the receive is posted.
        came: for each stage, a message that it sends -> the stage's action that proves the receipt. A message
            is (``F`` for activations or ``B`` for gradients, micro-batch), an action (kind, stage,
            micro-batch). The kind ``BI`` stands for ``B`` or ``I``, whichever the schedule has.
    """

    asked: Mapping[Action, int]
    came: tuple[Mapping[tuple[str, int], tuple[str, int, int]], ...]


@lru_cache(maxsize=256)
def messages_of(name: str, places: int, per_place: int, micro_batches: int) -> _Messages:
    """Return the actions at which a schedule posts receives, and at which messages are surely received."""
    every, came = place_actions(name, places, per_place, micro_batches), []
    for stage in range(places * per_place):
        known = {}
        for forward, taken in taken_back(name, every, stage).items():
            known.update({("B", m): ("F", stage, forward) for m in taken})
        for (kind, behind), taken in taken_on(name, every, stage).items():
            known.update({("F", m): ("F" if kind == "F" else "BI", stage, behind) for m in taken})
        came.append(known)
    return _Messages(_asked_for(name, places, per_place, micro_batches), tuple(came))
