"""Residuals of a machine, applied to its prices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensoropt import zoo
from tensoropt.costs.compute import MeasuredCompute, class_of
from tensoropt.costs.residuals import NETWORK, NO_RESIDUALS, REST, Residuals, load_residuals, save_residuals
from tensoropt.profiling.link_fits import LinkFit, Segment
from tensoropt.profiling.links import LinkFits
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.configurations import enumerate_configurations
from tests.costs.models import problem

FACTS = SimpleNamespace(forward_flops=0, backward_flops=0, work_of_calls=())


@pytest.fixture
def work() -> Workload:
    built = zoo.build("mlp", 8)
    graph = problem(lambda: (built.model, built.args, built.kwargs)).graph
    group = graph.groups[0]
    (configuration, *_) = enumerate_configurations(graph.atoms, group, (1, 2), group.unsplit)
    return workload(graph, configuration, (1, 2))


def test_nothing_known_changes_nothing(work):
    fits = LinkFits(collectives={})
    assert NO_RESIDUALS.links(fits) is fits
    assert NO_RESIDUALS.overheads(Overheads(1.0, 2.0)) == Overheads(1.0, 2.0)


@pytest.mark.parametrize(("factor", "forward_s"), [(1.5, 1.5), (1.0, 1.0)])
def test_a_class_takes_its_factor(work, factor, forward_s):
    record = {"forward_s": 1.0, "backward_s": 2.0, "forward_host_s": 0.25, "backward_host_s": 0.5}
    factors = {class_of(work) if factor != 1.0 else "convolution": 1.5}
    found = MeasuredCompute({work.key: record}, 1e-9, factors=factors)
    assert found.seconds(work, FACTS) == pytest.approx((forward_s, 2 * forward_s))
    assert found.weight_gradient_s(work, FACTS) == forward_s  # half of backward
    assert found.host_seconds(work) == (0.25, 0.5)


def test_nothing_is_faster_than_the_peak(work):
    facts = SimpleNamespace(forward_flops=10, backward_flops=40, work_of_calls=())
    record = {"forward_s": 1.0, "backward_s": 2.0}
    found = MeasuredCompute({work.key: record}, 1e-9, factors={class_of(work): 0.5}, peaks={"float32": 5.0})
    assert found.seconds(work, facts) == (2.0, 8.0)
    assert found.weight_gradient_s(work, facts) == 4.0


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
