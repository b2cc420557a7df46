"""The step simulator: it follows many strategies through the moments of a step, for their memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter

import numpy as np

from tensoropt.costs.process_memory import Sending
from tensoropt.simulate.batch import Batch, Stack, add_all, add_rows, peaks, sum_up
from tensoropt.simulate.clock import Clocked, Issue, clock
from tensoropt.simulate.collectives import Reductions, coalesced, reductions
from tensoropt.simulate.readings import Axes, Cells, MomentPlace
from tensoropt.types import SOURCES, Flags, Floats

_CELLS = 2**22
"""The most figures per array, one per moment and strategy: 32 MiB in each of about ten arrays."""


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one step for each of n strategies, in bytes and seconds of one rank.

    Attributes:
        memory: (n, 5) peak bytes by :data:`~tensoropt.simulate.recording.MEMORY_KINDS`.
        terms: (n, 6) bytes besides tensors, by :data:`~tensoropt.costs.process_memory.TERMS`.
        time_s: the whole step; the slower of device and host.
        compute_s: device seconds: operators, copies, additions, optimizer.
        communication_s: seconds of all collectives.
        exposed_s: seconds of collectives that no computation overlaps.
        host_s: the host's seconds to launch; 0 on CPUs.
        idle_s: the device's seconds of waiting for launches; ``time_s - compute_s - exposed_s``.
        sources: (n, 3) seconds by the source of the figures, as in ``SOURCES``.
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
        """(n,) peak bytes of tensors and of the process's other memory."""
        return self.memory.sum(axis=1) + self.terms.sum(axis=1)

    @property
    def hidden_s(self) -> Floats:
        """(n,) seconds of collectives that computation overlaps."""
        return np.maximum(self.communication_s - self.exposed_s, 0.0)


@dataclass(frozen=True)
class _StepParts:
    """The parts of a step in a pipeline's stage; if launch-bound, all are longer by the same share.

    Attributes:
        forward_s, backward_s: (n, 3) seconds of the first, each middle, and the last micro-batch.
        scattering_s: (n, 3) seconds of waiting for reduce-scatters at the end of a backward.
        end_s: (n,) seconds from the last backward to the end of the step.
        reducing_s: (n,) the part of ``end_s`` spent waiting for buckets.
        lasting_bytes: (n,) parameters, gradients and optimizer state.
        between_bytes: (n,) bytes of a micro-batch between its forward and backward.
        forward_bytes, backward_bytes: (n,) a micro-batch's peaks, with workspace.
        end_bytes: (n,) the peak after the last backward.
        trailing_bytes: (n, 2) bytes of gradients in flight after any backward, and after the last one.
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


def simulate(batch: Batch) -> StepMetrics:
    size = max(_CELLS // max(len(batch.schedule.moments), 1), 1)
    if batch.count <= size:
        return StepColumns(batch).metrics()
    parts = [batch.part(slice(start, start + size)) for start in range(0, batch.count, size)]
    metrics = [StepColumns(part).metrics() for part in parts]
    figures = _joined([{k: v for k, v in vars(m).items() if k != "parts"} for m in metrics])
    return StepMetrics(**figures, parts=_StepParts(**_joined([vars(m.parts) for m in metrics])))


def _joined(parts: Sequence[dict[str, Floats]]) -> dict[str, Floats]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class StepColumns:
    """The memory changes, computation and collectives of n strategies at every moment of the step.

    Attributes:
        kept, transient, workspace: (moments + 1, n) bytes: changes of saved and other memory, workspace.
        work, host: (moments + 1, n) seconds of the device, and of the host, at a moment.
        issues: collectives in the order of issue.
        lasting: (n, 3) bytes of parameters, gradients and optimizer state.
        trailing: (n, 2) bytes of gradients in flight after any backward, and after the last one.
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        n, moments = batch.count, len(batch.schedule.moments)
        # One position more than there are moments: an effect "after" the last one is placed there, and is
        # never reached.
        self._columns = np.zeros((5, moments + 1, n))
        self.kept, self.transient, self.workspace, self.work, self.host = self._columns
        self.sources, self.lasting = np.zeros((n, len(SOURCES))), np.zeros((n, 3))
        self.trailing, self.issuing_buckets = np.zeros((n, 2)), np.zeros(n)
        self._sends: dict[tuple[int, Axes], Issue] = {}
        for stack in batch.stacks:
            self._lay_out(stack)
        # One order for all strategies, whichever others they are simulated with.
        self.issues = [issue for _, issue in sorted(self._sends.items(), key=itemgetter(0))]
        self._lay_out_ahead()
        for reduced in reductions(batch):
            self._lay_out_buckets(reduced)

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
        for target, by_place in zip(self._columns, tables.columns, strict=True):
            # A fixed order, because the last bits of the sums depend on it.
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
            beside_work, before = of_work if hides else None, self._sends.get((position, axes))
            if before is not None:
                of_seconds = before.seconds + of_seconds
                # A group has only one product with which a reduction overlaps.
                beside_work = before.product_s if beside_work is None else beside_work
            self._sends[position, axes] = Issue(position, axes, of_seconds, product_s=beside_work)

    def _lay_out_ahead(self) -> None:
        costs, micro = self.batch.prices.communication, self.batch.mesh[0]
        beginnings = self.batch.schedule.beginnings
        for call in coalesced(self.batch):
            sizes, which = np.unique(call.bytes, return_inverse=True)
            of_size = [costs.time_s(call.kind, call.axes, size) if size else 0.0 for size in sizes.tolist()]
            seconds, until = np.array(of_size)[which], "" if call.at_once else "block"
            self.issues.append(Issue(call.position, call.axes, seconds, until, call.only, kind=call.kind))
            # The axes of collectives are numbered without that of the micro-batches.
            shards = call.bytes // prod(self.batch.mesh[axis + 1] for axis in call.axes)
            if call.kind == "reduce_scatter" and call.position == self.batch.schedule.last - 1:
                copied = self.batch.prices.packs & (call.members > 1)
                alive = call.bytes + shards - np.where(copied, 0, call.staying)
                self.trailing[:, 1] += alive
                self.trailing[:, 0] += alive * (call.only != "last")
            if self.batch.prices.packs and call.kind == "reduce_scatter":
                # Packed copies come in addition to the gradients, which are freed one after another before
                # there are shards. What the packed gradients of this moment have in memory before is freed by
                # then. Copies of gradients that stay in place are in memory until the next block begins.
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
            takes = np.zeros(self.batch.count)
            takes[rows] = seconds[which]
            self.issues.append(Issue(issue.position, axes, takes, "step", "last", kind="all_reduce"))
        np.add.at(self.issuing_buckets, issue.rows, self.batch.prices.overheads.host.call_s)
        of_source = [[float(send.source == s) * send.seconds for s in SOURCES] for send in issue.sends]
        self.sources[issue.rows] += np.array(of_source)[issue.which]

    def metrics(self) -> StepMetrics:
        """Return the figures of the step; may be called only once, as it changes the columns."""
        batch, micro = self.batch, self.batch.mesh[0]
        memory, terms = self._memory(), self._terms()
        # All micro-batches except the first and the last are alike, and each has freed by its end what it
        # keeps, so only one of them is stepped through. In the first, copies are gathered that serve the
        # whole step; in the last, buckets come between its collectives.
        repeats = [1] * micro if micro < 3 else [1, micro - 2, 1]
        timed = clock(batch.schedule, self.work[:-1], self.issues, batch.overlap, repeats)
        self.sources[:, SOURCES.index("data sheet")] += timed.beside_s
        # Clipped, because rounding may leave the difference a last bit outside these bounds.
        exposed = np.clip(timed.device_s - timed.compute_s, 0.0, timed.communication_s)
        host = self._host_seconds(micro)
        idle = np.maximum(host - timed.device_s, 0.0)
        # If launch-bound, everything takes longer.
        longer = np.where(idle > 0.0, host / np.maximum(timed.device_s, 1e-30), 1.0)
        return StepMetrics(
            memory, terms, timed.device_s + idle, timed.compute_s, timed.communication_s, exposed, host, idle,
            self.sources, self._parts(timed, longer),
        )  # fmt: skip

    def _parts(self, timed: Clocked, longer: Floats) -> _StepParts:
        # A step of one or two micro-batches has none between, and a step of one has no first, only the last.
        chosen = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[timed.forward_s.shape[1]]
        forward, backward, scattering = (
            of_runs.T[list(chosen)] for of_runs in (timed.forward_s, timed.backward_s, timed.scattering_s)
        )
        schedule, alive = self.batch.schedule, self.kept + self.transient
        end, last, count = schedule.forward_end, schedule.last, len(schedule.moments)
        used = alive[:-1] + self.workspace[:-1]
        none = np.zeros(self.batch.count)
        return _StepParts(
            (forward * longer).T,
            (backward * longer).T,
            (scattering * longer).T,
            timed.end_s * longer,
            timed.reducing_s * longer,
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

    def _memory(self) -> Floats:
        """Return the memory in bytes at the first peak, (n, 5): parameters, gradients, optimizer state,
        tensors saved for backward, and all other. ``kept`` and ``transient`` are replaced by their running
        sums, the bytes in use at each moment."""
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
            for bucket in (issue for issue in self.issues if issue.until == "step"):
                of_axes = kinds.setdefault(bucket.axes, {})
                of_axes["all_reduce"] = of_axes.get("all_reduce", none) | (bucket.seconds > 0)
        return process.terms(
            self.batch.count,
            [
                Sending(self.batch.overlap.links(axes), prod(self.batch.mesh[1 + a] for a in axes), of_axes)
                for axes, of_axes in sorted(kinds.items(), key=itemgetter(0))
                if axes
            ],
        )
