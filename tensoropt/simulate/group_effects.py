"""What a group does at the moments of a step, in one configuration; what a parameter costs between uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensoropt.costs.parameters import OPTIMIZER_STATE
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.local import localise
from tensoropt.sharding.placement import WAITING, Layout
from tensoropt.sharding.reshard.steps import Step
from tensoropt.sharding.storage import Way, whole_layout
from tensoropt.sharding.strategy import made_again
from tensoropt.simulate.effects import (
    ARRIVED,
    COMPUTE,
    COMPUTE_AGAIN,
    COMPUTE_BACK,
    FIRST_ARRIVED,
    GATHER,
    GATHER_AGAIN,
    GATHER_BACK,
    GIVE,
    GIVE_SHARED,
    HOLD,
    HOLD_SHARED,
    INNER,
    INNER_AGAIN,
    INNER_BACK,
    PARAMETERS,
    STEP,
    Effect,
    Piece,
    PieceMaker,
    part_slot,
)
from tensoropt.simulate.step_schedule import parts_of

OPTIMIZER_TRANSIENT = {"sgd": 0, "momentum": 0, "adam": 1}
"""Values per parameter element that a multi-tensor step makes for a while (``foreach=True``: Adam's
denominators, of all parameters at once)."""


class Run(NamedTuple):
    """A part of a group's forward: bytes kept of all that was made by its end, the most alive meanwhile."""

    kept: int
    most: int


def _forward(
    runs: Sequence[Run], copied: int, *, keeps: bool, again: bool = False, needed: int = 0
) -> list[Effect]:
    """A group's forward.

    Args:
        copied: bytes of copies of parameters that begin to be kept with it.
        keeps: what is kept for backward stays, else it goes with the rest.
        needed: bytes of gathered parameters that stay for backward.
    """
    effects, before = [], 0
    for part, run in enumerate(runs):
        stays = run.kept if keeps else 0
        first = part == 0
        effects.append(
            Effect(
                part_slot(part, again=again),
                kept=stays - before + (copied if first else 0),
                transient=needed if first else 0,
                spot=max(run.most - stays - needed, 0),
            )
        )
        before = stays
    return effects


Moved = tuple[str, tuple[Step, ...], bool, int]
"""A parameter brought to a use: its name, the steps, whether it is cast before, how often."""


class GroupPieces(PieceMaker):
    """Works out what groups and parameters do on one mesh."""

    def group(
        self,
        configuration: Configuration,
        work: Workload,
        facts: Facts,
        stored: Mapping[str, Layout],
        recomputed: bool = False,
        handed: bool = False,
        joins: Sequence[bool] = (),
    ) -> Piece:
        """A group in a configuration, its parameters stored so.

        Args:
            recomputed: with its region.
            handed: gradients of its results lie in storages that outlast its backward, and count elsewhere.
            joins: per shared parameter whether gradients of later groups wait for this one's.
        """
        forward_s = again_s = backward_s = 0.0
        source = ""
        if self.prices is not None:
            forward_s, backward_s = self.prices.compute.seconds(work, facts)
            again_s = self.prices.again_s(work, forward_s)
            source = self.prices.compute.source_of(work)
        gather, held, buffers = self._gathered(configuration, facts, stored, again=False)
        copied = self._copied(configuration, facts, stored) if self.training else 0
        kept = facts.kept_bytes + copied if self.training else 0
        runs = self._runs(configuration, facts, held)
        effects = [
            *self._gather(GATHER, gather, stored, held + buffers),
            *_forward(runs, 0 if recomputed else copied, keeps=self.training and not recomputed),
            Effect(COMPUTE, local_s=forward_s, source=source),
            *self._inner(INNER, configuration, backward=False),
        ]
        if not self.training:
            return Piece(tuple(effects))
        ways = {n: self.way(n, stored[n], configuration.layout(n)) for n in configuration.group.parameters}
        once, parameters, gradients = self._held(GIVE, HOLD, ways)
        effects += once
        again, needed, buffers_back = self._gathered(configuration, facts, stored, again=True)
        if recomputed:  # what the second forward gathers stays for backward
            effects += [
                *self._gather(GATHER_AGAIN, gather, stored, held + buffers),
                *_forward(runs, copied, keeps=True, again=True, needed=needed),
                Effect(COMPUTE_AGAIN, local_s=again_s, source=source),
                *self._inner(INNER_AGAIN, configuration, backward=False),
            ]
        else:
            effects += self._gather(GATHER_BACK, again, stored, needed + buffers_back)
        most = self._most_back(
            configuration, facts, again, stored, needed, recomputed=recomputed, handed=handed
        )
        freed = needed if recomputed else 0
        effects += [
            Effect(COMPUTE_BACK, spot=max(most - freed, 0), local_s=backward_s, source=source),
            Effect(COMPUTE_BACK, later=True, kept=-kept, transient=-freed),
            *self._inner(INNER_BACK, configuration, backward=True),
            *self._returned(configuration, stored, joins),
        ]
        return Piece(tuple(effects), parameters, gradients)

    def _most_back(
        self,
        configuration: Configuration,
        facts: Facts,
        again: Sequence[Moved],
        stored: Mapping[str, Layout],
        needed: int,
        *,
        recomputed: bool,
        handed: bool,
    ) -> int:
        """The most alive in backward beside what is kept.

        A parameter gathered ``again`` is there while the node runs that reads it; one that a second forward
        has gathered, all ``needed``, until then. A gradient that has to move to where its parameter is stored
        waits until the group's backward is over.
        """
        back, back_parameters = facts.backward_peak_bytes, facts.backward_parameters_peak_bytes
        if handed:
            back, back_parameters = facts.handed_peak_bytes, facts.handed_parameters_peak_bytes
        most = max(needed + back_parameters, back) if recomputed or not facts.backward_runs else back
        short = configuration.group.short_names
        sizes = {short[name]: self.bytes(name, configuration.layout(name)) for name, *_ in again}
        waiting = {short[name]: size for name, size in self._waiting(configuration, stored).items()}
        for reads, made, alive, own in facts.backward_runs:
            gathered = (needed if reads else 0) if recomputed else sum(sizes.get(name, 0) for name in reads)
            later = sum(waiting.get(name, 0) for name in made)
            most = max(most, (own if handed else alive) + gathered + later)
        return most

    def _waiting(self, configuration: Configuration, stored: Mapping[str, Layout]) -> dict[str, int]:
        """Bytes of the gradients that have to move, or to be cast, to where their parameters are stored."""
        found = {}
        for name in (*configuration.group.parameters, *configuration.group.shared):
            use = configuration.layout(name)
            steps = self.use_steps(name, self.way(name, stored[name], use))[1]
            if self.learns(name) and (steps or self.tensors[name].master_dtype is not None):
                found[name] = self.bytes(name, use)
        return found

    def _runs(self, configuration: Configuration, facts: Facts, held: int) -> list[Run]:
        """The parts of the group's forward; ``held`` is there while parameters are read."""
        calls = facts.calls or (  # of a record that does not tell them apart
            (facts.kept_bytes, facts.kept_bytes + facts.forward_peak_bytes, False),
            (facts.kept_bytes, facts.kept_bytes + facts.forward_parameters_peak_bytes, True),
        )
        parts, runs = parts_of(configuration.group), [Run(0, 0)]
        for position, (kept, peak, reads) in enumerate(calls):
            if facts.calls and parts.of(position) == len(runs):
                runs.append(Run(runs[-1].kept, 0))
            most = max(runs[-1].most, peak + (held if reads else 0))
            runs[-1] = Run(kept if self.training else 0, most)
        return runs

    def _gathered(
        self, configuration: Configuration, facts: Facts, stored: Mapping[str, Layout], *, again: bool
    ) -> tuple[list[Moved], int, int]:
        """Parameters brought to their use (cast, moved), forward or ``again`` for backward.

        Returns:
            what is moved; bytes of what is held while the group runs; bytes of
            buffers while it is brought.
        """
        group, moved, total, buffers = configuration.group, [], 0, 0
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            way = self.way(name, stored[name], use)
            steps = self.use_steps(name, way)[0]
            cast = self.tensors[name].master_dtype is not None and not way.held
            if not steps and not cast:
                continue
            anew = made_again(self.tensors[name], steps, held=way.held)
            wanted = facts.parameters_kept.get(group.short_names[name], 0)
            if again and not (anew and wanted):
                continue
            if anew or not wanted or not self.training:  # else it is kept
                total += self.bytes(name, use)
            if steps:
                narrow = self.bytes(name, stored[name]) if cast else 0
                buffers = max(buffers, self.resharding(steps, name) + narrow - self.bytes(name, use))
            if not again or wanted:
                moved.append((name, steps, cast, wanted if again else 1))
        return moved, total, max(buffers, 0)

    def _copied(self, configuration: Configuration, facts: Facts, stored: Mapping[str, Layout]) -> int:
        """Bytes of the copies of parameters that the group's backward keeps."""
        group, total = configuration.group, 0
        for name in (*group.parameters, *group.shared):
            use = configuration.layout(name)
            way = self.way(name, stored[name], use)
            steps = self.use_steps(name, way)[0]
            wanted = group.short_names[name] in facts.parameters_kept
            if steps and wanted and not made_again(self.tensors[name], steps, held=way.held):
                total += self.bytes(name, use)
        return total

    def _gather(
        self,
        slot: int,
        moved: Sequence[Moved],
        stored: Mapping[str, Layout],
        spot: int,
    ) -> list[Effect]:
        if not moved:
            return []
        local_s, sends = 0.0, []
        for name, steps, cast, times in moved:
            seconds, issued = self.move(name, steps)
            local_s += (seconds + (self._cast_s(name, stored[name]) if cast else 0.0)) * times
            sends += list(issued) * times
        return [Effect(slot, spot=spot, local_s=local_s, source=self.upkeep_source, sends=tuple(sends))]

    def _returned(
        self, configuration: Configuration, stored: Mapping[str, Layout], joins: Sequence[bool]
    ) -> list[Effect]:
        """Gradients go to where the parameters are stored, one after the other; those of shared ones are
        added, into a new tensor, to what waits there."""
        group = configuration.group
        joining = {name for name, joined in zip(group.shared, joins, strict=False) if joined}
        found, most, waiting = [], 0, self._waiting(configuration, stored)
        for name in (*group.shared[::-1], *group.parameters[::-1]):
            use = configuration.layout(name)
            way = self.way(name, stored[name], use)
            gathered, steps = self.use_steps(name, way)
            narrow = self.tensors[name].master_dtype is not None and self.learns(name)
            waiting.pop(name, None)
            others, spot = sum(waiting.values()), 0
            if steps or narrow:
                spot = self.bytes(name, use) + self.resharding(steps, name)
            if narrow:
                spot = max(spot, self.bytes(name, use) + self.stored_bytes(name, stored[name]))
            if name in joining and self.learns(name):
                summed = self.bytes(name, way.source) if way.waits else self.stored_bytes(name, stored[name])
                spot = max(spot, 2 * summed)
            most = max(most, others + spot)
            if narrow:
                local_s, sends = self.move(name, steps)
                local_s += self._cast_s(name, stored[name])
                found.append(Effect(PARAMETERS, local_s=local_s, source=self.upkeep_source, sends=sends))
            elif steps:
                found.append(self.moved(PARAMETERS, name, steps, 0, gathered))
        return [*found, Effect(PARAMETERS, spot=most)] if most else found

    def _held(self, give: int, hold: int, ways: Mapping[str, Way]) -> tuple[list[Effect], int, int]:
        """Copies held over the step: (what is done once, at the slots ``give`` and ``hold``; bytes of the
        copies, and of the gradients that wait beside them).

        The executor makes a copy as the next step begins, which comes to the same: no more is alive then.
        """
        effects, copies, gradients = [], 0, 0
        for name, way in ways.items():
            if not way.held:
                continue
            size = self.bytes(name, way.source)
            copies += size
            once = way.upkeep(self.graph.atoms.atom_sizes(name), self.mesh, learns=self.learns(name))
            local_s, sends = self.move(name, once[0])
            narrow = self.bytes(name, way.home) if self.tensors[name].master_dtype is not None else 0
            spot = self.resharding(once[0], name) + narrow - size
            local_s += self._cast_s(name, way.home)
            effects.append(
                Effect(hold, spot=max(spot, 0), local_s=local_s, source=self.upkeep_source, sends=sends)
            )
            if way.waits:
                gradients += size
                effects.append(self.moved(give, name, once[1], self.resharding(once[1], name), once[1]))
                if self.prices is not None:
                    add_s = size * self.prices.upkeep.add_s_per_byte * self.mesh[0]
                    effects.append(Effect(give, local_s=add_s, source=self.upkeep_source))
        return effects, copies, gradients

    def _cast_s(self, name: str, stored: Layout) -> float:
        return self.prices.cast_s(name, stored) if self.prices is not None else 0.0

    def _inner(self, slot: int, configuration: Configuration, *, backward: bool) -> list[Effect]:
        """What is communicated inside a group: a resolved partial sum, kernels' own collectives."""
        if self.prices is None:
            return []
        found = []
        if configuration.resolved is not None:
            name = configuration.resolved[0]
            ways = self.steps(*configuration.resolved)
            if ways[backward]:
                found.append(self.moved(slot, name, ways[backward], 0, ways[not backward]))
        for op in configuration.group.operators:
            call = localise(configuration.placed(op.name, self.graph.atoms, self.mesh, None))
            sends = [self.prices.send(c.kind, c.axes, c.bytes) for c in call.collectives]
            chosen = [s for s, c in zip(sends, call.collectives, strict=True) if s and c.backward is backward]
            if chosen:
                found.append(Effect(slot, source=self.upkeep_source, sends=tuple(chosen)))
        return found

    def parameter(self, name: str, stored: Layout, *, shared: bool) -> Piece:
        """A parameter between uses: its bytes, its gradient's arrival, its share of the optimizer step.

        Autograd adds to a shared one's gradient once, when all its users' parts are there; the sum of those
        that are waits beside.
        """
        tensor, size = self.tensors[name], self.stored_bytes(name, stored)
        if not (self.training and tensor.requires_grad):
            return Piece((), parameters=size)
        ways = {}
        if name in self.graph.shared:  # else the copy is its only group's
            ways[name] = self.way(name, stored, whole_layout(tensor, self.mesh))
        held, copies, gradients = self._held(GIVE_SHARED, HOLD_SHARED, ways)
        summed, arrived = gradients or size, GIVE_SHARED if stored[0] == WAITING else ARRIVED
        arrival_s = step_s = 0.0
        if self.prices is not None:
            arrival_s = self.prices.gradient_arrival_s(size, stored)
            step_s = self.prices.step_s(self.elements(name, stored))
        waiting = (
            Effect(FIRST_ARRIVED, later=True, transient=summed),
            Effect(ARRIVED, transient=-summed, spot=summed),
        )
        effects = (
            *(waiting if shared else ()),
            Effect(arrived, local_s=arrival_s, source=self.upkeep_source),
            *held,
            Effect(
                STEP,
                spot=size * OPTIMIZER_TRANSIENT[self.optimizer],
                local_s=step_s,
                source=self.upkeep_source,
            ),
        )
        state = size * OPTIMIZER_STATE[self.optimizer]
        return Piece(effects, size + copies, size + gradients, state)
