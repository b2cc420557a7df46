"""The facts of a point, and what shows them."""

from dataclasses import replace

from tensoropt import load_cluster
from tensoropt.costs.process_memory import memory_of_process
from tensoropt.exploration.facts import FIT, LISTED_NAMES, facts, rate_facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.rates import Tariff
from tensoropt.plan.facts_table import Fact, Html, fact_lines, filled, named
from tensoropt.plan.figures import LISTED
from tests.plan.explorations import small_exploration

FOUND = small_exploration()


def test_a_fact_is_its_value_with_source_and_note():
    assert Fact("time", 2, lambda n: f"{n} s", source="measured", note="idle").words == "2 s (measured; idle)"
    assert Fact("MFU", None, note="no peak").words == "unknown: no peak"
    assert fact_lines(named({"a": Fact("a", 1), "b": Fact("b", 2)}, "b", "c", "a")) == ["  b: 2", "  a: 1"]


def test_every_listed_figure_is_a_fact():
    known = facts(FigureRow.of(FOUND, 1))
    assert all(name == fact.name for name, fact in known.items())
    assert {"mesh", "memory", "time", "figures", "proven"} <= known.keys()
    assert not known.keys() & set(LISTED_NAMES)  # nothing is known of them
    counted = replace(
        FOUND,
        points=tuple(
            p.changed(**dict.fromkeys((figure.name for figure in LISTED), 3.0)) for p in FOUND.points
        ),
    )
    assert set(LISTED_NAMES) <= facts(FigureRow.of(counted, 1)).keys()


def test_a_point_on_gpus_has_a_verdict_with_what_its_process_takes():
    assert FIT not in facts(FigureRow.of(FOUND, 1))  # CPU ranks
    on_gpus = replace(FOUND, cluster=load_cluster("rtx-4090").to_dict())
    assert facts(FigureRow.of(on_gpus, 1))[FIT].words.endswith("): fits")
    # No term is known: context, workspaces, and the communicator of all ranks, over which all is sent.
    of = memory_of_process(load_cluster("rtx-4090"), 0.0)
    estimated = on_gpus.fit(1).process
    assert estimated["context"] == of.context
    assert estimated["communicators"] == of.communicator_bytes((), ("all_reduce",), 2)
    terms = {"context": 2.0**30, "communicators": 23 * 2.0**30}
    full = replace(
        on_gpus,
        points=tuple(
            p.changed(terms=terms, memory_bytes=p.memory_bytes + sum(terms.values())) for p in FOUND.points
        ),
    )
    assert facts(FigureRow.of(full, 1))[FIT].words.endswith("process 24.3): does not fit")
    points = tuple(p.changed(collectives=(("send", (0, 1), 8, 1),)) for p in FOUND.points)
    sending = replace(on_gpus, points=points)
    assert sending.fit(0).process["communicators"] >= estimated["communicators"]
    assert full.fit(1, 2.0**30).verdict == "does not fit"


def test_what_is_unknown_of_rates_says_why():
    row = FigureRow.of(FOUND, 0, Tariff(2.0))
    assert [fact.name for fact in rate_facts(row)] == ["throughput", "MFU", "1,000 steps"]


def test_a_template_escapes_what_is_not_html(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<p>$a$b")
    assert filled(page, a="<x>", b=Html("<b>")) == "<p>&lt;x&gt;<b>"
