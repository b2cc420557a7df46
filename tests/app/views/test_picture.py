"""The drawing order of a graph."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensoropt_app.views.operators import GraphEdge, OperatorRow
from tensoropt_app.views.picture import layers, picture, positions

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


@given(graphs, st.integers(1, 9))
def test_no_two_boxes_overlap(graph: tuple[list[int], list[tuple[int, int]]], columns: int) -> None:
    place = positions(layers(*graph), columns=columns, step=100, spread=50)
    boxes = sorted(place.values())
    assert len(set(boxes)) == len(boxes)
    for i, (x, y) in enumerate(boxes):
        for u, v in boxes[i + 1 :]:
            assert abs(x - u) > 99 or abs(y - v) > 49


def test_crossings_are_undone() -> None:
    found = layers(["a", "b", "c", "d"], [("a", "d"), ("b", "c")])
    assert [found[0].index("a"), found[0].index("b")] == [found[1].index("d"), found[1].index("c")]


def test_a_deep_chain_is_wrapped_to_the_columns_that_can_be_read() -> None:
    chain = list(range(16))
    place = positions(layers(chain, [(i, i + 1) for i in chain[:-1]]), columns=7, step=150, spread=58)
    rows = Counter(y for _, y in place.values())
    assert sorted(rows.values()) == [4, 6, 6]
    assert max(x for x, _ in place.values()) == 5 * 150


def row(module: str, group: str, axes: str = "batch ×8", *, again: bool = False) -> OperatorRow:
    return OperatorRow(group, module, 1, axes, "", "plan", recomputed=again)


def model(axes: Mapping[int, str], blocks: int = 12) -> list[OperatorRow]:
    """Blocks of attention and an MLP with residuals between an embedding and a head."""
    rows = [row("net.wte", "embedding")]
    for i in range(blocks):
        split = axes.get(i, "batch ×8")
        of = (("attn", "addmm"), ("", "add"), ("mlp", "addmm"), ("", "add"))
        rows += [
            row(f"net.h.{i}.{name}".rstrip("."), f"{kind}_{4 * i + number}", split)
            for number, (name, kind) in enumerate(of)
        ]
    return [*rows, row("net.head", "linear")]


def chain(rows: Sequence[OperatorRow]) -> list[GraphEdge]:
    return [
        GraphEdge(a.group, b.group, tensors={a.group: (2**20, a.group)}) for a, b in itertools.pairwise(rows)
    ]


def test_equal_blocks_are_one() -> None:
    rows = model({})
    found = picture(rows, chain(rows))
    assert [(n.label, n.below) for n in found.nodes] == [
        ("net.wte", ""), ("attn", "×12"), ("add", "×12"), ("mlp", "×12"), ("add", "×12"), ("net.head", ""),
    ]  # fmt: skip
    # Every operator is in one box, whose tip says what one block has.
    assert sorted(g for n in found.nodes for g in n.groups) == sorted(o.group for o in rows)
    assert found.nodes[1].tip[:2] == ("net.h.0–11.attn", "each of 12 equal blocks has 1 operator: batch ×8")
    # From left to right, but for the way to the next block; bytes are those of one.
    assert [(e.source[-2:], e.target[-4:]) for e in found.edges if e.back] == [("#2", "attn")]
    assert {e.bytes for e in found.edges} == {2**20}


@pytest.mark.parametrize("axes", [{5: "heads ×8"}, {5: "stage 1, batch ×8"}])
def test_blocks_that_differ_are_not_folded(axes: dict[int, str]) -> None:
    rows = model(axes)
    found = picture(rows, chain(rows))
    assert {n.key.split(".")[2] if n.key.startswith("net.h.") else "" for n in found.nodes} == {
        "", "0–4", "5", "6–11",
    }  # fmt: skip
    again = [replace(o, recomputed=o.module.startswith("net.h.7")) for o in model({})]
    assert {n.key for n in picture(again, []).nodes} >= {"net.h.0–6.mlp", "net.h.7.mlp", "net.h.8–11.mlp"}


def test_what_is_too_much_to_read_opens_by_a_click() -> None:
    rows = model({i: f"heads ×{i}" for i in range(12)})
    found = picture(rows, chain(rows))
    assert len(found.nodes) == 14
    closed = {n.key for n in found.nodes if n.closed}
    assert closed == {f"net.h.{i}" for i in range(12)}
    opened = picture(rows, chain(rows), opened=["net.h.3", "gone"])
    assert len(opened.nodes) == 17
    assert {n.key for n in opened.nodes if n.key.startswith("net.h.3.")} == {
        "net.h.3.attn", "net.h.3.#1", "net.h.3.mlp", "net.h.3.#2",
    }  # fmt: skip
