"""The registry of planners by name. They share one signature, and their modules load at first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from tensoropt.errors import TensorOptError, suggest
from tensoropt.planners.errors import UnsuitableError

if TYPE_CHECKING:
    from tensoropt.placement.prices import PricedGraph
    from tensoropt.plan.plan import Plan
    from tensoropt.planners.placed.common.units import PlacedAnswer
    from tensoropt.planners.results import SimulatedPoint
    from tensoropt.planners.task import PlanningTask


@dataclass(frozen=True)
class Entry:
    """A planner of the registry.

    Attributes:
        name: the planner's name in ``--planners``, and the name of its module.
        about: a description in one line.
        kind: the kind of its plans. The module's main function is called ``select`` for ``sharded`` plans,
            ``pipelines`` for ``pipelined`` and ``place`` for ``placed`` ones or, if it returns several
            placements or cuts operators, ``placements``.
        one_batch: the reason why a placing method cannot run several micro-batches; "" if it can.
        solves: whether the method needs the solver CP-SAT, which an extra installs.
        options: the settings of the method that differ from its ``DEFAULTS``.
    """

    name: str
    about: str
    kind: str = "sharded"
    one_batch: str = ""
    solves: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_option(self, name: str, value: str) -> Entry:
        """Return the planner with one setting changed to a number above 0, given as text.

        Raises:
            TensorOptError: the method has no such setting, or the text is not a valid value.
        """
        defaults = getattr(self.module, "DEFAULTS", None)
        known = {} if defaults is None else vars(defaults)
        if name not in known:
            listed = suggest(name, known) if known else "it has no options"
            raise TensorOptError(
                f"--planner-option {self.name}.{name}: {self.name} has no such option; {listed}"
            )
        number = Field(gt=0, allow_inf_nan=False)
        hint: Any = Annotated[get_type_hints(type(defaults))[name], number]
        read: TypeAdapter[Any] = TypeAdapter(hint)
        try:
            return replace(self, options={**self.options, name: read.validate_python(value)})
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise TensorOptError(
                f"--planner-option {self.name}.{name}={value}: {why}; the default is {known[name]}"
            ) from None

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings as keyword arguments; empty if it has none."""
        defaults = getattr(self.module, "DEFAULTS", None)
        return {} if defaults is None else {"settings": replace(defaults, **self.options)}

    @property
    def module(self) -> Any:
        """The method's module, imported only here: listing planners must import no PyTorch and no solvers."""
        return importlib.import_module(f"tensoropt.planners.{self.kind}.{self.name}")

    def points(
        self, task: PlanningTask, memory_limit_bytes: float | None, seed: int
    ) -> tuple[SimulatedPoint, ...]:
        """Return the simulated points of the planner's plans, each with the planner's notes."""
        from tensoropt.planners import results

        match self.kind:
            case "sharded":
                if task.refusal:
                    raise UnsuitableError(f"no sharded plan: {task.refusal}")
                selections = self.module.select(task, memory_limit_bytes, seed)
                found = results.sharded(task, self.name, selections)
            case "pipelined":
                answers = [*self.module.pipelines(task.staging, memory_limit_bytes, seed)]
                found = results.pipelined(task, self.name, answers)
            case _:
                place = partial(self.placements, memory_limit_bytes=memory_limit_bytes, seed=seed)
                found = results.placed(task, self.name, place, memory_limit_bytes, self.one_batch)
        return results.best_of(self.name, found, memory_limit_bytes)

    def placements(
        self, graph: PricedGraph, memory_limit_bytes: float | None, seed: int
    ) -> Sequence[tuple[PricedGraph, PlacedAnswer]]:
        """Return a placing method's placements, each with the operator graph as the method cut it."""
        if hasattr(self.module, "placements"):
            return self.module.placements(graph, memory_limit_bytes, seed, **self.settings)
        return ((graph, self.module.place(graph.problem, memory_limit_bytes, seed, **self.settings)),)

    def __call__(self, task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> tuple[Plan, ...]:
        """Return the planner's plans, ascending in memory, with its notes in their ``settings``. With a
        memory limit, return only the fastest plan whose simulated memory is within it.

        Raises:
            UnsuitableError: the method cannot treat the problem.
            InfeasibleError: the method finds nothing within the limit.
        """
        plans = []
        for point, notes, _ in self.points(task, memory_limit_bytes, seed):
            plan = task.base.plan(point)
            settings = {**plan.settings, **({"notes": list(notes)} if notes else {})}
            plans.append(plan.model_copy(update={"settings": settings}))
        return tuple(plans)


_Pipelined = partial(Entry, kind="pipelined")
_Placed = partial(Entry, kind="placed")
_Cutting = partial(
    _Placed, one_batch="operators that are cut into pieces are not run in micro-batches as well"
)
_Exact = partial(_Placed, one_batch="its program schedules every operator once in a step", solves=True)

_ALL = (
    Entry("data_parallel", "DDP, Horovod: the batch split over all devices, parameters whole"),
    Entry("zero", "ZeRO, FSDP: data parallelism with state, gradients, parameters sharded (stages 1 to 3)"),
    Entry("megatron", "Megatron-LM: heads and matrices split on the inner axis, the batch on the outer"),
    Entry("optcnn", "OptCNN: node and edge elimination for the shortest time"),
    Entry("flexflow", "FlexFlow: Markov chain Monte Carlo over the same space, simulator as oracle"),
    Entry("tofu", "Tofu: recursive bisection, least communication, every tensor split"),
    Entry("ilp", "Alpa, AutoParallel: a 0-1 program for the shortest time within a memory limit (HiGHS)"),
    _Pipelined("gpipe", "GPipe: one stage per device, all forwards before all backwards, recomputed"),
    _Pipelined("pipedream_1f1b", "PipeDream-flush: the slowest stage as fast as possible, 1F1B with a flush"),
    _Pipelined("dapple", "DAPPLE: replicated stages, for the latency of the whole step"),
    _Pipelined("alpa", "Alpa: stages by a dynamic programme, any way to split inside"),
    _Pipelined("galvatron", "Galvatron: per layer data, sharded data or tensor parallelism, in even stages"),
    _Placed("placer", "TensorFlow's Placer: rules alone; unconstrained operators on device 0"),
    _Placed("m_topo", "Baechi m-TOPO: a topological order cut into pieces of equal memory"),
    _Placed("m_etf", "Baechi m-ETF: earliest task first, under memory caps"),
    _Placed("m_sct", "Baechi m-SCT: as m-ETF, with favourite children by a linear program"),
    _Placed("dpos", "FastT DPOS: critical path on the fastest devices, the rest in idle slots"),
    _Cutting("os_dpos", "FastT OS-DPOS: DPOS, cutting operators of the critical path"),
    _Placed("local_search", "ours: annealing from the heuristics' placements, for every amount of memory"),
    _Cutting(
        "cut_search", "ours: operators cut along the batch or placed whole, segment by segment, annealed"
    ),
    _Exact("pesto", "Pesto: an exact schedule of a coarsened graph on two devices (CP-SAT)"),
    _Exact("pesto_extended", "Pesto as NetSplit extends it: forward alone, any number of devices (CP-SAT)"),
    _Exact("netsplit", "NetSplit: an exact schedule, one operator at a time on a device (CP-SAT)"),
    _Exact("netsplit_shared", "NetSplit's program as published: operators may overlap on a device (CP-SAT)"),
)
ENTRIES = {entry.name: entry for entry in _ALL}


def planner(name: str) -> Entry:
    """Return the planner called ``name``.

    Raises:
        TensorOptError: no planner has this name. The message gives the nearest name.
    """
    if name not in ENTRIES:
        raise TensorOptError(f"no planner is called '{name}'; {suggest(name, ENTRIES)}")
    return ENTRIES[name]
