"""Building blocks of pages, as plain elements."""

from dash import html
from tensoropt_app.pages.parts import explained, facts

from tensoropt.plan.facts_table import Fact
from tensoropt.terms import TERMS


def test_a_term_says_what_it_means_beside_its_word():
    word, tip = explained("mesh").children
    assert word == "mesh"
    said = tip.to_plotly_json()["props"]
    assert (tip.children, said["data-said"]) == ("?", TERMS["mesh"])
    assert said["aria-label"] == f"What is mesh? {TERMS['mesh']}"
    assert explained("mesh (2 axes)").children[0] == "mesh (2 axes)"


def test_facts_with_a_known_name_are_explained():
    assert isinstance(explained("mesh"), html.Span)
    assert explained("1,000 steps") == "1,000 steps"
    known, unknown = (cell.children for cell in facts([Fact("mesh", "2×4"), Fact("x", "y")]).children[::2])
    assert isinstance(known, html.Span)
    assert unknown == "x"
