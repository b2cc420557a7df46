"""The drawing order of a graph."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tensoropt_app.views.picture import layers, positions

graphs = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        st.just(list(range(n))),
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=60),
    )
)


@given(graphs)
def test_every_node_has_one_place_after_all_that_lead_to_it(
    graph: tuple[list[int], list[tuple[int, int]]],
) -> None:
    nodes, edges = graph
    found = layers(nodes, edges)
    rank = {node: i for i, layer in enumerate(found) for node in layer}
    assert sorted(rank) == nodes
    assert all(rank[a] < rank[b] for a, b in edges if a < b)


@given(graphs, st.floats(0.2, 8))
def test_no_two_boxes_overlap(graph: tuple[list[int], list[tuple[int, int]]], aspect: float) -> None:
    place = positions(layers(*graph), aspect=aspect, step=100, spread=50)
    boxes = sorted(place.values())
    assert len(set(boxes)) == len(boxes)
    for i, (x, y) in enumerate(boxes):
        for u, v in boxes[i + 1 :]:
            assert abs(x - u) > 99 or abs(y - v) > 49


def test_crossings_are_undone() -> None:
    found = layers(["a", "b", "c", "d"], [("a", "d"), ("b", "c")])
    assert [found[0].index("a"), found[0].index("b")] == [found[1].index("d"), found[1].index("c")]


def test_a_deep_chain_is_wrapped_to_the_aspect_of_its_place() -> None:
    chain = list(range(400))
    place = positions(layers(chain, [(i, i + 1) for i in chain[:-1]]), aspect=2.5, step=150, spread=58)
    width = max(x for x, _ in place.values())
    height = max(y for _, y in place.values())
    assert 1.5 < width / height < 4
