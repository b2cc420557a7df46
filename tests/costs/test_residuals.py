"""Residuals of a machine, applied to its prices."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tensoropt import zoo
from tensoropt.costs.compute import class_of
from tensoropt.costs.residuals import (
    NETWORK,
    NO_RESIDUALS,
    REST,
    Residuals,
    load_residuals,
    save_residuals,
)
from tensoropt.profiling.link_fits import LinkFit, Segment
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.types import MEASURED
from tests.costs.models import problem


@dataclass
class Costs:
    source: str = MEASURED
    optimizer_s_per_element: float = 1e-9

    def seconds(self, work, facts):
        return 1.0, 2.0

    def host_seconds(self, work):
        return 0.25, 0.5

    def weight_gradient_s(self, work, facts):
        return 0.5

    def source_of(self, work):
        return self.source


FACTS = SimpleNamespace(traffic_bytes=400)


@pytest.fixture
def work() -> Workload:
    built = zoo.build("mlp", 8)
    graph = problem(lambda: (built.model, built.args, built.kwargs)).graph
    group = graph.groups[0]
    (configuration, *_) = enumerate_configurations(graph.atoms, group, (1, 2), group.unsplit)
    return workload(graph, configuration, (1, 2))


def test_nothing_known_changes_nothing(work):
    costs, fits = Costs(), LinkFits(collectives={})
    assert NO_RESIDUALS.compute(costs) is costs
    assert NO_RESIDUALS.links(fits) is fits
    assert NO_RESIDUALS.overheads(Overheads(1.0, 2.0)) == Overheads(1.0, 2.0)


def test_a_class_takes_its_factor(work):
    residuals = Residuals({class_of(work): 1.5, REST: 2.0})
    found = residuals.compute(Costs())
    assert found.seconds(work, FACTS) == pytest.approx((1.5, 3.0))
    assert found.weight_gradient_s(work, FACTS) == 0.75
    assert found.host_seconds(work) == (0.25, 0.5)
    assert found.optimizer_s_per_element == 2e-9
    other = Residuals({"convolution": 1.5}).compute(Costs())
    assert other.seconds(work, FACTS) == (1.0, 2.0)


def test_collectives_take_their_factor():
    line = Segment(alpha_s=1e-3, seconds_per_byte=1e-9, from_bytes=0.0, up_to_bytes=float("inf"))
    fit = LinkFit(kind="all_reduce", group=(0, 1), segments=(line,), residual=0.0)
    fits = LinkFits(
        collectives={("all_reduce", (0,)): (fit,), ("all_gather", (0,)): (fit,)}, pairs={(0, 1): fit}
    )
    found = Residuals({NETWORK: 2.0}).links(fits)
    (reduced,), (gathered,) = (found.collectives[kind, (0,)] for kind in ("all_reduce", "all_gather"))
    assert reduced.time_s(1e6) == gathered.time_s(1e6) == pytest.approx(2 * 2e-3)
    assert found.pairs == fits.pairs


def test_overheads_take_their_factors():
    raw = Overheads(*[1.0] * 8)
    assert Residuals({REST: 2.0}).overheads(raw) == Overheads(*[2.0] * 8)


def test_residuals_are_kept_by_hardware(tmp_path):
    with ProfileStore(tmp_path / "p.sqlite") as store:
        assert load_residuals(store, "here") == NO_RESIDUALS
        found = Residuals({REST: 1.2})
        save_residuals(store, "here", found)
        assert load_residuals(store, "here") == found
        assert load_residuals(store, "elsewhere") == NO_RESIDUALS
