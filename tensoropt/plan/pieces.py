"""What one group, one tensor or one parameter does at the moments of a step, for one choice.

A step is the sum of such pieces: all bytes and seconds add up, so pieces are worked out once per distinct
choice and shared by strategies and by layers that look alike. Moments are given as *slots* of the piece's
owner (:mod:`tensoropt.plan.simulate` knows where they lie).

A tensor is followed by its storage: an edge whose forward moves nothing gives its reader the very storage
of its source. All ranks do the same; the largest shard is played. Inputs, constants and buffers, the same
for every strategy, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tensoropt.costs.facts import Facts
from tensoropt.costs.parameters import OPTIMIZER_STATE
from tensoropt.costs.prices import Prices, Send
from tensoropt.costs.tables import leaves_model
from tensoropt.costs.transients import resharding_elements
from tensoropt.costs.workload import Workload
from tensoropt.graph import Tensor
from tensoropt.sharding.configurations import Configuration, Mesh
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.local import localise
from tensoropt.sharding.placement import Layout, local_shape
from tensoropt.sharding.resharding import Step, edge_steps
from tensoropt.sharding.strategy import made_again, output_layout

OPTIMIZER_TRANSIENT = {"sgd": 0, "momentum": 0, "adam": 1}
"""Values per parameter element that a multi-tensor step makes for a while (``foreach=True``: Adam's
denominators, of all parameters at once)."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What happens at one moment of one micro-batch.

    Attributes:
        slot: of the owner; ``later`` moves it to the moment that follows.
        kept, transient: bytes that begin (or, below 0, have ended) to be alive as the moment starts.
        spot: bytes alive during this moment only.
        local_s: seconds on the device, of ``source``.
        sends: collectives the device waits for.
    """

    slot: int
    later: bool = False
    kept: int = 0
    transient: int = 0
    spot: int = 0
    local_s: float = 0.0
    source: str = ""
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Effects of one owner for one choice; bytes held all through the step."""

    effects: tuple[Effect, ...]
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """How a group sees a tensor: its layout; whether the tensor lies in what the group keeps (of a writer) or
    is needed in its backward (of a reader); whether the group is recomputed."""

    layout: Layout
    kept: bool
    again: bool = False


GATHER, COMPUTE, INNER, GATHER_BACK, COMPUTE_BACK, INNER_BACK, PARAMETERS = range(7)
GATHER_AGAIN, COMPUTE_AGAIN, INNER_AGAIN = range(7, 10)
MADE, HOME, OUTPUT, FORWARD_END, OUTPUT_BACK, HOME_BACK, GRADIENT, MADE_AGAIN, HOME_AGAIN = range(9)
READ, USED, USED_BACK, READ_BACK, READ_AGAIN, USED_AGAIN = range(6)
ARRIVED, STEP = range(2)


def reader_slot(reader: int, which: int) -> int:
    """Slot of a tensor's ``reader``-th reader."""
    return 9 + 6 * reader + which


class _Pass(NamedTuple):
    """One of the two forwards of a region, or the only one: the slots a tensor passes in it."""

    again: bool
    made: int
    home: int
    read: int
    used: int


_FIRST = _Pass(False, MADE, HOME, READ, USED)
_SECOND = _Pass(True, MADE_AGAIN, HOME_AGAIN, READ_AGAIN, USED_AGAIN)


class PieceMaker:
    """Works out pieces on one mesh.

    Args:
        prices: where seconds come from; None to follow bytes only.
    """

    def __init__(self, graph: GroupGraph, mesh: Mesh, optimizer: str, prices: Prices | None):
        self.graph, self.mesh, self.prices = graph, mesh, prices
        self.optimizer = optimizer
        self.tensors: Mapping[str, Tensor] = graph.atoms.graph.tensors
        self.training = graph.atoms.graph.training

    def elements(self, name: str, layout: Layout) -> int:
        return prod(local_shape(self.graph.atoms.atoms[name], layout, self.mesh))

    def bytes(self, name: str, layout: Layout) -> int:
        return self.elements(name, layout) * self.tensors[name].element_bytes

    def _stored_bytes(self, name: str, layout: Layout) -> int:
        """Of a parameter between steps, or of its gradient."""
        return self.elements(name, layout) * self.tensors[name].stored_element_bytes

    def _steps(self, name: str, source: Layout, target: Layout) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """(forward, backward) steps of an edge; no backward steps without a gradient."""
        if source == target:
            return (), ()
        forward, backward = edge_steps(self.graph.atoms.atom_sizes(name), self.mesh, source, target)
        learns = self.training and self.tensors[name].requires_grad
        return forward, backward if learns else ()

    def _move(self, name: str, steps: Sequence[Step]) -> tuple[float, tuple[Send, ...]]:
        if self.prices is None or not steps:
            return 0.0, ()
        return self.prices.steps(steps, self.tensors[name].element_bytes)

    def _moved(self, slot: int, name: str, steps: Sequence[Step], spot: int) -> Effect:
        local_s, sends = self._move(name, steps)
        return Effect(slot, spot=spot, local_s=local_s, source=self._upkeep, sends=sends)

    @property
    def _upkeep(self) -> str:
        return self.prices.compute.source if self.prices is not None else ""

    def _resharding(self, steps: Sequence[Step], name: str) -> int:
        """The most that is alive of a resharding beside its input."""
        return resharding_elements(steps, self.mesh) * self.tensors[name].element_bytes

    # -- groups -----------------------------------------------------------------------------------

    def group(
        self,
        configuration: Configuration,
        work: Workload,
        facts: Facts,
        stored: Mapping[str, Layout],
        recomputed: bool = False,
    ) -> Piece:
        """A group in a configuration, its parameters stored so; ``recomputed``: with its region."""
        forward_s = backward_s = 0.0
        source = ""
        if self.prices is not None:
            forward_s, backward_s = self.prices.compute.seconds(work, facts)
            source = self.prices.compute.source_of(work)
        gather, held, buffers = self._gathered(configuration, facts, stored, again=False)
        kept = facts.kept_bytes + self._copied(configuration, facts, stored) if self.training else 0
        running = max(held + facts.forward_parameters_peak_bytes, facts.forward_peak_bytes)
        effects = [
            *self._gather(GATHER, gather, stored, held + buffers),
            Effect(COMPUTE, kept=0 if recomputed else kept, spot=running, local_s=forward_s, source=source),
            *self._inner(INNER, configuration, backward=False),
        ]
        if not self.training:
            return Piece(tuple(effects))
        again, needed, buffers_back = self._gathered(configuration, facts, stored, again=True)
        if recomputed:  # what the second forward gathers stays for backward
            effects += [
                *self._gather(GATHER_AGAIN, gather, stored, held + buffers),
                Effect(
                    COMPUTE_AGAIN,
                    kept=kept,
                    transient=needed,
                    spot=max(running - needed, 0),
                    local_s=forward_s,
                    source=source,
                ),
                *self._inner(INNER_AGAIN, configuration, backward=False),
            ]
        else:
            effects += self._gather(GATHER_BACK, again, stored, needed + buffers_back)
        with_needed = max(needed + facts.backward_parameters_peak_bytes, facts.backward_peak_bytes)
        freed = needed if recomputed else 0
        effects += [
            Effect(COMPUTE_BACK, spot=max(with_needed - freed, 0), local_s=backward_s, source=source),
            Effect(COMPUTE_BACK, later=True, kept=-kept, transient=-freed),
            *self._inner(INNER_BACK, configuration, backward=True),
            *self._returned(configuration, stored),
        ]
        return Piece(tuple(effects))

    def _gathered(
        self, configuration: Configuration, facts: Facts, stored: Mapping[str, Layout], *, again: bool
    ) -> tuple[list[tuple[str, tuple[Step, ...], int]], int, int]:
        """Parameters brought to their use (cast, moved), forward or ``again`` for backward.

        Returns:
            (name, steps, how often) of what is moved; bytes of what is held while the group runs; bytes of
            buffers while it is brought.
        """
        group, moved, total, buffers = configuration.group, [], 0, 0
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            steps = self._steps(name, stored[name], use)[0]
            cast = self.tensors[name].master_dtype is not None
            if not steps and not cast:
                continue
            anew = made_again(self.tensors[name], steps)
            wanted = facts.parameters_kept.get(group.short_names[name], 0)
            if again and not (anew and wanted):
                continue
            if anew or not wanted or not self.training:  # else it is kept
                total += self.bytes(name, use)
            if steps:
                narrow = self.bytes(name, stored[name]) if cast else 0
                buffers = max(buffers, self._resharding(steps, name) + narrow - self.bytes(name, use))
            if not again or wanted:
                moved.append((name, steps, wanted if again else 1))
        return moved, total, max(buffers, 0)

    def _copied(self, configuration: Configuration, facts: Facts, stored: Mapping[str, Layout]) -> int:
        """Bytes of the copies of parameters that the group's backward keeps."""
        group, total = configuration.group, 0
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            steps = self._steps(name, stored[name], use)[0]
            wanted = group.short_names[name] in facts.parameters_kept
            if steps and wanted and not made_again(self.tensors[name], steps):
                total += self.bytes(name, use)
        return total

    def _gather(
        self,
        slot: int,
        moved: Sequence[tuple[str, tuple[Step, ...], int]],
        stored: Mapping[str, Layout],
        spot: int,
    ) -> list[Effect]:
        if not moved:
            return []
        local_s, sends = 0.0, []
        for name, steps, times in moved:
            seconds, issued = self._move(name, steps)
            local_s += (seconds + self._cast_s(name, stored[name])) * times
            sends += list(issued) * times
        return [Effect(slot, spot=spot, local_s=local_s, source=self._upkeep, sends=tuple(sends))]

    def _returned(self, configuration: Configuration, stored: Mapping[str, Layout]) -> list[Effect]:
        """Gradients go to where the parameters are stored."""
        group = configuration.group
        found = []
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            steps = self._steps(name, stored[name], use)[1]
            spot = self.bytes(name, use) + self._resharding(steps, name)
            if self.tensors[name].master_dtype is not None and self._learns(name):
                local_s, sends = self._move(name, steps)
                local_s += self._cast_s(name, stored[name])
                spot = max(spot, self.bytes(name, use) + self._stored_bytes(name, stored[name]))
                found.append(Effect(PARAMETERS, spot=spot, local_s=local_s, source=self._upkeep, sends=sends))
            elif steps:
                found.append(self._moved(PARAMETERS, name, steps, spot))
        return found

    def _cast_s(self, name: str, stored: Layout) -> float:
        return self.prices.cast_s(name, stored) if self.prices is not None else 0.0

    def _inner(self, slot: int, configuration: Configuration, *, backward: bool) -> list[Effect]:
        """What is communicated inside a group: a resolved partial sum, kernels' own collectives."""
        if self.prices is None:
            return []
        found = []
        if configuration.resolved is not None:
            name = configuration.resolved[0]
            steps = self._steps(*configuration.resolved)[backward]
            if steps:
                found.append(self._moved(slot, name, steps, 0))
        for op in configuration.group.operators:
            call = localise(configuration.placed(op.name, self.graph.atoms, self.mesh, None))
            sends = [self.prices.send(c.kind, c.axes, c.bytes) for c in call.collectives]
            chosen = [s for s, c in zip(sends, call.collectives, strict=True) if s and c.backward is backward]
            if chosen:
                found.append(Effect(slot, source=self._upkeep, sends=tuple(chosen)))
        return found

    # -- tensors ----------------------------------------------------------------------------------

    def tensor(
        self,
        name: str,
        write: Reading,
        home: Layout | None,
        reads: Sequence[Reading],
        inside: Sequence[bool] = (),
    ) -> Piece:
        """An activation: written so, found by its readers at ``home`` (or as written), read so.

        Args:
            inside: per reader whether it lies in its producer's region.
        """
        source = write.layout if home is None else home
        inside = inside or [False] * len(reads)
        effects = self._passed(name, write, source, reads, inside, _FIRST)
        if leaves_model(self.graph, name):
            out = self._steps(name, source, output_layout(source))[0]
            effects.append(self._moved(OUTPUT, name, out, 0))
        if any(read.again for read in reads) or write.again:
            effects += self._passed(name, write, source, reads, inside, _SECOND)
        if self._learns(name):
            effects += self._tensor_backward(name, write, source, reads)
        return Piece(tuple(effects))

    def _learns(self, name: str) -> bool:
        return self.training and self.tensors[name].requires_grad

    def _passed(
        self,
        name: str,
        write: Reading,
        source: Layout,
        reads: Sequence[Reading],
        inside: Sequence[bool],
        at: _Pass,
    ) -> list[Effect]:
        """A tensor in the first forward, or in the second one of recomputed regions.

        In the first a recomputed region keeps nothing but what enters it, as its source has it; in the
        second it makes its inside again and keeps what backward needs.
        """
        found = []
        makes, keeps = write.again or not at.again, write.kept and write.again == at.again
        moves = self._steps(name, write.layout, source)[0] if makes else ()
        if moves:
            made = 0 if keeps else self.bytes(name, write.layout)
            found.append(self._moved(at.home, name, moves, made + self._resharding(moves, name)))
        present, keepers = [], []
        for number, read in enumerate(reads):
            needed = read.kept and read.again == at.again and self.training
            steps = self._steps(name, source, read.layout)[0]
            if at.again and not read.again:
                continue
            if steps:
                found += self._copy(name, number, read, steps, at, needed)
            if inside[number] or not at.again:
                present.append(number)
                enters = read.again and not inside[number]
                if enters or (needed and not steps):
                    keepers.append(number)
        if makes and (moves or not keeps):
            size, begin = self.bytes(name, source), at.home if moves else at.made
            stays = not at.again and (leaves_model(self.graph, name) or not reads)
            found += self._storage(size, begin, present, keepers, stays, at)
        return found

    def _copy(
        self, name: str, number: int, read: Reading, steps: Sequence[Step], at: _Pass, needed: bool
    ) -> list[Effect]:
        """A reader's own copy: made for it, and kept where its backward needs it."""
        size = self.bytes(name, read.layout)
        found = [
            self._moved(reader_slot(number, at.read), name, steps, self._resharding(steps, name)),
            Effect(reader_slot(number, at.read), later=True, transient=size),
        ]
        if needed:
            found.append(Effect(reader_slot(number, at.used), kept=size, transient=-size))
            found.append(Effect(reader_slot(number, USED_BACK), later=True, kept=-size))
        else:
            found.append(Effect(reader_slot(number, at.used), later=True, transient=-size))
        return found

    def _storage(
        self, size: int, begin: int, readers: Sequence[int], keepers: Sequence[int], stays: bool, at: _Pass
    ) -> list[Effect]:
        """A storage that readers find: alive until the last one, or kept from the first that needs it.

        Args:
            stays: nobody lets go of it before forward is over.
        """
        found = [Effect(begin, later=True, transient=size)]
        if keepers:
            found.append(Effect(reader_slot(keepers[0], at.used), kept=size, transient=-size))
            found.append(Effect(reader_slot(keepers[0], USED_BACK), later=True, kept=-size))
        elif stays:
            found.append(Effect(FORWARD_END, transient=-size))
        elif readers:
            found.append(Effect(reader_slot(readers[-1], at.used), later=True, transient=-size))
        else:  # the second forward's result, which nobody in the region reads
            found.append(Effect(begin, later=True, transient=-size))
        return found

    def _tensor_backward(
        self, name: str, write: Reading, source: Layout, reads: Sequence[Reading]
    ) -> list[Effect]:
        """Readers' gradients go to where the tensor was found, add up there, and go to its writer."""
        found, size = [], self.bytes(name, source)
        for number, read in enumerate(reads):
            steps, own = self._steps(name, source, read.layout)[1], self.bytes(name, read.layout)
            found.append(Effect(reader_slot(number, USED_BACK), later=True, transient=own))
            if steps:
                spot = self._resharding(steps, name)
                found.append(self._moved(reader_slot(number, READ_BACK), name, steps, spot))
            adds = size if number == len(reads) - 1 else 0
            found.append(Effect(reader_slot(number, READ_BACK), later=True, transient=adds - own))
        if reads:
            found.append(Effect(GRADIENT, transient=-size))
        back = self._steps(name, write.layout, source)[1]
        if back:
            found.append(self._moved(HOME_BACK, name, back, self._resharding(back, name)))
        if leaves_model(self.graph, name):
            steps = self._steps(name, source, output_layout(source))[1]
            found.append(self._moved(OUTPUT_BACK, name, steps, 0))
        return found

    # -- parameters -------------------------------------------------------------------------------

    def parameter(self, name: str, stored: Layout) -> Piece:
        """A parameter between uses: its bytes, its gradient's addition, its share of the optimizer step."""
        tensor, size = self.tensors[name], self._stored_bytes(name, stored)
        if not (self.training and tensor.requires_grad):
            return Piece((), parameters=size)
        add_s = step_s = 0.0
        if self.prices is not None:
            add_s = size * self.prices.upkeep.add_s_per_byte
            step_s = self.elements(name, stored) * self.prices.compute.optimizer_s_per_element
        effects = (
            Effect(ARRIVED, local_s=add_s, source=self._upkeep),
            Effect(
                STEP,
                spot=size * OPTIMIZER_TRANSIENT[self.optimizer],
                local_s=step_s,
                source=self._upkeep,
            ),
        )
        return Piece(effects, size, size, size * OPTIMIZER_STATE[self.optimizer])
