"""The planners by name: one signature, one file each, loaded at first use.

Some refusals of planners are known before anything is computed.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """A method in the registry.

    Attributes:
        name: its name in ``--planners``, which is its module's name.
        about: a description in one line.
        kind: ``sharded``, ``pipelined`` or ``placed``.
        solves: whether it solves with CP-SAT, which an extra installs.
        one_batch: for a placing method that cuts no batch into micro-batches, the reason.
    """

    name: str
    about: str
    kind: str = "sharded"
    solves: bool = False
    one_batch: str = ""

    def points(
        self, task: PlanningTask, memory_limit_bytes: float | None, seed: int
    ) -> tuple[SimulatedPoint, ...]:
        """Return the simulated points of its plans, each with the planner's notes.

        A sharded method's module has ``select``, which picks from tables; a pipelined one's has
        ``pipelines``, which composes stages; a placed one's has ``place``, which gives operators devices and
        orders, or ``place_split``, which may cut operators too.
        """
        # Only now: listing the planners must load neither PyTorch nor solvers, one of which is an extra.
        from tensoropt.planners.results import best_of, best_pipelines, best_placements

        module = importlib.import_module(f"tensoropt.planners.{self.kind}.{self.name}")
        if self.kind == "sharded":
            selections = module.select(task, memory_limit_bytes, seed)
            return best_of(task, self.name, selections, memory_limit_bytes)
        if self.kind == "pipelined":
            answers = module.pipelines(task.staging, memory_limit_bytes, seed)
            return best_pipelines(task, self.name, answers, memory_limit_bytes)

        def place(graph: PricedGraph) -> tuple[PricedGraph, PlacedAnswer]:
            if hasattr(module, "place_split"):
                split: tuple[PricedGraph, PlacedAnswer] = module.place_split(graph, memory_limit_bytes, seed)
                return split
            return graph, module.place(graph.problem, memory_limit_bytes, seed)

        counts = self._counts(task)
        points = best_placements(task, self.name, place, memory_limit_bytes, counts)
        if counts == task.placed_counts:
            return points
        note = f"runs one micro-batch only: {self.one_batch}"
        return tuple(point._replace(notes=(*point.notes, note)) for point in points)

    def _counts(self, task: PlanningTask) -> tuple[int, ...]:
        """Return the micro-batch counts for which a placing method runs."""
        if not self.one_batch:
            return task.placed_counts
        if 1 not in task.placed_counts:
            listed = ", ".join(map(str, task.placed_counts))
            raise UnsuitableError(
                f"{self.name} runs one micro-batch only: {self.one_batch}; asked for {listed}, "
                "allow 1 as well or use another planner"
            )
        return (1,)

    def __call__(self, task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> tuple[Plan, ...]:
        """Return plans, ascending in memory; with a limit, the fastest that keeps it when simulated.

        Raises:
            UnsuitableError: the method cannot treat the problem.
            InfeasibleError: the method finds nothing within the limit.
        """
        from tensoropt.planners.results import plan_of

        points = self.points(task, memory_limit_bytes, seed)
        return tuple(plan_of(task, each.point, each.notes) for each in points)


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("data_parallel", "DDP, Horovod: the batch split over all devices, parameters whole"),
        Entry(
            "zero", "ZeRO, FSDP: data parallelism with state, gradients, parameters sharded (stages 1 to 3)"
        ),
        Entry("megatron", "Megatron-LM: attention heads and MLP columns, then rows, inside; batch outside"),
        Entry("optcnn", "OptCNN: node and edge elimination for the shortest time"),
        Entry("flexflow", "FlexFlow: Markov chain Monte Carlo over the same space, simulator as oracle"),
        Entry("tofu", "Tofu: recursive bisection, least communication, every tensor split"),
        Entry("ilp", "Alpa, AutoParallel: a 0-1 program for the shortest time within a memory limit (HiGHS)"),
        Entry(
            "gpipe",
            "GPipe: a stage to each device, all forwards before all backwards, recomputed",
            "pipelined",
        ),
        Entry(
            "pipedream_1f1b",
            "PipeDream-flush: the slowest stage as fast as can be, one forward, one backward",
            "pipelined",
        ),
        Entry("dapple", "DAPPLE: replicated stages, for the latency of the whole step", "pipelined"),
        Entry("alpa", "Alpa: stages by a dynamic programme, any way to split inside", "pipelined"),
        Entry(
            "galvatron",
            "Galvatron: per layer data, sharded data or tensor parallelism, in even stages",
            "pipelined",
        ),
        Entry("placer", "TensorFlow's Placer: rules alone; what is free lies on device 0", "placed"),
        Entry("m_topo", "Baechi m-TOPO: a topological order cut into pieces of equal memory", "placed"),
        Entry("m_etf", "Baechi m-ETF: earliest task first, under caps of memory", "placed"),
        Entry("m_sct", "Baechi m-SCT: as m-ETF, with favourite children by a linear program", "placed"),
        Entry("dpos", "FastT DPOS: critical path on the fastest devices, the rest in idle slots", "placed"),
        Entry(
            "os_dpos",
            "FastT OS-DPOS: DPOS, cutting operators of the critical path",
            "placed",
            one_batch="operators that are cut into pieces are not run in micro-batches as well",
        ),
        Entry(
            "pesto",
            "Pesto: an exact schedule of a coarsened graph on two devices (CP-SAT)",
            "placed",
            solves=True,
        ),
        Entry(
            "netsplit",
            "NetSplit: an exact schedule, one thing at a time on a device (CP-SAT)",
            "placed",
            solves=True,
        ),
        Entry(
            "netsplit_published",
            "NetSplit as published, where operators may share a device",
            "placed",
            solves=True,
            one_batch="its program, kept as published, schedules every operator once in a step",
        ),
    )
}


def planner(name: str) -> Entry:
    """Return the planner called ``name``.

    Raises:
        TensorOptError: there is none; the message names the nearest.
    """
    if name not in ENTRIES:
        raise TensorOptError(f"no planner is called '{name}'; {suggest(name, ENTRIES)}")
    return ENTRIES[name]


_ON_TWO = "pesto"
_NEEDS_ATTENTION = "megatron"


def foreseen_refusal(entry: Entry, devices: int, *, training: bool, attention: bool | None = None) -> str:
    """Return the reason why a planner will refuse; "" if none is known before it runs.

    Args:
        devices: the number of devices in the cluster.
        attention: whether the model has attention as a single operator; None if that is not known.
    """
    if entry.solves and importlib.util.find_spec("ortools") is None:
        return "needs a solver: pip install 'tensoropt[solvers]'"
    if entry.kind == "pipelined" and not training:
        return "plans training only"
    if entry.kind == "pipelined" and devices < 2:
        return "needs at least 2 devices"
    if entry.name == _ON_TWO and devices != 2:
        return f"places on 2 devices, not on {devices}"
    if entry.name == _NEEDS_ATTENTION and attention is False:
        return "splits attention heads, and this model has none"
    return ""
