"""What a rank has alive of its messages: which it has asked for, and which of those it sent have arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tensoropt.pipeline.strategy import Action, schedule_named


def asked_for(actions: Sequence[Sequence[Action]]) -> list[list[Counter[tuple[bool, int]]]]:
    """Return, for each place and action, the messages that the place has asked for and not yet taken, as
    (whether it is a gradient, the stage that receives it).

    PyTorch's schedules of several stages per place ask for a message where its sender begins to make it, if
    all places take one action after another at the same pace.
    """
    place_of = {action.stage: place for place, own in enumerate(actions) for action in own}
    asked = [Counter[tuple[bool, int]]() for _ in actions]
    found: list[list[Counter[tuple[bool, int]]]] = [[] for _ in actions]
    sent: set[tuple[bool, int, int]] = set()
    while any(len(done) < len(own) for done, own in zip(found, actions, strict=True)):
        for place, own in enumerate(actions):
            if len(found[place]) == len(own):
                continue
            kind, stage, micro_batch = own[len(found[place])]
            back, beside = kind != "F", place_of.get(stage + 1 if kind != "F" else stage - 1)
            if kind != "W" and beside is not None:
                if (back, stage, micro_batch) not in sent:
                    continue
                asked[place][back, stage] -= beside != place
            found[place].append(asked[place].copy())
            target = stage - 1 if back else stage + 1
            if kind != "W" and target in place_of:
                sent.add((back, target, micro_batch))
                asked[place_of[target]][back, target] += place_of[target] != place
    return found


def taken_back(name: str, actions: Sequence[Sequence[Action]], stage: int) -> dict[int, tuple[int, ...]]:
    """Return, for each micro-batch of a stage, the earlier micro-batches whose gradients the previous stage
    has surely received by the time this micro-batch's forward input arrives.

    A message that a stage sends after a backward proves that it had received the input of that backward. A
    schedule that waits for its own messages has waited for all of them.
    """
    if not stage:
        return {}
    # The stage whose messages prove it: the sender of the gradient, or its receiver.
    witness = stage if schedule_named(name).waits else stage - 1
    own = next(actions_at for actions_at in actions if any(action.stage == witness for action in actions_at))
    reached, received, reported = {}, list[int](), 0
    for action in own:
        if action.stage == witness and action.kind in "BI":
            received.append(action.micro_batch)
        elif action.stage == witness and action.kind == "F":
            reached[action.micro_batch] = tuple(received[reported:])
            reported = len(received)
    return reached


def taken_on(
    name: str, actions: Sequence[Sequence[Action]], stage: int
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the micro-batches whose tensors the next stage has surely received, of a stage that has no
    backward: as it sends those of a later micro-batch (``("F", micro-batch)``), and where its backward would
    be (``("B", micro-batch)``); each once, and some never before the step is over.

    No gradient proves it. Schedules with one stage per place wait for what they sent before the first
    backward, and those that wait do so before the next message. With several, a later stage of the place
    proves it, whose forward has run.
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
