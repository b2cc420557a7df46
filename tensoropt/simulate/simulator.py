"""The step simulator: many strategies stepped through the moments of a step at once, one array over them all.

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

from tensoropt.costs.effects import Effects
from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.reductions import Reductions, reductions
from tensoropt.types import Floats, Indices

Axes = tuple[int, ...]
SOURCES = ("measured", "fitted", "data sheet")


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one step per strategy; bytes and seconds of one rank.

    Attributes:
        memory: (n, 5) the peak by kind, as in :data:`~tensoropt.simulate.recording.MEMORY_KINDS`.
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
    """Collectives of one moment over one set of axes, per choice: seconds of all, bytes of the largest."""

    seconds: Floats
    bytes: Floats


@dataclass
class _Share:
    """What one owner does at one moment: tables by its choice."""

    which: Indices
    bytes: Floats | None = None
    workspace: Floats | None = None
    local: Floats | None = None
    sends: dict[Axes, _Sends] = field(default_factory=dict)


def simulate(batch: Batch, recorder: StepRecorder | None = None) -> StepMetrics:
    """One step of every strategy of a batch.

    Args:
        recorder: of a batch of one strategy: is told all that happens.
    """
    return StepSimulator(batch, recorder).simulate()


class StepSimulator:
    """The state of a simulation: where time and memory of every strategy stand."""

    def __init__(self, batch: Batch, recorder: StepRecorder | None = None):
        assert recorder is None or batch.count == 1, "one strategy can be recorded, many have only figures"
        self.batch, self.recorder = batch, recorder
        n, schedule = batch.count, batch.schedule
        # One position more than there are moments: an effect "after" the last one lies there, and is never
        # reached.
        self.shares: list[list[_Share]] = [[] for _ in range(len(schedule.moments) + 1)]
        self.sources = np.zeros((n, len(SOURCES)))
        self.lasting = np.zeros((n, 3))
        for owner in batch.owners:
            self._lay_out(owner)
        self.alive = np.zeros((n, 2))
        self.time, self.compute, self.communication = np.zeros(n), np.zeros(n), np.zeros(n)
        self.since = np.zeros(n)  # seconds of work since the last collective
        self.left: dict[Axes, Floats] = {}  # bytes of those whose mark on that work is not counted yet
        self.turns = np.zeros(n)  # what coming and going has cost
        self.busy: dict[str, Floats] = {}
        # Below 0, so that a step without any memory has its first moment as peak.
        self.peak, self.at_peak = np.full(n, -1.0), np.zeros((n, 2))

    def _lay_out(self, owner: Owner) -> None:
        """Put an owner's effects where they take place."""
        choices, which = owner.effects.values, owner.effects.which
        found: dict[int, _Share] = {}
        seconds = np.zeros((len(choices), len(SOURCES)))
        lasting = np.array([[c.parameters, c.gradients, c.optimizer] for c in choices], dtype=float)
        if lasting.any():
            self.lasting += lasting[which]
        for number, choice in enumerate(choices):
            self._lay_out_choice(owner, number, choice, found, seconds)
        for position, share in found.items():
            # One order for all strategies, whichever others they are simulated with.
            share.sends = dict(sorted(share.sends.items()))
            self.shares[position].append(share)
        if seconds.any():
            self.sources += seconds[which]

    def _lay_out_choice(
        self, owner: Owner, number: int, choice: Effects, found: dict[int, _Share], seconds: Floats
    ) -> None:
        count = len(owner.effects.values)
        for e in choice.effects:
            # An effect after a moment takes place as the next one begins, whose peak it then belongs to.
            share = found.setdefault(owner.positions[e.when] + e.after, _Share(owner.effects.which))
            if e.kept or e.transient:
                share.bytes = np.zeros((count, 2)) if share.bytes is None else share.bytes
                share.bytes[number] += e.kept, e.transient
            if e.workspace_bytes:
                share.workspace = np.zeros(count) if share.workspace is None else share.workspace
                share.workspace[number] += e.workspace_bytes
            times = 1 if e.when.once else self.batch.mesh[0]
            if local_s := e.local_s + e.passing_s:
                share.local = np.zeros(count) if share.local is None else share.local
                share.local[number] += local_s
                seconds[number, SOURCES.index(e.source)] += local_s * times
            for send in e.sends:
                sends = share.sends.setdefault(send.axes, _Sends(np.zeros(count), np.zeros(count)))
                sends.seconds[number] += send.seconds
                # What a collective costs the work after it grows with its bytes and does not add up over
                # several in a row.
                sends.bytes[number] = max(sends.bytes[number], send.bytes)
                seconds[number, SOURCES.index(send.source)] += send.seconds * times

    def simulate(self) -> StepMetrics:
        """Go through all moments; once."""
        batch, schedule = self.batch, self.batch.schedule
        micro, everywhere = batch.mesh[0], np.ones(batch.count, dtype=bool)
        issued: dict[int, list[Reductions]] = {}
        for issue in reductions(batch):
            issued.setdefault(issue.position, []).append(issue)
        # One micro-batch is stepped through: all are alike, and what one keeps it has given back at its end.
        for position in range(schedule.last):
            self._advance(position)
            for issue in issued.get(position, ()):
                self._reduce(issue)
        self._count_slower_work(everywhere)
        # The work after the last collective is counted before this point, so that every micro-batch pays for
        # it.
        if micro > 1:
            self._repeat(micro)
            for issue in issued.get(schedule.last, ()):
                self._reduce(issue)
        # The optimizer waits for every bucket.
        for busy in self.busy.values():
            self.time = np.maximum(self.time, busy)
        for position in range(schedule.last, len(schedule.moments)):
            self._advance(position)
        self._count_slower_work(everywhere)
        if self.recorder is not None:
            self.recorder.finish(float(self.time[0]))
        # Transitions have no other source: where they were not measured they are 0.
        self.sources[:, SOURCES.index("measured")] += self.turns
        memory = np.concatenate([self.lasting, self.at_peak], axis=1)
        # Clipped, as rounding may leave the difference a last bit outside of these bounds.
        exposed = np.clip(self.time - self.compute, 0.0, self.communication)
        return StepMetrics(memory, self.time, self.compute, self.communication, exposed, self.sources)

    def _repeat(self, micro: int) -> None:
        """All micro-batches take as long as the first."""
        if self.recorder is not None:
            self.recorder.repeat(micro, float(self.time[0]))
        # Sources are not multiplied: _lay_out_choice has counted them once per micro-batch already.
        self.time, self.compute = self.time * micro, self.compute * micro
        self.communication, self.turns = self.communication * micro, self.turns * micro

    def _advance(self, position: int) -> None:
        """Go through one moment."""
        shares, recorder = self.shares[position], self.recorder
        if recorder is not None:
            recorder.begin(self.batch.schedule.moments[position], float(self.time[0]))
        if not shares:
            if recorder is not None:
                recorder.memory(float(self.time[0]), (0.0, 0.0), 0.0, self.alive[0].tolist())
            return
        workspace: Any = 0.0
        sends: dict[Axes, tuple[Any, Any]] = {}
        started_s, changed = float(self.time[0]), np.zeros(2)
        for share in shares:
            which = share.which
            if share.bytes is not None:
                self.alive += share.bytes[which]
                changed = changed + share.bytes[which[0]]
            if share.workspace is not None:
                workspace = workspace + share.workspace[which]
            if share.local is not None:
                seconds = share.local[which]
                self.since += seconds
                self.time += seconds
                self.compute += seconds
            for axes, each in share.sends.items():
                seconds, size = sends.get(axes, (0.0, 0.0))
                sends[axes] = seconds + each.seconds[which], np.maximum(size, each.bytes[which])
        if recorder is not None:
            recorder.memory(started_s, changed.tolist(), float(np.sum(workspace)), self.alive[0].tolist())
            recorder.work(started_s, float(self.time[0]))
        # One order for all strategies, whichever others they are simulated with.
        for axes in sorted(sends):
            self._wait(axes, *sends[axes])
        total = self.alive.sum(axis=1) + workspace
        higher = np.flatnonzero(total > self.peak)
        if len(higher):
            self.peak[higher] = total[higher]
            self.at_peak[higher, 0] = self.alive[higher, 0]
            # Transient at the peak includes the workspace, as in the recording.
            self.at_peak[higher, 1] = total[higher] - self.alive[higher, 0]

    def _count_slower_work(self, where: Any) -> None:
        """Count what the last collectives have cost the work since; of several in a row the worst."""
        longer = np.zeros(self.batch.count)
        worked = where & (self.since > 0)
        for axes, size in self.left.items():
            marked = worked & (size > 0)
            if marked.any():
                extra = self.batch.prices.communication.leaving_s(axes, self.since, size)
                longer = np.maximum(longer, np.where(marked, extra, 0.0))
                size[marked] = 0.0
        if self.recorder is not None:
            self.recorder.work(float(self.time[0]), float(self.time[0] + longer[0]))
        self.time += longer
        self.compute += longer
        self.turns += longer

    def _wait(self, axes: Axes, seconds: Floats, size: Floats) -> None:
        """Collectives that the device waits for; they queue behind what is on their links."""
        sending = seconds > 0
        seconds = seconds + self._turn(axes, sending, size)
        self.communication += seconds
        # The usual case: before any bucket is on a link nothing can queue.
        if not self.busy:
            if self.recorder is not None:
                self.recorder.send(axes, float(self.time[0]), float(seconds[0]))
            self.time += seconds
            return
        start = self.time.copy()
        for link in self.batch.overlap.links(axes):
            if link in self.busy:
                start = np.maximum(start, self.busy[link])
        if self.recorder is not None:
            self.recorder.send(axes, float(start[0]), float(seconds[0]))
        self.time = np.where(sending, start + seconds, self.time)
        for link in self.batch.overlap.links(axes):
            # Only links that buckets use are followed. A blocking collective occupies them as well: a later
            # bucket queues.
            if link in self.busy:
                self.busy[link] = np.where(sending, self.time, self.busy[link])

    def _turn(self, axes: Axes, sending: Any, size: Any) -> Floats:
        """Seconds that the first collective after some work takes longer (others find the ranks in step);
        notes that work will take longer after it."""
        # The work since the last collective is over now, so that its length is known and what it suffered is
        # counted.
        self._count_slower_work(sending)
        communication = self.batch.prices.communication
        extra = np.where(sending, communication.arriving_s(axes, self.since, size), 0.0)
        left = self.left.setdefault(axes, np.zeros(self.batch.count))
        np.copyto(left, np.maximum(left, size), where=sending)
        self.since = np.where(sending, 0.0, self.since)
        self.turns += extra
        return extra

    def _reduce(self, issue: Reductions) -> None:
        """Buckets of gradients that are complete in some strategies."""
        sends, which, overlap = issue.sends, issue.which, self.batch.overlap
        for axes in dict.fromkeys(send.axes for send in sends):
            # A position may issue buckets of several sets of axes; each set queues on links of its own.
            sending = np.array([send.axes == axes for send in sends])[which]
            rows = issue.rows[sending]
            seconds = np.array([send.seconds for send in sends])[which[sending]]
            if not overlap.beside:
                # The ranks wait for this bucket, so that it costs what a blocking collective costs, coming
                # from work included.
                waiting, size = np.zeros(self.batch.count, dtype=bool), np.zeros(self.batch.count)
                waiting[rows] = True
                size[rows] = np.array([send.bytes for send in sends])[which[sending]]
                seconds = seconds + self._turn(axes, waiting, size)[rows]
            self.communication[rows] += seconds
            start = self.time[rows]
            if overlap.beside:
                links = overlap.links(axes)
                for link in links:
                    start = np.maximum(start, self.busy.setdefault(link, np.zeros(self.batch.count))[rows])
                for link in links:
                    self.busy[link][rows] = start + seconds
            if self.recorder is not None and len(rows):
                self.recorder.reduction(axes, float(start[0]), float(seconds[0]))
            if not overlap.beside:
                self.time[rows] += seconds
        sources = np.array([[float(send.source == s) * send.seconds for s in SOURCES] for send in sends])
        self.sources[issue.rows] += sources[which]
