"""The walk through a step: one array over the strategies, moment after moment.

What overlaps is what the executor overlaps: resharding and gathering block, forward and backward; a bucket
of gradients is reduced from the moment its last gradient is there, beside the rest of backward
(:class:`~tensoropt.simulate.overlap.Overlap`). Two collectives on one level of links queue. With several
micro-batches buckets are reduced after the last one. Before the optimizer everything is waited for.
A collective to which ranks come from work takes longer than one that follows another, and so does the work
after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensoropt.simulate.batch import Issue, Owner, Play
from tensoropt.simulate.candidates import Indices

Floats = NDArray[np.float64]
Axes = tuple[int, ...]
SOURCES = ("measured", "fitted", "data sheet")


@dataclass(frozen=True)
class Played:
    """Figures of one step per strategy; bytes and seconds of one rank.

    Attributes:
        memory: (n, 5) the peak by kind, parameters, gradients, optimizer, kept, transient.
        total_s: the step.
        compute_s: device seconds: operators, copies, additions, optimizer.
        communication_s: seconds of all collectives.
        exposed_s: of these, what the device waits for; ``total_s - compute_s``.
        sources: (n, 3) seconds by where they come from, as in ``SOURCES``.
    """

    memory: Floats
    total_s: Floats
    compute_s: Floats
    communication_s: Floats
    exposed_s: Floats
    sources: Floats


@dataclass
class _Sends:
    """Collectives of one moment over one set of axes, by piece: seconds of all, bytes of the largest."""

    seconds: Floats
    bytes: Floats


@dataclass
class _Share:
    """What one owner does at one moment: tables by piece."""

    which: Indices
    bytes: Floats | None = None
    spot: Floats | None = None
    local: Floats | None = None
    sends: dict[Axes, _Sends] = field(default_factory=dict)


class Walk:
    def __init__(self, play: Play):
        self.play = play
        n, course = play.count, play.course
        self.shares: list[list[_Share]] = [[] for _ in range(len(course.moments) + 1)]
        self.sources = np.zeros((n, len(SOURCES)))
        self.held = np.zeros((n, 3))
        for owner in play.owners:
            self._place(owner)
        self.alive = np.zeros((n, 2))
        self.time, self.compute, self.communication = np.zeros(n), np.zeros(n), np.zeros(n)
        self.since = np.zeros(n)  # seconds of work since the last collective
        self.left: dict[Axes, Floats] = {}  # bytes of those whose mark on that work is not counted yet
        self.turns = np.zeros(n)  # what coming and going has cost
        self.busy: dict[str, Floats] = {}
        self.peak, self.at_peak = np.full(n, -1.0), np.zeros((n, 2))

    def _place(self, owner: Owner) -> None:
        """Tables of an owner's pieces at the moments they touch."""
        count, micro = len(owner.pieces), self.play.mesh[0]
        found: dict[int, _Share] = {}
        seconds = np.zeros((count, len(SOURCES)))
        constant = np.array([[p.parameters, p.gradients, p.optimizer] for p in owner.pieces], dtype=float)
        if constant.any():
            self.held += constant[owner.which]
        for number, piece in enumerate(owner.pieces):
            for e in piece.effects:
                moment = owner.slots[e.slot] + e.later
                share = found.setdefault(moment, _Share(owner.which))
                if e.kept or e.transient:
                    share.bytes = np.zeros((count, 2)) if share.bytes is None else share.bytes
                    share.bytes[number] += e.kept, e.transient
                if e.spot:
                    share.spot = np.zeros(count) if share.spot is None else share.spot
                    share.spot[number] += e.spot
                times = micro if moment < self.play.course.last else 1
                if e.local_s:
                    share.local = np.zeros(count) if share.local is None else share.local
                    share.local[number] += e.local_s
                    seconds[number, SOURCES.index(e.source)] += e.local_s * times
                for send in e.sends:
                    sends = share.sends.setdefault(send.axes, _Sends(np.zeros(count), np.zeros(count)))
                    sends.seconds[number] += send.seconds
                    sends.bytes[number] = max(sends.bytes[number], send.bytes)
                    seconds[number, SOURCES.index(send.source)] += send.seconds * times
        for moment, share in found.items():
            # One order for all strategies, whichever others they are played with.
            share.sends = dict(sorted(share.sends.items()))
            self.shares[moment].append(share)
        if seconds.any():
            self.sources += seconds[owner.which]

    def run(self) -> Played:
        play, course = self.play, self.play.course
        micro, everywhere = play.mesh[0], np.ones(play.count, dtype=bool)
        issued: dict[int, list[Issue]] = {}
        for issue in play.issues():
            issued.setdefault(issue.moment, []).append(issue)
        for moment in range(course.last):
            self.step(moment)
            for issue in issued.get(moment, ()):
                self._reduce(issue)
        self._settle(everywhere)
        if micro > 1:
            self.time, self.compute = self.time * micro, self.compute * micro
            self.communication, self.turns = self.communication * micro, self.turns * micro
            for issue in issued.get(course.last, ()):
                self._reduce(issue)
        for busy in self.busy.values():
            self.time = np.maximum(self.time, busy)
        for moment in range(course.last, len(course.moments)):
            self.step(moment)
        self._settle(everywhere)
        self.sources[:, SOURCES.index("measured")] += self.turns
        memory = np.concatenate([self.held, self.at_peak], axis=1)
        exposed = np.clip(self.time - self.compute, 0.0, self.communication)
        return Played(memory, self.time, self.compute, self.communication, exposed, self.sources)

    def step(self, moment: int) -> Any:
        """Go through one moment; gives the bytes alive during it only."""
        spot: Any = 0.0
        if not self.shares[moment]:
            return spot
        sends: dict[Axes, tuple[Any, Any]] = {}
        for share in self.shares[moment]:
            which = share.which
            if share.bytes is not None:
                self.alive += share.bytes[which]
            if share.spot is not None:
                spot = spot + share.spot[which]
            if share.local is not None:
                seconds = share.local[which]
                self.since += seconds
                self.time += seconds
                self.compute += seconds
            for axes, each in share.sends.items():
                seconds, size = sends.get(axes, (0.0, 0.0))
                sends[axes] = seconds + each.seconds[which], np.maximum(size, each.bytes[which])
        for axes in sorted(sends):
            self._wait(axes, *sends[axes])
        total = self.alive.sum(axis=1) + spot
        higher = np.flatnonzero(total > self.peak)
        if len(higher):
            self.peak[higher] = total[higher]
            self.at_peak[higher, 0] = self.alive[higher, 0]
            self.at_peak[higher, 1] = total[higher] - self.alive[higher, 0]
        return spot

    def _settle(self, where: Any) -> None:
        """Count what the last collectives have cost the work since; of several in a row the worst."""
        prices, longer = self.play.prices, np.zeros(self.play.count)
        worked = where & (self.since > 0)
        for axes, size in self.left.items():
            assert prices is not None, "what is sent has a price"
            marked = worked & (size > 0)
            if marked.any():
                extra = prices.communication.leaving_s(axes, self.since, size)
                longer = np.maximum(longer, np.where(marked, extra, 0.0))
                size[marked] = 0.0
        self.time += longer
        self.compute += longer
        self.turns += longer

    def _wait(self, axes: Axes, seconds: Floats, size: Floats) -> None:
        """Collectives that the device waits for; they queue behind what is on their links."""
        sending = seconds > 0
        seconds = seconds + self._turn(axes, sending, size)
        self.communication += seconds
        if not self.busy:
            self.time += seconds
            return
        start = self.time.copy()
        for link in self.play.overlap.links(axes):
            if link in self.busy:
                start = np.maximum(start, self.busy[link])
        self.time = np.where(sending, start + seconds, self.time)
        for link in self.play.overlap.links(axes):
            if link in self.busy:
                self.busy[link] = np.where(sending, self.time, self.busy[link])

    def _turn(self, axes: Axes, sending: Any, size: Any) -> Floats:
        """Seconds that the first collective after some work takes longer (others find the ranks in step);
        notes that work will take longer after it."""
        prices = self.play.prices
        assert prices is not None, "what is sent has a price"
        self._settle(sending)
        extra = np.where(sending, prices.communication.arriving_s(axes, self.since, size), 0.0)
        left = self.left.setdefault(axes, np.zeros(self.play.count))
        np.copyto(left, np.maximum(left, size), where=sending)
        self.since = np.where(sending, 0.0, self.since)
        self.turns += extra
        return extra

    def _reduce(self, issue: Issue) -> None:
        """Buckets of gradients that are complete in some strategies."""
        sends, which = issue.sends, issue.which
        for axes in dict.fromkeys(send.axes for send in sends):
            sending = np.array([send.axes == axes for send in sends])[which]
            rows = issue.rows[sending]
            seconds = np.array([send.seconds for send in sends])[which[sending]]
            if not self.play.overlap.beside:
                waiting, size = np.zeros(self.play.count, dtype=bool), np.zeros(self.play.count)
                waiting[rows] = True
                size[rows] = np.array([send.bytes for send in sends])[which[sending]]
                seconds = seconds + self._turn(axes, waiting, size)[rows]
            self.communication[rows] += seconds
            if not self.play.overlap.beside:
                self.time[rows] += seconds
                continue
            links = self.play.overlap.links(axes)
            start = self.time[rows]
            for link in links:
                start = np.maximum(start, self.busy.setdefault(link, np.zeros(self.play.count))[rows])
            for link in links:
                self.busy[link][rows] = start + seconds
        sources = np.array([[float(send.source == s) * send.seconds for s in SOURCES] for send in sends])
        self.sources[issue.rows] += sources[which]
