"""The effects of an operator group in a step: its computation, its own collectives, and what it saves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from tensoropt.costs import effects as at
from tensoropt.costs.effects import Allocation, Effect, Effects, MoveEffects, allocations, joined, part_of
from tensoropt.costs.parameter_effects import ParameterEffects, StoredUse, Use
from tensoropt.costs.prices import Prices
from tensoropt.ops.calls import InnerCollective
from tensoropt.ops.layouts import Layout
from tensoropt.ops.localise import localise
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import Turn


@dataclass(frozen=True)
class Parts:
    """A group's operators, cut before the first and after the last use of each tensor that the group reads.

    Attributes:
        starts: the index of the first operator of each part.
        first, last: tensor -> the index of the part that reads it first, or last.
    """

    starts: tuple[int, ...]
    first: Mapping[str, int]
    last: Mapping[str, int]

    def of(self, position: int) -> int:
        """Return the index of the part that contains the operator with the index ``position``."""
        return bisect_right(self.starts, position) - 1


def parts_of(group: Group) -> Parts:
    """Cut a group's operators into :class:`Parts`, so that each input is freed at the end of a part."""
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


class Choice(NamedTuple):
    """A choice for a group: its configuration, workload, parameters' stored layouts, and recomputation."""

    configuration: Configuration
    work: Workload
    facts: Facts
    stored: Mapping[str, Layout]
    again: bool = False
    turns: Mapping[str, Turn] = MappingProxyType({})


class GroupEffects:
    def __init__(self, prices: Prices):
        self.prices, self.graph, self.training = prices, prices.graph, prices.training
        self.moves = MoveEffects(prices)
        self.parameters = ParameterEffects(self.moves)
        self._last_part: dict[str, int] = {}

    def last_part(self, group: Group) -> int:
        """Return the index of the last part of a group's forward (:class:`Parts`)."""
        if group.name not in self._last_part:
            self._last_part[group.name] = len(parts_of(group).starts) - 1
        return self._last_part[group.name]

    def uses(self, choice: Choice) -> dict[str, Use]:
        """Return parameter -> its use, for those in ``choice.stored``: own ones, then tied ones, in forward's
        order."""
        configuration = choice.configuration
        group, wanted = configuration.group, choice.facts.parameters_kept
        neighbours = self.parameters.blocks.neighbours(group.name)
        last = self.last_part(group)
        return {
            name: Use(
                configuration.layout(name),
                wanted.get(group.short_names[name], 0),
                choice.again,
                neighbours,
                last,
                choice.turns.get(name),
                self.graph.learns(name, group.name),
                group.short_names[name],
            )
            for name in (*group.parameters, *group.shared)
            if name in choice.stored
        }

    def stored_uses(self, choice: Choice) -> list[StoredUse]:
        """Return how the group uses each parameter in ``choice.stored``, with the steps from its storage."""
        stored_use, stored = self.parameters.stored_use, choice.stored
        return [stored_use(name, stored[name], use) for name, use in self.uses(choice).items()]

    def group(self, choice: Choice, *, joins: Sequence[bool] = ()) -> Effects:
        """Return all effects of a group in one micro-batch, phase by phase. ``joins``: for each tied
        parameter, whether its gradients from other groups wait to be added to this group's."""
        group, again = choice.configuration.group, choice.again
        uses = self.stored_uses(choice)
        own = [use for use in uses if use.name not in self.graph.shared]
        copies = map(self.parameters.unsharded, own)
        work = [self.computed(choice), *self.inside(choice), *map(self.parameters.used, uses), *copies]
        found: list[Effect] = []

        # Parameters come. One that is gathered ahead counts from when it is sent; one that backward keeps, as
        # a kept copy.
        arriving = [use for use in uses if use.moves and not use.ahead]
        gathered = sum(use.bytes for use in arriving if not use.kept)
        gather = Effect(at.GATHER, workspace_bytes=gathered + self._buffer_bytes(arriving))
        found += [gather] if arriving else []

        # Forward, and what it keeps.
        parts = self._parts(choice, gathered)
        found += _forward(parts, keeps=self.training and not again)
        if not self.training:
            return joined([*work, Effects(tuple(found))])

        # Forward a second time, or parameters a second time; what the second forward gathers stays until
        # backward.
        anew = [use for use in arriving if use.anew and use.wanted]
        needed = sum(use.bytes for use in anew)
        stays = allocations(*(use.gathered("again") for use in anew)) if again else ()
        if again:
            found += [replace(gather, when=at.GATHER_AGAIN)] if arriving else []
            found += _forward(
                self._parts(choice, gathered, staying=needed), keeps=True, again=True, stays=stays
            )

        # Backward, and what it frees.
        most = self._most_back(choice, anew, [use for use in uses if use.waits])
        found.append(Effect(at.COMPUTE_BACK, workspace_bytes=max(most - needed * again, 0)))
        found.append(Effect(at.COMPUTE_BACK, after=True, ends=allocations(*_saved(parts), *stays)))

        # Gradients return.
        joining = {name for name, waits in zip(group.shared, joins, strict=False) if waits}
        most = self._most_returning(uses, joining)
        found += [Effect(at.PARAMETERS, workspace_bytes=most)] if most else []
        return joined([*work, Effects(tuple(found))])

    # -- work ---------------------------------------------------------------------------------------

    def computed(self, choice: Choice) -> Effects:
        """Return the effects of computing: forward, second forward if recomputed, backward."""
        work = choice.work
        forward, backward = self.prices.work(work, choice.facts)
        passes = [(at.COMPUTE, forward)]
        if self.training and choice.again:
            passes.append((at.COMPUTE_AGAIN, self.prices.again(work, forward)))
        if self.training:
            passes.append((at.COMPUTE_BACK, backward))
        source = self.prices.compute.source_of(work)
        return Effects(
            tuple(Effect(when, local_s=s.device_s, host_s=s.host_s, source=source) for when, s in passes)
        )

    def inside(self, choice: Choice) -> list[Effects]:
        """Return the effects of a group's own communication: reducing its partial sum, and inside kernels."""
        configuration, found, moves = choice.configuration, [], self.moves
        passes = ((at.INNER, True), (at.INNER_AGAIN, choice.again), (at.INNER_BACK, self.training))
        whens = [when for when, happens in passes if happens]
        if configuration.resolved is not None:
            name, before, after = configuration.resolved
            ways = moves.steps(name, before, after)
            done = (when for when in whens if ways[when is at.INNER_BACK])
            found.append(Effects(tuple(moves.moved(when, name, before, after) for when in done)))
        # The resolved partial sum is an edge inside the group, which backward passes as well; a kernel's
        # collectives state in which direction they are issued.
        for position, op in enumerate(configuration.group.operators):
            call = localise(configuration.placed(op.name, self.graph.atoms, moves.mesh, None))
            # The seconds of a collective include its call where host and device are one.
            host_s = self.prices.message_end.host_s
            sends = [
                Effect(when, host_s=host_s, source=moves.overheads_source, sends=(send,), moves=True)
                for c in call.collectives
                for when in whens
                if c.backward is (when is at.INNER_BACK) and not c.beside
                if (send := self.prices.send(c.kind, c.axes, c.bytes))
            ]
            beside = [c for c in call.collectives if c.beside]
            found.append(Effects((*sends, *self._beside_work(choice, position, beside))))
        return found

    def _beside_work(
        self, choice: Choice, position: int, collectives: Sequence[InnerCollective]
    ) -> Iterator[Effect]:
        """Yield the effects of a kernel's ``collectives`` that overlap with its work: in forward, in its
        recomputation and in backward. ``position``: the index of the kernel's operator in the group."""
        works = choice.facts.work_of_calls
        flops = sum(work.forward_flops for work in works)
        # The group's seconds are not known call by call; backward has the same shares as forward.
        share = works[position].forward_flops / flops if flops else 1.0
        for computed in self.computed(choice).effects if collectives else ():
            backward = computed.when is at.COMPUTE_BACK
            found = [c for c in collectives if c.backward is backward]
            priced = (self.prices.send(c.kind, c.axes, c.bytes) for c in found)
            sends = tuple(send for send in priced if send is not None)
            if sends:
                work_s = computed.local_s * share * found[0].beside
                yield Effect(
                    computed.when,
                    host_s=len(sends) * self.prices.message_end.host_s,
                    source=self.moves.overheads_source,
                    sends=sends,
                    beside_work_s=work_s,
                    moves=True,
                )

    # -- what the search counts -----------------------------------------------------------------------

    def kept(self, choice: Choice) -> Effects:
        """Return the effects of all memory that the group saves for backward, as one allocation."""
        kept = choice.facts.kept_bytes
        if not self.training or choice.again or not kept:
            return Effects(())
        saved = (Allocation(_SAVED, "all", kept, kept=True),)
        return Effects((Effect(at.COMPUTE, begins=saved), Effect(at.COMPUTE_BACK, after=True, ends=saved)))

    @staticmethod
    def sent_beside(use: StoredUse, effects: Effects) -> tuple[tuple[bool, bool, float], ...]:
        """Return (whether in forward, whether once per step, seconds) for each collective of a parameter that
        the computation of other blocks may hide."""
        # Backward computes no other block after the first one.
        first = not (use.use.neighbours and use.use.neighbours.before)
        return tuple(
            (effect.when.phase in _FORWARD, effect.when.once, sum(one.send.seconds for one in effect.beside))
            for effect in effects.effects
            if effect.beside and not effect.when.at_once and not (first and effect.when.what == "next")
        )

    def hidden_s(self, computed: Effects, sent: Iterable[tuple[bool, bool, float]]) -> float:
        """Return the seconds of collectives that the search assumes hidden behind computation.

        A block's parameters are prefetched, and its gradients scattered, during neighbouring blocks, which
        the search assumes to be equal to this one. The slow-down of computation meanwhile is subtracted.

        Args:
            computed: the group's own work (:meth:`computed`).
            sent: the collectives of its parameters (:meth:`sent_beside`).
        """
        sent_s: dict[tuple[bool, bool], float] = {}
        for forward, once, seconds in sent:
            sent_s[forward, once] = sent_s.get((forward, once), 0.0) + seconds
        if not sent_s:
            return 0.0
        computed_s = {True: 0.0, False: 0.0}
        for effect in computed.effects:
            computed_s[effect.when.phase in _FORWARD] += effect.local_s
        hidden_s = 0.0
        for way, most_s in computed_s.items():
            each_s = min(sent_s.get((way, False), 0.0), most_s)
            # One micro-batch hides what is sent once, in addition to what each of them sends.
            once_s = min(sent_s.get((way, True), 0.0), most_s - each_s)
            hidden_s += each_s * self.moves.mesh[0] + once_s
        return hidden_s / (1.0 + self.prices.slower_beside)

    # -- memory -------------------------------------------------------------------------------------

    def _buffer_bytes(self, uses: Sequence[StoredUse]) -> int:
        most = 0
        for use in uses:
            if use.forward:
                # A shard is cast before it is gathered, so that the collective moves the narrow type: the
                # narrow shard is alive together with the gathered result.
                casts = use.casts and not use.way.unsharded
                narrow = self.moves.bytes(use.name, use.stored) if casts else 0
                most = max(most, self.moves.resharding_bytes(use.forward, use.name) + narrow - use.bytes)
        return most

    def _parts(self, choice: Choice, gathered: int, *, staying: int = 0) -> list[_ForwardPart]:
        """Return the memory of each part of a group's forward, with ``gathered`` bytes of gathered parameters
        during calls that read parameters, and ``staying`` bytes during all others."""
        cut, parts = parts_of(choice.configuration.group), [_ForwardPart(0, 0)]
        for position, (kept, peak, reads) in enumerate(choice.facts.calls):
            # The simulator frees inputs part by part.
            if cut.of(position) == len(parts):
                parts.append(_ForwardPart(parts[-1].kept, 0))
            most = max(parts[-1].most, peak + (gathered if reads else staying))
            parts[-1] = _ForwardPart(kept if self.training else 0, most)
        return parts

    def _most_back(self, choice: Choice, anew: Sequence[StoredUse], waiting: Sequence[StoredUse]) -> int:
        """Return the peak bytes of backward, without saved tensors. ``anew``: parameters gathered again;
        ``waiting``: parameters whose gradients wait for the end of the group's backward."""
        facts, again, most = choice.facts, choice.again, choice.facts.backward_peak_bytes
        short = choice.configuration.group.short_names
        gathered, returning = ({short[use.name]: use.bytes for use in uses} for uses in (anew, waiting))
        buffers = {} if again else {short[use.name]: self._buffer_bytes([use]) for use in anew}
        before: tuple[str, ...] = ()
        for number, run in enumerate(facts.backward_runs):
            # Parameters gathered for this run, or by the second forward and not yet freed.
            needing = facts.backward_runs[number:] if again else (run,)
            read = sum(gathered.get(name, 0) for name in {name for r in needing for name in r.reads})
            later = sum(returning.get(name, 0) for name in run.made)
            most = max(most, run.peak_bytes + read + later)
            # Parameters of a node are gathered one after another, and buffers are freed before it computes.
            buffer = max((buffers.get(name, 0) for name in run.reads if name not in before), default=0)
            most = max(most, run.begin_bytes + read + later + buffer)
            before = run.reads
        return most

    def _most_returning(self, uses: Sequence[StoredUse], joining: Collection[str]) -> int:
        """Return the peak bytes of resharding gradients to storage and summing those of ``joining`` ones."""
        most = waiting = 0
        # Autograd returns first what was brought last in forward, and everything still to come waits in the
        # meantime.
        for use in uses:
            if use.behind:  # it hands over its gradient, which is counted from then on
                continue
            workspace = 0
            if use.waits:
                workspace = use.bytes + self.moves.resharding_bytes(use.backward, use.name)
            if use.casts_back:
                workspace = max(workspace, use.bytes + self.moves.stored_bytes(use.name, use.stored))
            if use.gives and use.name in joining:
                # The group's own part and the new sum; ParameterEffects.stored counts what has arrived before
                # and waits.
                workspace = max(workspace, 2 * self.parameters.summed_bytes(use.name, use.stored))
            most = max(most, waiting + workspace)
            waiting += use.bytes if use.waits else 0
        return most


class _ForwardPart(NamedTuple):
    """The bytes saved by the end of a part of forward, and the peak bytes during it."""

    kept: int
    most: int


_FORWARD = ("first", "forward")
_SAVED = "saved inside for backward"


def _saved(parts: Sequence[_ForwardPart]) -> list[Allocation]:
    before = [0, *(part.kept for part in parts)]
    return [
        Allocation(_SAVED, str(number), part.kept - kept, kept=True)
        for number, (part, kept) in enumerate(zip(parts, before, strict=False))
    ]


def _forward(
    parts: Sequence[_ForwardPart],
    *,
    keeps: bool,
    again: bool = False,
    stays: tuple[Allocation, ...] = (),
) -> list[Effect]:
    """Return the memory effects of a group's forward, or of its recomputation (``again``). ``keeps``: whether
    it saves tensors for backward; ``stays``: gathered parameters that backward uses, too."""
    needed, effects = sum(each.bytes for each in stays), []
    for number, (part, saved) in enumerate(zip(parts, _saved(parts), strict=True)):
        kept = part.kept if keeps else 0
        effects.append(
            Effect(
                part_of(number, again=again),
                begins=allocations(saved if keeps else None, *(stays if number == 0 else ())),
                # A part's peak includes what it keeps and what is gathered for it, which are also alive as
                # separate bytes; without the subtraction they would count twice.
                workspace_bytes=max(part.most - kept - needed, 0),
            )
        )
    return effects
