"""The effects of a group in a step: it computes, communicates internally, and keeps tensors for backward.

The parts of a group's forward, cut at the operators that are first and last to need a tensor the group
reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tensoropt.costs.effects import (
    COMPUTE,
    COMPUTE_AGAIN,
    COMPUTE_BACK,
    GATHER,
    GATHER_AGAIN,
    GATHER_BACK,
    INNER,
    INNER_AGAIN,
    INNER_BACK,
    PARAMETERS,
    Effect,
    Effects,
    joined,
    part_of,
)
from tensoropt.costs.parameter_effects import ParameterEffects, Use
from tensoropt.costs.prices import Queues
from tensoropt.ops.layouts import Layout
from tensoropt.ops.localise import localise
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import Turn


@dataclass(frozen=True)
class Parts:
    """A group's operators, cut at the first and last need of each tensor that the group reads.

    Attributes:
        starts: position of the first operator of each part.
        first, last: per tensor, the parts that read it first and last.
    """

    starts: tuple[int, ...]
    first: Mapping[str, int]
    last: Mapping[str, int]

    def of(self, position: int) -> int:
        """The part that an operator belongs to."""
        return bisect_right(self.starts, position) - 1


def parts_of(group: Group) -> Parts:
    """The parts of a group; a group in which one operator needs all the reads may have a single part."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, op in enumerate(group.operators):
        for name in op.inputs():
            if name in group.reads:
                first.setdefault(name, position)
                last[name] = position
    # Cutting before the first use and after the last one is the coarsest cut at which the lifetime of every
    # input ends at the end of a part; finer parts would only add moments to simulate.
    ends = {position + 1 for position in last.values() if position + 1 < len(group.operators)}
    cut = Parts(tuple(sorted({0, *first.values(), *ends})), {}, {})
    return Parts(
        cut.starts, {n: cut.of(p) for n, p in first.items()}, {n: cut.of(p) for n, p in last.items()}
    )


class _ForwardPart(NamedTuple):
    """A part of a group's forward: the bytes kept by its end of everything made so far, and the peak during
    it."""

    kept: int
    most: int


class Choice(NamedTuple):
    """The choice made for a group.

    Attributes:
        work, facts: those of the configuration.
        stored: the storage layout of each parameter; shared ones may be missing, in which case their uses are
            not counted.
        again: the group is recomputed with its region.
        turns: per shared parameter, the part of its combined uses that falls to this group; if missing, all
            of it, as if this were the only use.
    """

    configuration: Configuration
    work: Workload
    facts: Facts
    stored: Mapping[str, Layout]
    again: bool = False
    turns: Mapping[str, Turn] = MappingProxyType({})


def _forward(
    parts: Sequence[_ForwardPart], *, keeps: bool, again: bool = False, needed: int = 0
) -> list[Effect]:
    """The memory effects of a group's forward.

    Args:
        keeps: whether what backward needs is kept; otherwise it is freed with the rest.
        needed: bytes of gathered parameters that stay until backward.
    """
    effects, before = [], 0
    for number, part in enumerate(parts):
        stays = part.kept if keeps else 0
        effects.append(
            Effect(
                part_of(number, again=again),
                kept=stays - before,
                transient=needed if number == 0 else 0,
                # A part's peak includes what it keeps and what is gathered for it, which are also alive as
                # separate bytes; without the subtraction they would count twice.
                workspace_bytes=max(part.most - stays - needed, 0),
            )
        )
        before = stays
    return effects


class GroupEffects(ParameterEffects):
    """Derives the effects of groups on one mesh."""

    def uses(self, choice: Choice) -> dict[str, Use]:
        """The uses of the group's parameters, in the order in which forward needs them."""
        configuration = choice.configuration
        group, wanted = configuration.group, choice.facts.parameters_kept
        neighbours = self.blocks.neighbours(group.name)
        last = len(parts_of(group).starts) - 1
        return {
            name: Use(
                configuration.layout(name),
                wanted.get(group.short_names[name], 0),
                choice.again,
                neighbours,
                last,
                choice.turns.get(name),
                self.graph.learns(name, group.name),
            )
            for name in (*group.parameters, *group.shared)
            if name in choice.stored
        }

    def computed(self, choice: Choice) -> Effects:
        """The effects of a group's computation: forward, a second forward if it is recomputed, backward."""
        work, facts = choice.work, choice.facts
        compute = self.prices.compute
        forward, backward = map(Queues, compute.seconds(work, facts), compute.host_seconds(work))
        source = compute.source_of(work)
        found = [Effect(COMPUTE, local_s=forward.device_s, host_s=forward.host_s, source=source)]
        if self.training and choice.again:
            again = self.prices.again(work, forward)
            found.append(Effect(COMPUTE_AGAIN, local_s=again.device_s, host_s=again.host_s, source=source))
        if self.training:
            found.append(
                Effect(COMPUTE_BACK, local_s=backward.device_s, host_s=backward.host_s, source=source)
            )
        return Effects(tuple(found))

    def hidden_s(self, choice: Choice) -> float:
        """The seconds of collectives that the search assumes to be hidden behind computation.

        A block's parameters are gathered while the block before it computes, and its gradients are scattered
        while backward passes the next. Because blocks are mostly alike, the search compares with the group's
        own computation, so that no group has to know another one; the result is never more than what alike
        blocks hide. The slow-down of computing in the meantime is subtracted.
        """
        forward = ("first", "forward")
        # (in forward, once per step): seconds.
        sent: dict[tuple[bool, bool], float] = {}
        for name, use in self.uses(choice).items():
            stored = choice.stored[name]
            for effect in (*self.use(name, stored, use).effects, *self._copy(name, stored, use).effects):
                # After the first block, backward passes no other one.
                ends = effect.when.what == "next" and not (use.neighbours and use.neighbours.before)
                if effect.beside and not effect.when.at_once and not ends:
                    key = effect.when.phase in forward, effect.when.once
                    sent[key] = sent.get(key, 0.0) + sum(one.send.seconds for one in effect.beside)
        if not sent:
            return 0.0
        computed = {True: 0.0, False: 0.0}
        for effect in self.computed(choice).effects:
            computed[effect.when.phase in forward] += effect.local_s
        hidden_s = 0.0
        for way, computed_s in computed.items():
            each_s = min(sent.get((way, False), 0.0), computed_s)
            # One micro-batch hides what is sent once, in addition to what each of them sends.
            hidden_s += each_s * self.mesh[0] + min(sent.get((way, True), 0.0), computed_s - each_s)
        return hidden_s / (1.0 + self.prices.slower_beside)

    def _copy(self, name: str, stored: Layout, use: Use) -> Effects:
        """The effects of a parameter's unsharded copy, if the copy belongs to this group alone."""
        return Effects(()) if name in self.graph.shared else self.unsharded(name, stored, use)

    def kept(self, choice: Choice) -> Effects:
        """The memory that backward keeps of everything the group produces, as one sum; the parts of forward
        are for the simulator."""
        kept = choice.facts.kept_bytes
        if not self.training or choice.again or not kept:
            return Effects(())
        return Effects((Effect(COMPUTE, kept=kept), Effect(COMPUTE_BACK, after=True, kept=-kept)))

    def group(self, choice: Choice, *, handed: bool = False, joins: Sequence[bool] = ()) -> Effects:
        """All effects of a group: computation, its parameters' uses, and memory part by part.

        Args:
            handed: gradients of its results lie in storages that outlive its backward, and are counted
                elsewhere.
            joins: per shared parameter, whether gradients of later groups wait for this group's.
        """
        uses = self.uses(choice)
        used = [self.use(name, choice.stored[name], use) for name, use in uses.items()]
        copies = [
            self.unsharded(name, choice.stored[name], uses[name])
            for name in choice.configuration.group.parameters
        ]
        memory = self._memory(choice, uses, handed=handed, joins=joins)
        return joined([self.computed(choice), *self.inside(choice), *used, *copies, Effects(tuple(memory))])

    def inside(self, choice: Choice) -> list[Effects]:
        """The communication inside a group: a resolved partial sum, then each kernel's own collectives."""
        configuration, found = choice.configuration, []
        whens = (INNER, *((INNER_AGAIN,) if choice.again else ()), *((INNER_BACK,) if self.training else ()))
        if configuration.resolved is not None:
            name, before, after = configuration.resolved
            ways = self.steps(name, before, after)
            moves = (when for when in whens if ways[when is INNER_BACK])
            found.append(Effects(tuple(self.moved(when, name, before, after) for when in moves)))
        # The resolved partial sum is an edge inside the group, which backward passes as well; a kernel's
        # collectives state in which direction they are issued.
        for op in configuration.group.operators:
            call = localise(configuration.placed(op.name, self.graph.atoms, self.mesh, None))
            sends = [
                Effect(when, source=self.overheads_source, sends=(send,), moves=True)
                for c in call.collectives
                for when in whens
                if c.backward is (when is INNER_BACK)
                if (send := self.prices.send(c.kind, c.axes, c.bytes))
            ]
            found.append(Effects(tuple(sends)))
        return found

    # -- memory -------------------------------------------------------------------------------------

    def _memory(
        self, choice: Choice, uses: Mapping[str, Use], *, handed: bool, joins: Sequence[bool]
    ) -> list[Effect]:
        """The memory that is alive while a group runs, in addition to what its parameters' uses keep."""
        gathered, buffers = self._gathered_bytes(choice, uses, backward=False)
        parts = self._parts(choice, gathered)
        moves = any(self._moves(choice, name, use) for name, use in uses.items())
        gathering = [Effect(GATHER, workspace_bytes=gathered + buffers)] if moves else []
        found = [*gathering, *_forward(parts, keeps=self.training and not choice.again)]
        if not self.training:
            return found
        needed, buffers_back = self._gathered_bytes(choice, uses, backward=True)
        freed = 0
        if choice.again:  # what the second forward gathers stays until backward
            freed = needed
            if moves:
                found.append(Effect(GATHER_AGAIN, workspace_bytes=gathered + buffers))
            found += _forward(parts, keeps=True, again=True, needed=needed)
        elif needed:
            found.append(Effect(GATHER_BACK, workspace_bytes=needed + buffers_back))
        most = self._most_back(choice, uses, needed, handed=handed)
        return [
            *found,
            Effect(COMPUTE_BACK, workspace_bytes=max(most - freed, 0)),
            Effect(COMPUTE_BACK, after=True, kept=-parts[-1].kept, transient=-freed),
            *self._returning(choice, uses, joins),
        ]

    def _moves(self, choice: Choice, name: str, use: Use) -> bool:
        if self.goes_ahead(name, choice.stored[name], use):
            return False
        return self.moves_to_use(name, self.way(name, choice.stored[name], use.layout), use)

    def _gathered_bytes(self, choice: Choice, uses: Mapping[str, Use], *, backward: bool) -> tuple[int, int]:
        """(bytes of parameters that were brought to their use, are alive while the group runs, and are not
        kept; bytes of buffers while they are brought), in forward or a second time for backward."""
        total = buffers = 0
        for name, use in uses.items():
            if self.goes_ahead(name, choice.stored[name], use):  # it counts from when it is sent
                continue
            way = self.way(name, choice.stored[name], use.layout)
            steps = self.use_steps(name, way, use)[0]
            # A copy that stays gathered was cast once when it was gathered; only the others are cast at each
            # use.
            cast = self.casts(name) and not way.unsharded
            if not steps and not cast:
                continue
            anew = self.made_anew(name, way, use)
            if backward and not (anew and use.wanted):
                continue
            size = self.bytes(name, use.layout)
            if anew or not use.wanted or not self.training:  # otherwise it is kept
                total += size
            if steps:
                # A shard is cast before it is gathered, so that the collective moves the narrow type: the
                # narrow shard is alive together with the gathered result.
                narrow = self.bytes(name, choice.stored[name]) if cast else 0
                buffers = max(buffers, self.resharding_bytes(steps, name) + narrow - size)
        return total, max(buffers, 0)

    def _parts(self, choice: Choice, gathered: int) -> list[_ForwardPart]:
        """The parts of the group's forward; ``gathered`` bytes are alive while parameters are read."""
        facts = choice.facts
        calls = facts.calls or (  # for a record that does not list them separately
            (facts.kept_bytes, facts.kept_bytes + facts.forward_peak_bytes, False),
            (facts.kept_bytes, facts.kept_bytes + facts.forward_parameters_peak_bytes, True),
        )
        cut, parts = parts_of(choice.configuration.group), [_ForwardPart(0, 0)]
        for position, (kept, peak, reads) in enumerate(calls):
            # The simulator frees inputs part by part; the fallback's two entries are no calls and are never
            # cut.
            if facts.calls and cut.of(position) == len(parts):
                parts.append(_ForwardPart(parts[-1].kept, 0))
            most = max(parts[-1].most, peak + (gathered if reads else 0))
            parts[-1] = _ForwardPart(kept if self.training else 0, most)
        return parts

    def _waiting(self, choice: Choice, uses: Mapping[str, Use]) -> dict[str, int]:
        return self.waiting_bytes({name: (choice.stored[name], use) for name, use in uses.items()})

    def _most_back(self, choice: Choice, uses: Mapping[str, Use], needed: int, *, handed: bool) -> int:
        """The peak of live memory in backward, in addition to what is kept.

        A parameter that is gathered a second time is alive while the node that reads it runs; one that a
        second forward has gathered (all ``needed`` of them) is alive until then. A gradient that has to move
        to where its parameter is stored waits until the group's backward is over.
        """
        facts, again = choice.facts, choice.again
        back, back_parameters = facts.backward_peak_bytes, facts.backward_parameters_peak_bytes
        if handed:
            back, back_parameters = facts.handed_peak_bytes, facts.handed_parameters_peak_bytes
        # Without the runs of single nodes, all gathered parameters are assumed alive at the peak of those
        # nodes that read parameters, which is an upper bound.
        most = max(needed + back_parameters, back) if again or not facts.backward_runs else back
        short = choice.configuration.group.short_names
        ways = {name: self.way(name, choice.stored[name], use.layout) for name, use in uses.items()}
        # What is made anew has been moved or cast, so it is among what was brought to its use.
        sizes = {
            short[name]: self.bytes(name, use.layout)
            for name, use in uses.items()
            if use.wanted and self.made_anew(name, ways[name], use)
            if not self.goes_ahead(name, choice.stored[name], use)
        }
        waiting = {short[name]: size for name, size in self._waiting(choice, uses).items()}
        for reads, made, alive, own in facts.backward_runs:
            gathered = (needed if reads else 0) if again else sum(sizes.get(name, 0) for name in reads)
            later = sum(waiting.get(name, 0) for name in made)
            most = max(most, (own if handed else alive) + gathered + later)
        return most

    def _returning(self, choice: Choice, uses: Mapping[str, Use], joins: Sequence[bool]) -> list[Effect]:
        """The memory while gradients return to where their parameters are stored, one after another;
        gradients of shared parameters are added, into a new tensor, to what waits there."""
        group = choice.configuration.group
        joining = {name for name, joined in zip(group.shared, joins, strict=False) if joined}
        # A parameter that is gathered ahead hands over its gradient, which is counted from then on.
        uses = {n: use for n, use in uses.items() if not self.hands_over(n, choice.stored[n], use)}
        most, waiting = 0, self._waiting(choice, uses)
        # Autograd returns first what was brought last in forward, and everything still to come waits in the
        # meantime.
        for name in (*group.shared[::-1], *group.parameters[::-1]):
            if name not in uses:
                continue
            stored, use = choice.stored[name], uses[name]
            way = self.way(name, stored, use.layout)
            steps, size = self.use_steps(name, way, use)[1], self.bytes(name, use.layout)
            narrow = self.casts(name) and self.gives(name, use) and not way.reduced_last
            waiting.pop(name, None)
            workspace = size + self.resharding_bytes(steps, name) if steps or narrow else 0
            if narrow:
                workspace = max(workspace, size + self.stored_bytes(name, stored))
            if name in joining and self.gives(name, use):
                summed = self.bytes(name, way.source) if way.reduced_last else self.stored_bytes(name, stored)
                # The group's own part and the new sum; :meth:`stored` counts what has arrived before and
                # waits.
                workspace = max(workspace, 2 * summed)
            most = max(most, sum(waiting.values()) + workspace)
        return [Effect(PARAMETERS, workspace_bytes=most)] if most else []
