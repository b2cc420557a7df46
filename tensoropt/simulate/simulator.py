"""The step simulator: many strategies at once through the moments of a step, with arrays over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from operator import itemgetter

import numpy as np

from tensoropt.costs.process_memory import Sending
from tensoropt.simulate.batch import Batch, Stack, add_all, add_rows, peaks, sum_up
from tensoropt.simulate.collectives import Reductions, coalesced, reductions
from tensoropt.simulate.readings import Axes, Cells, MomentPlace
from tensoropt.types import SOURCES, Flags, Floats

_CELLS = 2**22
"""Figures per array, one per moment and strategy: 32 MiB in each of about ten arrays."""


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one step, for each strategy; bytes and seconds of one rank.

    Attributes:
        memory: (n, 5) peak bytes by :data:`~tensoropt.simulate.recording.MEMORY_KINDS`.
        terms: (n, 6) bytes by :data:`~tensoropt.costs.process_memory.TERMS`.
        time_s: the whole step; the slower of device and host.
        compute_s: device seconds: operators, copies, additions, optimizer.
        communication_s: seconds of all collectives.
        exposed_s: exposed communication.
        host_s: the host's seconds to launch; 0 on CPUs.
        idle_s: waiting for launches; ``time_s - compute_s - exposed_s``.
        sources: (n, 3) seconds by source, as in ``SOURCES``.
        parts: seconds and bytes by micro-batch.
    """

    memory: Floats
    terms: Floats
    time_s: Floats
    compute_s: Floats
    communication_s: Floats
    exposed_s: Floats
    host_s: Floats
    idle_s: Floats
    sources: Floats
    parts: _StepParts

    @property
    def memory_bytes(self) -> Floats:
        """(n,) bytes of tensors and of the process."""
        return self.memory.sum(axis=1) + self.terms.sum(axis=1)

    @property
    def hidden_s(self) -> Floats:
        """(n,) seconds of overlapped communication."""
        return np.maximum(self.communication_s - self.exposed_s, 0.0)


@dataclass(frozen=True)
class _StepParts:
    """The parts of a step as a pipeline's stage runs it; if launch-bound, all are longer by the same share.

    Attributes:
        forward_s, backward_s: (n, 3) of the first, each middle, and the last micro-batch.
        scattering_s: (n, 3) waiting for reduce-scatters at the end of a backward.
        end_s: (n,) from the last backward to the end of the step.
        reducing_s: (n,) the part of it spent waiting for buckets.
        lasting_bytes: (n,) parameters, gradients and optimizer state.
        between_bytes: (n,) a micro-batch's between forward and backward.
        forward_bytes, backward_bytes: (n,) a micro-batch's peaks, with workspace.
        end_bytes: (n,) the peak after the last backward.
        trailing_bytes: (n, 2) of gradients in flight after a backward, of any and of the last micro-batch.
    """

    forward_s: Floats
    backward_s: Floats
    scattering_s: Floats
    end_s: Floats
    reducing_s: Floats
    lasting_bytes: Floats
    between_bytes: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    end_bytes: Floats
    trailing_bytes: Floats

    @property
    def within_bytes(self) -> Floats:
        return np.maximum(self.forward_bytes, self.backward_bytes)


@dataclass
class _Sends:
    """The collectives of one moment over one set of axes, or a bucket of gradients.

    Attributes:
        seconds: per strategy, the total.
        bucket: whether gradients are reduced.
        ahead: whether it overlaps until the next block.
        only: its only micro-batch, ``first`` or ``last``; "" for all.
        beside_work: per strategy, the seconds of overlapped work at the moment's end, or None.
    """

    axes: Axes | None
    seconds: Floats
    sending: Flags
    bucket: bool = False
    ahead: bool = False
    only: str = ""
    beside_work: Floats | None = None


def simulate(batch: Batch) -> StepMetrics:
    size = max(_CELLS // max(len(batch.schedule.moments), 1), 1)
    if batch.count <= size:
        return StepSimulator(batch).simulate()
    parts = [batch.part(slice(start, start + size)) for start in range(0, batch.count, size)]
    metrics = [StepSimulator(part).simulate() for part in parts]
    figures = _joined([{k: v for k, v in vars(m).items() if k != "parts"} for m in metrics])
    return StepMetrics(**figures, parts=_StepParts(**_joined([vars(m.parts) for m in metrics])))


def _joined(parts: Sequence[dict[str, Floats]]) -> dict[str, Floats]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class StepSimulator:
    """The current time and memory of every strategy."""

    def __init__(self, batch: Batch):
        self.batch = batch
        n, moments = batch.count, len(batch.schedule.moments)
        # One position more than there are moments: an effect "after" the last one is placed there, and is
        # never reached.
        self.kept, self.transient, self.workspace = (np.zeros((moments + 1, n)) for _ in range(3))
        # The seconds of work at a moment are in the row after its own, in which the work up to then is
        # summed.
        self.work = np.zeros((moments + 2, n))
        # The seconds in which the host issues a moment's work.
        self.host = np.zeros((moments + 1, n))
        self.issuing_buckets = np.zeros(n)
        self.sends: dict[int, dict[Axes, _Sends]] = {}
        self.buckets: dict[int, list[_Sends]] = {}
        self.sources, self.lasting = np.zeros((n, len(SOURCES))), np.zeros((n, 3))
        for stack in batch.stacks:
            self._lay_out(stack)
        # To the last bit, no strategy's time may depend on when others send, so work is summed from the
        # beginning of the step, and not from one collective to the next. The current time is
        # ``worked + waited``, of which ``worked + slowed`` is computing. The first row is before all work.
        sum_up(self.work)
        self.worked, self.waited, self.slowed = np.zeros(n), np.zeros(n), np.zeros(n)
        self.communication = np.zeros(n)
        self.busy: dict[str, Floats] = {}
        self.issued: dict[int, list[_Sends]] = {}
        self.ahead: dict[int, list[_Sends]] = {}
        self.trailing = np.zeros((n, 2))
        self._lay_out_ahead()
        # The time at which everything sent ahead has arrived; the moments at which that is waited for.
        self.arrival = np.zeros(n)
        # The remaining seconds of collectives that overlap with computation, since when, and what was
        # computed by then.
        self.flying, self.since, self.since_computed = np.zeros(n), np.zeros(n), np.zeros(n)
        self.beside_s = np.zeros(n)  # the extra time of computing
        # The time when the current micro-batch began, when its forward was over, and the seconds of those
        # that are over.
        self.began, self.turned, self.scattering = np.zeros(n), np.zeros(n), np.zeros(n)
        self.micro_batches: list[tuple[Floats, Floats, Floats]] = []
        self.beginnings = frozenset(batch.schedule.beginnings if self.ahead and batch.overlap.beside else ())

    def _lay_out(self, stack: Stack) -> None:
        tables, used, which = stack.kind.tables, stack.used, stack.which
        of_step: tuple[tuple[Floats, Sequence[Sequence[float]]], ...] = (
            (self.lasting, tables.lasting),
            (self.sources, tables.seconds),
        )
        for total, by_number in of_step:
            table = np.array([by_number[number] for number in used.tolist()], dtype=float)
            if table.any():
                add_all(total, table, which)
        for target, by_place in (
            (self.kept, tables.kept),
            (self.transient, tables.transient),
            (self.workspace, tables.workspace),
            (self.work[1:], tables.local),
            (self.host, tables.host),
        ):
            # One fixed order, whatever came first: to the last bit, sums depend on it.
            for place, cells in sorted(by_place.items(), key=itemgetter(0)):
                figures = cells.of(used, tables.count)
                if figures.any():
                    add_rows(target, stack.positions(place), figures, which)
        for (place, axes), of_sends in sorted(tables.sends.items(), key=itemgetter(0)):
            self._lay_out_sends(stack, place, axes, *of_sends)

    def _lay_out_sends(
        self, stack: Stack, place: MomentPlace, axes: Axes, seconds: Cells, work: Cells
    ) -> None:
        count = stack.kind.tables.count
        takes, overlapped = seconds.of(stack.used, count), work.of(stack.used, count)
        hides = self.batch.overlap.beside and overlapped.any()
        if not takes.any():
            return
        sending = (takes > 0)[stack.which].any(axis=1)
        owners = np.flatnonzero(sending)
        which = stack.which[owners]
        for position, of_seconds, of_work in zip(
            stack.positions(place)[owners].tolist(), takes[which], overlapped[which], strict=True
        ):
            at = self.sends.setdefault(position, {})
            beside_work = of_work if hides else None
            if axes in at:
                of_seconds = at[axes].seconds + of_seconds
                # A group has only one product with which a reduction overlaps.
                beside_work = at[axes].beside_work if beside_work is None else beside_work
            at[axes] = _Sends(axes, of_seconds, of_seconds > 0, beside_work=beside_work)

    def _lay_out_ahead(self) -> None:
        costs, micro = self.batch.prices.communication, self.batch.mesh[0]
        beginnings = self.batch.schedule.beginnings
        for call in coalesced(self.batch):
            sizes, which = np.unique(call.bytes, return_inverse=True)
            of_size = [costs.time_s(call.kind, call.axes, size) if size else 0.0 for size in sizes.tolist()]
            seconds, sending = np.array(of_size)[which], call.bytes > 0
            sends = _Sends(call.axes, seconds, sending, ahead=not call.at_once, only=call.only)
            self.ahead.setdefault(call.position, []).append(sends)
            # The axes of collectives are numbered without that of the micro-batches.
            shards = call.bytes // prod(self.batch.mesh[axis + 1] for axis in call.axes)
            if call.kind == "reduce_scatter" and call.position == self.batch.schedule.last - 1:
                copied = self.batch.prices.packs & (call.members > 1)
                alive = call.bytes + shards - np.where(copied, 0, call.staying)
                self.trailing[:, 1] += alive
                self.trailing[:, 0] += alive * (call.only != "last")
            if self.batch.prices.packs and call.kind == "reduce_scatter":
                # In addition to the gradients, which are released one after another, before there are shards.
                # Memory that the packed ones of this moment have before them is gone by then.
                # Packed ones are under way while gradients that stay are alive, until the next block begins.
                staying = np.where(call.members > 1, call.staying, 0)
                packed = np.where(call.members > 1, call.bytes - shards - staying, 0)
                self.workspace[call.position] = np.maximum(self.workspace[call.position], packed)
                arrived = min((at for at in beginnings if at > call.position), default=call.position + 1)
                self.transient[call.position] += staying
                self.transient[arrived] -= staying
            times = 1 if call.only else micro
            self.sources[:, SOURCES.index(costs.source(call.kind, call.axes))] += seconds * times

    def _lay_out_buckets(self, issue: Reductions) -> None:
        seconds = np.array([send.seconds for send in issue.sends])
        # A position may issue buckets of several sets of axes; each set queues on its own links.
        for axes in dict.fromkeys(send.axes for send in issue.sends):
            over = np.array([send.axes == axes for send in issue.sends])[issue.which]
            rows, which = issue.rows[over], issue.which[over]
            n = self.batch.count
            made = _Sends(axes, np.zeros(n), np.zeros(n, dtype=bool), bucket=True)
            made.seconds[rows], made.sending[rows] = seconds[which], True
            self.buckets.setdefault(issue.position, []).append(made)
        np.add.at(self.issuing_buckets, issue.rows, self.batch.prices.overheads.host.call_s)
        of_source = [[float(send.source == s) * send.seconds for s in SOURCES] for send in issue.sends]
        self.sources[issue.rows] += np.array(of_source)[issue.which]

    def simulate(self) -> StepMetrics:
        """Go through all moments; call it once."""
        batch, schedule = self.batch, self.batch.schedule
        micro, moments, memory = batch.mesh[0], len(schedule.moments), self._memory()
        for issue in reductions(batch):
            self._lay_out_buckets(issue)
        terms = self._terms()
        # All micro-batches except the first and the last are alike, and each has freed by its end what it
        # keeps, so only one of them is stepped through. In the first, copies are gathered that serve the
        # whole step; in the last, buckets come between its collectives.
        if micro > 1:
            # Also separate if no strategy makes copies: to the last bit, no strategy depends on what others
            # do.
            self._micro_batches(1, self._to_issue(first=True, last=False))
        if micro > 2:
            self._micro_batches(micro - 2, self._to_issue(first=False, last=False))
        self.issued = self._to_issue(first=micro == 1, last=True)
        self.began = self.time
        self._pass_micro_batch()
        self._note_micro_batch()
        backward_end = self.time
        # A gradient that is reduced last completes buckets, and the optimizer's step waits for every bucket.
        step = max(schedule.position("optimizer", "step", ""), schedule.last)
        self._advance(range(schedule.last, step))
        self._count_slower_beside()
        before_buckets = self.time
        for busy in self.busy.values():
            self.waited = np.where(busy > self.time, busy - self.worked, self.waited)
        # Nothing is under way any longer that could slow down the optimizer.
        self.flying = np.zeros(batch.count)
        reducing = self.time - before_buckets
        self._advance(range(step, moments))
        self.sources[:, SOURCES.index("data sheet")] += self.beside_s
        device, compute = self.time, self.worked + self.slowed
        # Clipped, because rounding may leave the difference a last bit outside these bounds.
        exposed = np.clip(device - compute, 0.0, self.communication)
        host = self._host_seconds(micro)
        idle = np.maximum(host - device, 0.0)
        return StepMetrics(
            memory,
            terms,
            device + idle,
            compute,
            self.communication,
            exposed,
            host,
            idle,
            self.sources,
            self._parts(
                device - backward_end,
                reducing,
                np.where(idle > 0.0, host / np.maximum(device, 1e-30), 1.0),
            ),
        )

    def _pass_micro_batch(self) -> None:
        schedule = self.batch.schedule
        self._advance(range(schedule.forward_end))
        self.turned = self.time
        if schedule.last > schedule.forward_end:
            self._advance(range(schedule.forward_end, schedule.last))

    def _note_micro_batch(self) -> None:
        self.micro_batches.append((self.turned - self.began, self.time - self.turned, self.scattering))

    def _parts(self, end_s: Floats, reducing_s: Floats, host_bound: Floats) -> _StepParts:
        """Return the parts of the step; ``host_bound`` (n,) is the factor of launches on everything."""
        forward, backward, scattering = zip(*self.micro_batches, strict=True)
        # A step of one or two micro-batches has none between, and a step of one has no first, only the last.
        chosen = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[len(forward)]
        schedule, alive = self.batch.schedule, self.kept + self.transient
        end, last, count = schedule.forward_end, schedule.last, len(schedule.moments)
        used = alive[:-1] + self.workspace[:-1]
        none = np.zeros(self.batch.count)
        return _StepParts(
            np.stack([forward[i] * host_bound for i in chosen], axis=1),
            np.stack([backward[i] * host_bound for i in chosen], axis=1),
            np.stack([scattering[i] * host_bound for i in chosen], axis=1),
            end_s * host_bound,
            reducing_s * host_bound,
            self.lasting.sum(axis=1),
            alive[end],
            used[:end].max(axis=0) if end else none,
            used[end:last].max(axis=0) if last > end else none,
            used[last:].max(axis=0) if count > last else none,
            self.trailing,
        )

    def _host_seconds(self, micro: int) -> Floats:
        if not self.host.any():
            return np.zeros(self.batch.count)
        # Not numpy's sum, whose order of additions depends on the number of strategies.
        issued, before = self.host.copy(), self.batch.schedule.last - 1
        sum_up(issued)
        once = issued[-1] - issued[before] + self.issuing_buckets
        return issued[before] * micro + once

    def _micro_batches(self, count: int, issued: dict[int, list[_Sends]]) -> None:
        """Go through one of ``count`` equal micro-batches, and count it for all."""
        self.issued = issued
        standing = self.waited, self.slowed, self.communication, self.beside_s
        begun = [figures.copy() for figures in standing]
        self.began = self.time
        self._pass_micro_batch()
        self._note_micro_batch()
        self._repeat(count, begun)

    def _to_issue(self, *, first: bool, last: bool) -> dict[int, list[_Sends]]:
        """Return the collectives of every moment in issue order, with the first or last micro-batch's."""
        issuing = {"", *(("first",) if first else ()), *(("last",) if last else ())}
        # One order for all strategies, whichever others they are simulated with.
        order = {at: [replace(sends) for _, sends in sorted(of.items())] for at, of in self.sends.items()}
        for at, ahead in self.ahead.items():
            order.setdefault(at, []).extend(replace(sends) for sends in ahead if sends.only in issuing)
        if last:
            for at, complete in self.buckets.items():
                before = order.get(at, [])
                # When a block begins, gradients arrive and complete buckets before anything else is sent.
                order[at] = [*complete, *before] if at in self.beginnings else [*before, *complete]
        return order

    def _issuing(self, positions: range) -> list[int]:
        return sorted(at for at in self.beginnings.union(self.issued) if at in positions)

    def _beside(self, sends: _Sends) -> bool:
        return (sends.bucket or sends.ahead) and self.batch.overlap.beside

    def _memory(self) -> Floats:
        """Return (n, 5) the first peak by kind; turns ``kept`` and ``transient`` into live bytes."""
        for changes in (self.kept, self.transient):
            sum_up(changes)
        # Transient bytes at the peak include the workspace, as on the memory curve.
        at_peak = peaks(self.kept[:-1], self.transient[:-1], self.workspace[:-1])
        return np.concatenate([self.lasting, at_peak], axis=1)

    def _terms(self) -> Floats:
        process, kinds = self.batch.prices.process, dict[Axes, dict[str, Flags]]()
        if process.counts_communicators and len(self.batch.mesh) > 1:
            # The communicator of all ranks exists in any case: a job begins and ends with a barrier, which is
            # a sum.
            everyone = tuple(range(len(self.batch.mesh) - 1))
            none = np.zeros(self.batch.count, dtype=bool)
            kinds[everyone] = {"all_reduce": ~none}
            for stack in self.batch.stacks:
                tables = stack.kind.tables
                for (axes, kind), cells in tables.kinds.items():
                    sends = (cells.of(stack.used, tables.count) > 0)[stack.which].any(axis=0)
                    of_axes = kinds.setdefault(axes, {})
                    of_axes[kind] = of_axes.get(kind, none) | sends
            for bucket in chain(*self.buckets.values()):
                of_axes = kinds.setdefault(bucket.axes or (), {})
                of_axes["all_reduce"] = of_axes.get("all_reduce", none) | bucket.sending
        return process.terms(
            self.batch.count,
            [
                Sending(self.batch.overlap.links(axes), prod(self.batch.mesh[1 + a] for a in axes), of_axes)
                for axes, of_axes in sorted(kinds.items(), key=itemgetter(0))
                if axes
            ],
        )

    @property
    def time(self) -> Floats:
        return self.worked + self.waited

    def _repeat(self, count: int, begun: Sequence[Floats]) -> None:
        """Account for ``count`` micro-batches like the last one. ``begun``: the state at its beginning."""
        # Sources are not multiplied, because EffectTables has already counted them once per micro-batch.
        over = self.time, self.worked + self.slowed, self.communication, self.beside_s
        self.waited, self.slowed, self.communication, self.beside_s = (
            before + (after - before) * count for before, after in zip(begun, over, strict=True)
        )
        # Work is summed from the beginning of each micro-batch.
        self.worked = np.zeros(self.batch.count)
        self.since, self.since_computed = self.time, self.slowed

    def _advance(self, positions: range) -> None:
        # At moments without collectives there is only work, which is already summed.
        for position in self._issuing(positions):
            self.worked = self.work[position + 1]
            if position in self.beginnings:
                self._arrive()
            for sends in self.issued.get(position, ()):
                self._send(sends)
            # When backward ends, nothing follows with which a collective could overlap.
            if position in self.beginnings and position == self.batch.schedule.last - 1:
                self._count_slower_beside()
                computed = self.time
                self._arrive()
                self.scattering = self.time - computed
        self.worked = self.work[positions.stop]

    def _arrive(self) -> None:
        self._count_slower_beside()
        self.waited = np.where(self.arrival > self.time, self.arrival - self.worked, self.waited)
        self._pass()

    def _count_slower_beside(self, of: Flags | None = None) -> None:
        """Add the slow-down of computing during collectives: s seconds of overlap do s / (1 + slower) of
        work.

        Args:
            of: the strategies; by default all.
        """
        slower = self.batch.overlap.slower
        if not slower or not self.flying.any():
            return
        done = self.flying > 0 if of is None else of & (self.flying > 0)
        computed = (self.worked + self.slowed - self.since_computed) * (1.0 + slower)
        extra = np.where(done, np.minimum(self.flying, computed) * (slower / (1.0 + slower)), 0.0)
        self.waited, self.slowed = self.waited + extra, self.slowed + extra
        self.beside_s = self.beside_s + extra
        self._pass(done)

    def _pass(self, of: Flags | None = None) -> None:
        """Advance asynchronous collectives to now, once slow-downs are counted."""
        if not self.batch.overlap.slower:
            return
        of = np.ones(self.batch.count, dtype=bool) if of is None else of
        self.flying = np.where(of, np.maximum(self.flying - (self.time - self.since), 0.0), self.flying)
        self.since = np.where(of, self.time, self.since)
        self.since_computed = np.where(of, self.worked + self.slowed, self.since_computed)

    def _send(self, sends: _Sends) -> None:
        axes, seconds, sending = sends.axes or (), sends.seconds, sends.sending
        self.communication += seconds
        # The usual case: before any bucket is on a link, nothing can queue.
        if not self.busy and not self._beside(sends) and sends.beside_work is None:
            self.waited += seconds
            return
        self._count_slower_beside(sending)
        links = self.batch.overlap.links(axes)
        now = start = self.time
        if sends.beside_work is not None:
            start = now - np.where(sending, sends.beside_work, 0.0)
        for link in links:
            # Only links that buckets use are tracked. A blocking collective occupies them as well, so a later
            # bucket queues.
            if link in self.busy:
                start = np.maximum(start, self.busy[link])
        if self._beside(sends):
            for link in links:
                busy = self.busy.get(link, np.zeros(self.batch.count))
                self.busy[link] = np.where(sending, start + seconds, busy)
            self._pass(sending)
            self.flying = np.where(sending, self.flying + seconds, self.flying)
            if sends.ahead:
                self.arrival = np.where(sending, np.maximum(self.arrival, start + seconds), self.arrival)
            return
        slower = self._slower_beside_product(sends, now - start)
        self.waited += np.where(sending, np.maximum(start - now + seconds - slower, 0.0), 0.0)
        self._pass(sending)
        for link in set(links) & set(self.busy):
            # Not start + seconds, which may be a last bit more: a strategy would wait for itself if another
            # one's buckets are on these links.
            self.busy[link] = np.where(sending, self.time, self.busy[link])

    def _slower_beside_product(self, sends: _Sends, since: Floats) -> Floats:
        """Return a product's slow-down by collectives that began ``since`` seconds into it."""
        slower = self.batch.overlap.slower
        if sends.beside_work is None or not slower:
            return np.zeros(self.batch.count)
        overlapped = np.minimum(np.maximum(since, 0.0), sends.seconds / (1.0 + slower))
        extra = np.where(sends.sending, overlapped * slower, 0.0)
        self.waited, self.slowed = self.waited + extra, self.slowed + extra
        self.beside_s = self.beside_s + extra
        return extra
