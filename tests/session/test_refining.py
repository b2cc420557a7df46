"""Wide meshes, searched among what other meshes' best strategies use."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from tensoropt import InfeasibleError, Settings, explore
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.restrictions import FREE, Restriction, Restrictions
from tensoropt.costs.tables import make_templates
from tensoropt.engine.models import ModelSpec
from tensoropt.evaluation.problem import prepare
from tensoropt.session import refining
from tensoropt.session.refining import _COMBINED, _is_wide, apart, best_counts, combining, refine
from tensoropt.session.session import Session
from tensoropt.session.spaces import SpaceSearch

FLAT, WIDE = Mesh(shape=(8,)), Mesh(shape=(2, 2, 2))


def graph_of(*strategies: int) -> SimpleNamespace:
    groups = [SimpleNamespace(name=f"g{i}", strategies=range(n)) for i, n in enumerate(strategies)]
    return SimpleNamespace(groups=groups)


def test_a_mesh_is_wide_where_a_group_has_many_ways_to_split_on_three_axes():
    assert _is_wide(WIDE, graph_of(2, 8))
    assert not _is_wide(WIDE, graph_of(2, 3))
    assert not _is_wide(FLAT, graph_of(8))
    assert not _is_wide(WIDE, graph_of())


def test_what_constraints_leave_of_spaces_stays_with_them():
    pinned = Restriction(kept={"g0": (0,)})
    left = Restrictions({("8", 1): FREE, ("2x2x2", 1): pinned})
    narrow, wide = apart(graph_of(8), [FLAT, WIDE], [1, 2], left)
    assert narrow == {(FLAT, 1): FREE}
    assert wide == {(WIDE, 1): pinned}


def test_wide_spaces_alone_are_searched_as_a_whole():
    narrow, wide = apart(graph_of(8), [FLAT, WIDE], [1], Restrictions({("2x2x2", 1): FREE}))
    assert list(narrow) == [(WIDE, 1)]
    assert not wide


class Space:
    """A space of one mesh, in which group g was seen in ``uses`` and offers ``offered`` on its last axis."""

    def __init__(self, count, uses, offered):
        template = SimpleNamespace(choices=[(0, i) for i in offered])
        self.tables = SimpleNamespace(mesh=(count, 2, 4), templates={"g": template}, graph=GRAPH)
        self._uses = uses

    def uses(self, numbers):
        return {"g": Counter(self._uses) if len(numbers) else Counter()}


GRAPH = SimpleNamespace(groups=[SimpleNamespace(name="g", strategies=range(8))])


def simulations(*spaces, best):
    frontier = SimpleNamespace(origin=np.array(best))
    return SimpleNamespace(spaces=spaces, frontier=lambda: frontier)


def test_a_group_combines_what_the_best_use_most_and_what_they_could_not_use():
    used = {1: 3, 2: 9, 4: 9, 5: 5}
    offered = [0, 1, 2, 3, 4, 5, 6]
    known = simulations(Space(2, used, offered), Space(1, {6: 99}, range(8)), best=[[0, 0], [1, 0]])
    kept = Restriction(kept={"g": (1,)})
    found = combining(kept, known, 2)
    assert found.kept == kept.kept
    assert found.combined == {"g": (2, 4, 5, 7)}  # the three used most, and 7, which the other mesh forbids
    assert _COMBINED == 3


def test_of_equals_the_first_is_combined():
    known = simulations(Space(1, {5: 2, 1: 2, 3: 2, 2: 2}, range(8)), best=[[0, 0]])
    assert combining(FREE, known, 1).combined == {"g": (1, 2, 3)}


def test_groups_that_belong_together_combine_all():
    known = simulations(Space(1, {5: 2}, range(8)), best=[[0, 0]])
    assert combining(Restriction(together=(("g", "h"),)), known, 1).combined == {}


def test_counts_come_in_the_order_of_how_many_strategies_win_there():
    spaces = [SimpleNamespace(tables=SimpleNamespace(mesh=(count, 8))) for count in (1, 2, 4, 8)]
    assert best_counts(simulations(*spaces, best=[[1, 0], [2, 0], [2, 1], [0, 0]])) == [4, 1, 2]


def refined(better: list[bool]) -> tuple[list[int], tuple[str, ...]]:
    """Counts of a wide mesh that are searched, and the notes, where outlines bring something or not."""
    seen: list[int] = []

    def build(offered):
        seen.extend(count for _, count in offered)
        return [None]

    spaces = [Space(count, {1: 1}, range(8)) for count in (1, 2, 4)]
    known = simulations(*spaces, best=[[1, 0], [1, 1], [2, 0]])
    search = SimpleNamespace(simulations=known, add=lambda _: better[len(seen) - 1], simulate=lambda: None)
    offered = {(WIDE, count): FREE for count in (1, 2, 4)}
    session = Session(load_cluster("dgx-h100"), Settings())
    return seen, refine(session, build, search, offered)


def test_other_counts_are_left_out_where_the_best_brings_nothing():
    seen, notes = refined([False])
    assert seen == [2]
    assert notes[0].startswith("mesh 2x2x2, micro-batches 2: groups combine")
    why = "at 2 it has no strategy that beats those of other meshes"
    assert notes[1] == f"not searched: mesh 2x2x2, micro-batches 1, 4: {why}"


def test_counts_without_winners_are_left_out():
    seen, notes = refined([True, True])
    assert seen == [2, 4]
    assert notes[0].startswith("mesh 2x2x2, micro-batches 2, 4: groups combine")
    assert notes[1].startswith("not searched: mesh 2x2x2, micro-batches 1: on other meshes, every strategy")


def test_templates_combine_only_what_they_may(gpt_problem):
    graph, micro = gpt_problem.graph, gpt_problem.micro
    group = next(g for g in graph.groups if len(g.strategies) > 4)
    limit = Restriction(combined={group.name: (0, 2)})

    def facts_of(_):
        return None

    some = make_templates(graph, (1, 2, 2, 2), micro, facts_of, limit)[group.name]
    every = make_templates(graph, (1, 2, 2, 2), micro, facts_of)[group.name]
    assert set(some.choices) == {c for c in every.choices if set(c) <= {0, 2}}
    assert 1 < len(some.choices) < len(every.choices)
    # Where none of them divides, the group keeps what it has.
    nothing = Restriction(combined={group.name: ()})
    assert make_templates(graph, (1, 2, 2, 2), micro, facts_of, nothing)[group.name] == every


@pytest.fixture(scope="module")
def gpt_problem():
    from tensoropt.capture import capture

    model, args, kwargs = ModelSpec("zoo:gpt2-tiny", 0).build()
    return prepare(capture(model, args, kwargs))


@pytest.mark.parametrize(("name", "epsilon"), [
    ("mlp", 0.001),
    pytest.param("gpt2-tiny", 0.0, marks=pytest.mark.slow),
    pytest.param("gpt2-tiny", 0.001, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_mesh_of_three_axes_inside_one_level_comes_in(store, monkeypatch, name, epsilon):
    if name == "mlp":  # of which no group has many ways to split
        monkeypatch.setattr(refining, "_MOST_COMBINATIONS", 1)
    model = ModelSpec(f"zoo:{name}", 0).build()
    asked = {"micro_batches": [1], "measure": "never", "recompute": "never", "store": store}
    asked |= {"placements": "never", "pipelines": "never"}
    found = explore(*model, cluster="dgx-h100", epsilon=epsilon, max_points=50, **asked)
    assert "2x2x2" in {"x".join(map(str, space.mesh.shape)) for space in found.spaces}
    assert any(note.startswith("mesh 2x2x2, micro-batches 1: groups") for note in found.report["notes"])


@pytest.mark.slow
def test_wide_meshes_are_searched_as_a_whole_where_others_have_no_strategy(store, monkeypatch):
    search = SpaceSearch.search

    def only_wide(self):
        if any(mesh.axis_count < 3 for mesh, _ in self.built):
            raise InfeasibleError("not searched: mesh 8: no strategy can run")
        search(self)

    monkeypatch.setattr(refining, "_MOST_COMBINATIONS", 1)
    monkeypatch.setattr(SpaceSearch, "search", only_wide)
    # What the search alone finds: published planners' plans of other meshes come in beside it.
    monkeypatch.setattr("tensoropt.api.with_quick_plans", lambda session, searched, found, **_: found)
    model = ModelSpec("zoo:mlp", 0).build()
    found = explore(*model, cluster="dgx-h100", micro_batches=[1], measure="never", store=store)
    assert {space.mesh.shape for space in found.spaces} == {(2, 2, 2)}
    assert "not searched: mesh 8: no strategy can run" in found.report["notes"]
    assert not [note for note in found.report["notes"] if "groups combine" in note]
    monkeypatch.setattr(refining, "_MOST_COMBINATIONS", 10**6)
    with pytest.raises(InfeasibleError, match="mesh 8"):
        explore(*model, cluster="dgx-h100", micro_batches=[1], measure="never", store=store)
