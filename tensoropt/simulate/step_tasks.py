"""One strategy's step as tasks on a device and its links: what the walk adds up, laid out in time."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensoropt.simulate.batch import Issue, Play
from tensoropt.simulate.simulator import Axes, Walk
from tensoropt.simulate.step_schedule import Moment
from tensoropt.simulate.timeline import Holding, Task, Timeline, schedule

DEVICE = "device"
HELD_KINDS, MOVING_KINDS = ("parameters", "gradients", "optimizer"), ("kept", "transient")
SPOT_KIND = "transient"


@dataclass
class _Draft:
    name: str
    duration_s: float
    resources: tuple[str, ...]
    after: tuple[int, ...]
    phase: str
    group: str
    axes: Axes | None
    allocates: list[Holding] = field(default_factory=list)
    frees: list[Holding] = field(default_factory=list)

    def task(self) -> Task:
        return Task(
            name=self.name,
            duration_s=self.duration_s,
            resources=self.resources,
            after=self.after,
            allocates=tuple(self.allocates),
            frees=tuple(self.frees),
            phase=self.phase,
            group=self.group,
        )


def schedule_of(play: Play) -> tuple[Timeline, tuple[Axes | None, ...]]:
    """The timeline of a play of one strategy, and per task the mesh axes of its collective (None: none)."""
    assert play.count == 1, "one strategy has a timeline, many have only figures"
    return _Drafting(play).run()


class _Drafting:
    def __init__(self, play: Play):
        self.play, self.walk = play, Walk(play)
        self.drafts: list[_Draft] = []
        self.chain: tuple[int, ...] = ()
        self.beside: list[int] = []
        self.since_s = 0.0
        self.left: dict[Axes, float] = {}

    def run(self) -> tuple[Timeline, tuple[Axes | None, ...]]:
        play, course = self.play, self.play.course
        issued: dict[int, list[Issue]] = {}
        for issue in play.issues():
            issued.setdefault(issue.moment, []).append(issue)
        for _ in range(play.mesh[0]):
            self.since_s, self.left = 0.0, {}  # as in the walk, which goes through one micro-batch for all
            for moment in range(course.last):
                self._moment(moment)
                self._reduce(issued.get(moment, []))
            self._settle(course.moments[course.last - 1])
        self._reduce(issued.get(course.last, []))
        self.chain = (*self.chain, *self.beside)
        for moment in range(course.last, len(course.moments)):
            self._moment(moment)
        self._settle(course.moments[-1])
        held = zip(HELD_KINDS, self.walk.held[0], strict=True)
        timeline = schedule(
            [draft.task() for draft in self.drafts], [(DEVICE, kind, float(size)) for kind, size in held]
        )
        return timeline, tuple(draft.axes for draft in self.drafts)

    def _moment(self, number: int) -> None:
        """What is done at a moment, then what is waited for; bytes begin with its first task."""
        local_s, spot, changes = 0.0, 0.0, [0.0, 0.0]
        sends: dict[Axes, tuple[float, float]] = {}
        for share in self.walk.shares[number]:
            row = share.which[0]
            local_s += 0.0 if share.local is None else float(share.local[row])
            spot += 0.0 if share.spot is None else float(share.spot[row])
            if share.bytes is not None:
                changes = [a + float(b) for a, b in zip(changes, share.bytes[row], strict=True)]
            for axes, each in share.sends.items():
                if each.seconds[row]:
                    seconds, size = sends.get(axes, (0.0, 0.0))
                    sends[axes] = seconds + float(each.seconds[row]), max(size, float(each.bytes[row]))
        taken = [(DEVICE, k, b) for k, b in zip(MOVING_KINDS, changes, strict=True) if b > 0]
        given = [(DEVICE, k, -b) for k, b in zip(MOVING_KINDS, changes, strict=True) if b < 0]
        if given and self.chain:
            self.drafts[self.chain[0]].frees += given
        spots = [(DEVICE, SPOT_KIND, spot)] if spot else []
        if not (local_s or sends or taken or spots):
            return
        moment, first = self.play.course.moments[number], len(self.drafts)
        self.since_s += local_s
        if local_s or not sends:
            self._add(moment, local_s, None)
        for axes, (seconds, size) in sorted(sends.items()):
            self._settle(moment)
            self._add(moment, seconds + self._turn(axes, size), axes)
        self.drafts[first].allocates += [*taken, *spots]
        self.drafts[-1].frees += spots

    def _turn(self, axes: Axes, size: float) -> float:
        """See :class:`~tensoropt.simulate.simulator.Walk`."""
        assert self.play.prices is not None, "what is sent has a price"
        costs = self.play.prices.communication
        extra, self.since_s = float(costs.arriving_s(axes, self.since_s, size)), 0.0
        self.left[axes] = max(self.left.get(axes, 0.0), size)
        return extra

    def _settle(self, moment: Moment) -> None:
        """See :class:`~tensoropt.simulate.simulator.Walk`."""
        if not self.left or not self.since_s:
            return
        assert self.play.prices is not None, "what is sent has a price"
        costs = self.play.prices.communication
        longer = max(float(costs.leaving_s(axes, self.since_s, size)) for axes, size in self.left.items())
        self.left = {}
        if longer:
            self._add(moment, longer, None)

    def _links(self, axes: Axes) -> tuple[str, ...]:
        return tuple(f"link {name}" for name in self.play.overlap.links(axes))

    def _add(self, moment: Moment, seconds: float, axes: Axes | None) -> None:
        resources = (DEVICE,) if axes is None else (DEVICE, *self._links(axes))
        draft = _Draft(moment.words, seconds, resources, self.chain, moment.phase, moment.group, axes)
        self.drafts.append(draft)
        self.chain = (len(self.drafts) - 1,)

    def _reduce(self, issues: list[Issue]) -> None:
        for issue in issues:
            send = issue.sends[int(issue.which[0])]
            links = self._links(send.axes)
            resources = links if self.play.overlap.beside else (DEVICE, *links)
            if not self.play.overlap.beside:
                self._settle(self.play.course.moments[issue.moment])
            seconds = send.seconds + (0.0 if self.play.overlap.beside else self._turn(send.axes, send.bytes))
            draft = _Draft(
                "reduction of gradients", seconds, resources, self.chain, "backward", "", send.axes
            )
            self.drafts.append(draft)
            if self.play.overlap.beside:
                self.beside.append(len(self.drafts) - 1)
            else:
                self.chain = (len(self.drafts) - 1,)
