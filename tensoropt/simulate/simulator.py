"""The step simulator: many strategies stepped through the moments of a step at once, one array over them all.

What overlaps is what the executor overlaps: resharding and gathering block, forward and backward; a bucket
of gradients is reduced from the moment its last gradient is there, beside the rest of backward
(:class:`~tensoropt.simulate.overlap.Overlap`). Two collectives on one level of links queue. With several
micro-batches buckets are reduced after the last one. Before the optimizer everything is waited for.
A collective to which ranks come from work takes longer than one that follows another, and so does the work
after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensoropt.simulate.batch import Batch, Stack
from tensoropt.simulate.effect_tables import SOURCES, Axes, Cells, Place
from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.reductions import Reductions, reductions
from tensoropt.types import Floats, Indices


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
    """Collectives of one moment over one set of axes: per strategy seconds of all, bytes of the largest."""

    seconds: Floats
    bytes: Floats


def simulate(batch: Batch, recorder: StepRecorder | None = None) -> StepMetrics:
    """One step of every strategy of a batch.

    Args:
        recorder: of a batch of one strategy: is told all that happens.
    """
    return StepSimulator(batch, recorder).simulate()


class StepSimulator:
    """The state of a simulation: where time and memory of every strategy stand.

    What happens at the moments is laid out first, for all strategies at once. Bytes that are alive and seconds
    of work are then sums along the moments. Only collectives are gone through one after the other: how long
    one takes, and when it starts, depends on those before it.
    """

    def __init__(self, batch: Batch, recorder: StepRecorder | None = None):
        assert recorder is None or batch.count == 1, "one strategy can be recorded, many have only figures"
        self.batch, self.recorder = batch, recorder
        n, moments = batch.count, len(batch.schedule.moments)
        # One position more than there are moments: an effect "after" the last one lies there, and is never
        # reached.
        self.kept, self.transient = np.zeros((moments + 1, n)), np.zeros((moments + 1, n))
        self.workspace, self.local = np.zeros((moments + 1, n)), np.zeros((moments + 1, n))
        self.sends: dict[int, dict[Axes, _Sends]] = {}
        self.sources, self.lasting = np.zeros((n, len(SOURCES))), np.zeros((n, 3))
        for stack in batch.stacks:
            self._lay_out(stack)
        # To its last bit no strategy's time may depend on when others send, so that work is summed up from
        # the beginning of the step, and not from one collective to the next. Where time stands is
        # ``worked + waited``, what of it is computing ``worked + slowed``.
        self.work = np.cumsum(self.local, axis=0)
        self.worked, self.waited, self.slowed = np.zeros(n), np.zeros(n), np.zeros(n)
        self.communication = np.zeros(n)
        self.at_last = np.zeros(n)  # the work that was done by the last collective
        self.left: dict[Axes, Floats] = {}  # bytes of those whose mark on that work is not counted yet
        self.turns = np.zeros(n)  # what coming and going has cost
        self.busy: dict[str, Floats] = {}

    def _lay_out(self, stack: Stack) -> None:
        """Put the effects of alike owners where they take place."""
        tables, used, which = stack.kind.tables, stack.used, stack.which
        for total, figures in ((self.lasting, tables.lasting), (self.sources, tables.seconds)):
            table = np.array([figures[number] for number in used.tolist()], dtype=float)
            if table.any():
                for numbers in which:
                    total += table[numbers]
        for target, by_place in (
            (self.kept, tables.kept),
            (self.transient, tables.transient),
            (self.workspace, tables.workspace),
            (self.local, tables.local),
        ):
            for place, cells in by_place.items():
                figures = cells.of(used, tables.count)
                if figures.any():
                    _add(target, stack.positions(place), figures[which])
        for (place, axes), cells in tables.sends.items():
            self._lay_out_sends(stack, place, axes, *cells)

    def _lay_out_sends(self, stack: Stack, place: Place, axes: Axes, seconds: Cells, size: Cells) -> None:
        count = stack.kind.tables.count
        takes, largest = seconds.of(stack.used, count), size.of(stack.used, count)
        if not largest.any() and not takes.any():
            return
        sending = ((largest > 0) | (takes > 0))[stack.which].any(axis=1)
        owners = np.flatnonzero(sending)
        which = stack.which[owners]
        for position, of_seconds, of_bytes in zip(
            stack.positions(place)[owners].tolist(), takes[which], largest[which], strict=True
        ):
            at = self.sends.setdefault(position, {})
            if axes in at:
                of_seconds, of_bytes = at[axes].seconds + of_seconds, np.maximum(at[axes].bytes, of_bytes)
            at[axes] = _Sends(of_seconds, of_bytes)

    def simulate(self) -> StepMetrics:
        """Go through all moments; once."""
        batch, schedule = self.batch, self.batch.schedule
        micro, moments = batch.mesh[0], len(schedule.moments)
        everywhere, memory = np.ones(batch.count, dtype=bool), self._memory()
        issued: dict[int, list[Reductions]] = {}
        for issue in reductions(batch):
            issued.setdefault(issue.position, []).append(issue)
        after_all = issued.pop(schedule.last, []) if micro > 1 else []
        # One micro-batch is stepped through: all are alike, and what one keeps it has given back at its end.
        self._advance(range(schedule.last), issued)
        self._count_slower_work(everywhere)
        # The work after the last collective is counted before this point, so that every micro-batch pays for
        # it.
        if micro > 1:
            self._repeat(micro)
            for issue in after_all:
                self._reduce(issue)
        # The optimizer waits for every bucket.
        for busy in self.busy.values():
            self.waited = np.maximum(self.waited, busy - self.worked)
        self._advance(range(schedule.last, moments), {})
        self._count_slower_work(everywhere)
        if self.recorder is not None:
            self.recorder.finish(float(self.time[0]))
        # Transitions have no other source: where they were not measured they are 0.
        self.sources[:, SOURCES.index("measured")] += self.turns
        time, compute = self.time, self.worked + self.slowed
        # Clipped, as rounding may leave the difference a last bit outside of these bounds.
        exposed = np.clip(time - compute, 0.0, self.communication)
        return StepMetrics(memory, time, compute, self.communication, exposed, self.sources)

    def _memory(self) -> Floats:
        """(n, 5) the peak by kind, the first of several; makes ``kept`` and ``transient`` what is alive."""
        if self.recorder is not None:
            self.changed = np.stack([self.kept[:, 0], self.transient[:, 0]], axis=1)
        for changes in (self.kept, self.transient):
            np.cumsum(changes, axis=0, out=changes)
        total = (self.kept + self.transient + self.workspace)[:-1]
        strategies = np.arange(self.batch.count)
        if not len(total):
            return np.concatenate([self.lasting, np.zeros((len(strategies), 2))], axis=1)
        at = np.argmax(total, axis=0)
        kept = self.kept[at, strategies]
        # Transient at the peak includes the workspace, as in the recording.
        at_peak = np.stack([kept, total[at, strategies] - kept], axis=1)
        return np.concatenate([self.lasting, at_peak], axis=1)

    @property
    def time(self) -> Floats:
        """Seconds since the step began."""
        return self.worked + self.waited

    def _repeat(self, micro: int) -> None:
        """All micro-batches take as long as the first."""
        if self.recorder is not None:
            self.recorder.repeat(micro, float(self.time[0]))
        # Sources are not multiplied: EffectTables has counted them once per micro-batch already.
        self.waited, self.slowed = self.time * micro, (self.worked + self.slowed) * micro
        # Work goes on being summed up from where the first micro-batch has left it.
        self.waited, self.slowed = self.waited - self.worked, self.slowed - self.worked
        self.communication, self.turns = self.communication * micro, self.turns * micro

    def _advance(self, positions: range, issued: Mapping[int, Sequence[Reductions]]) -> None:
        """Go through moments that follow one another, and issue the buckets that are complete after each."""
        # At moments without collectives there is only work, which is summed up already; a recording has them
        # all.
        for position in positions:
            if self.recorder is not None:
                self._record(self.recorder, position)
            elif position not in self.sends and position not in issued:
                continue
            self.worked = self.work[position]
            # One order for all strategies, whichever others they are simulated with.
            for axes, sends in sorted(self.sends.get(position, {}).items()):
                self._wait(axes, sends.seconds, sends.bytes)
            for issue in issued.get(position, ()):
                self._reduce(issue)
        if len(positions):
            self.worked = self.work[positions[-1]]

    def _record(self, recorder: StepRecorder, position: int) -> None:
        """Tell of a moment's memory and work."""
        begun_s, done_s = float(self.time[0]), float(self.work[position, 0] + self.waited[0])
        recorder.begin(self.batch.schedule.moments[position], begun_s)
        alive = float(self.kept[position, 0]), float(self.transient[position, 0])
        recorder.memory(begun_s, self.changed[position], float(self.workspace[position, 0]), alive)
        recorder.work(begun_s, done_s)

    def _count_slower_work(self, where: Any) -> None:
        """Count what the last collectives have cost the work since; of several in a row the worst."""
        longer = np.zeros(self.batch.count)
        since = self.worked - self.at_last
        worked = where & (since > 0)
        for axes, size in self.left.items():
            marked = worked & (size > 0)
            if marked.any():
                extra = self.batch.prices.communication.leaving_s(axes, since, size)
                longer = np.maximum(longer, np.where(marked, extra, 0.0))
                size[marked] = 0.0
        if self.recorder is not None:
            self.recorder.work(float(self.time[0]), float(self.time[0] + longer[0]))
        self.waited += longer
        self.slowed += longer
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
            self.waited += seconds
            return
        now = start = self.time
        for link in self.batch.overlap.links(axes):
            if link in self.busy:
                start = np.maximum(start, self.busy[link])
        if self.recorder is not None:
            self.recorder.send(axes, float(start[0]), float(seconds[0]))
        self.waited += np.where(sending, start - now + seconds, 0.0)
        for link in self.batch.overlap.links(axes):
            # Only links that buckets use are followed. A blocking collective occupies them as well: a later
            # bucket queues.
            if link in self.busy:
                self.busy[link] = np.where(sending, start + seconds, self.busy[link])

    def _turn(self, axes: Axes, sending: Any, size: Any) -> Floats:
        """Seconds that the first collective after some work takes longer (others find the ranks in step);
        notes that work will take longer after it."""
        # The work since the last collective is over now, so that its length is known and what it suffered is
        # counted.
        self._count_slower_work(sending)
        communication = self.batch.prices.communication
        extra = np.where(sending, communication.arriving_s(axes, self.worked - self.at_last, size), 0.0)
        left = self.left.setdefault(axes, np.zeros(self.batch.count))
        np.copyto(left, np.maximum(left, size), where=sending)
        self.at_last = np.where(sending, self.worked, self.at_last)
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
                self.waited[rows] += seconds
        sources = np.array([[float(send.source == s) * send.seconds for s in SOURCES] for send in sends])
        self.sources[issue.rows] += sources[which]


def _add(target: Floats, positions: Indices, figures: Floats) -> None:
    """Add (owners, strategies) figures to those of the positions, each owner's to one."""
    if len(set(positions.tolist())) == len(positions):
        target[positions] += figures
        return
    # Such as the optimizer's step, at which all parameters are.
    for position, of_strategies in zip(positions.tolist(), figures, strict=True):
        target[position] += of_strategies
