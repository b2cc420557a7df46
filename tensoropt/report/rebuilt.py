"""A point's strategy, rebuilt from what was saved with its exploration, to be simulated under changed
costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.prices import CommunicationCosts, Prices, runs_beside
from tensoropt.plan.evaluate import Evaluation, evaluate_strategy
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.recorded import Recorded, mesh_of
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.overlap import Overlap, overlap_of
from tensoropt.simulate.recorder import StepRecorder


@dataclass(frozen=True)
class Rebuilt:
    """A sharded point's strategy, with the workloads and the costs that it was simulated with.

    Attributes:
        works, facts: the workload and the facts of each group.
    """

    exploration: Exploration
    recorded: Recorded
    cluster: Cluster
    mesh: Mesh
    strategy: Strategy
    works: Mapping[str, Workload]
    facts: Mapping[str, Facts]

    def prices(
        self,
        *,
        cluster: Cluster | None = None,
        recorded: Recorded | None = None,
        communication: CommunicationCosts | None = None,
    ) -> Prices:
        """Return the prices of its exploration, or those of another cluster with the same mesh, of other
        seconds for workloads and links, or of collectives that are priced differently."""
        settings = self.exploration.settings
        found = (recorded or self.recorded).prices(
            cluster or self.cluster,
            self.mesh,
            self.strategy.mesh,
            str(settings["optimizer"]),
            with_process=bool(settings.get("process_memory")),
        )
        if communication is not None:
            found.communication = communication
        return found

    def overlap(self, cluster: Cluster | None = None) -> Overlap:
        """Return what overlaps what on its cluster, or on another one with the same mesh."""
        asked = str(self.exploration.settings.get("overlap", "default"))
        where = cluster or self.cluster
        return overlap_of(where, self.mesh, beside=runs_beside(where.device_type, asked))

    def simulated(
        self,
        *,
        cluster: Cluster | None = None,
        recorded: Recorded | None = None,
        communication: CommunicationCosts | None = None,
        recorder: StepRecorder | None = None,
    ) -> Evaluation:
        """Return one simulated step of it at :meth:`prices`."""
        prices = self.prices(cluster=cluster, recorded=recorded, communication=communication)
        return evaluate_strategy(
            self.strategy, self.works, self.facts, prices, self.overlap(cluster), recorder
        )


def rebuilt(exploration: Exploration, index: int, recorded: Recorded) -> Rebuilt:
    """Return point ``index`` of ``exploration.all_points``, which is neither placed nor a pipeline, rebuilt.

    Raises:
        TensorOptError: the costs of its workloads were not saved.
    """
    space = exploration.spaces[exploration.all_points[index].space]
    strategy = strategy_from_dict(exploration.plan(index).strategy_data(), recorded.grouped)
    cluster = Cluster.from_dict(exploration.cluster)
    works = {
        name: workload(recorded.grouped, configuration, strategy.mesh)
        for name, configuration in strategy.configurations.items()
    }
    return Rebuilt(
        exploration,
        recorded,
        cluster,
        mesh_of(cluster, space.mesh.shape, space.mesh.names),
        strategy,
        works,
        {name: recorded.compute.of(work).facts for name, work in works.items()},
    )
