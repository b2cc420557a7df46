"""Units people decide by on the frontier page, in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from samples_app import CALL, GIB, exploration, of_model, point, space
from site_app import Site, running
from tensoropt_app.jobs.worker import run

UP = "document.querySelector('#graph .js-plotly-plot')?._fullLayout?.yaxis.title.text"


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard with a step of two plans."""
    folder = tmp_path_factory.mktemp("shops")
    found = exploration([point(10 * GIB, 0.8), point(20 * GIB, 0.4)], [space((2, 4))], cluster="dgx-h100")
    of_model(found, call=CALL).save(folder / "fast")
    with running(tmp_path_factory.mktemp("shops-home"), folder, run) as site:
        yield site


@pytest.mark.slow
def test_an_amount_a_currency_and_axes_in_the_card_the_plot_and_the_link(
    shops: Site, opened: Callable[..., Any]
) -> None:
    page = opened(shops.url(query="x=opened-fast&point=2&price=3"))
    page.wait_for_selector("#card-title:text-matches('Point 2 of 2')")
    for name, text in (("amount", "1e9 tokens"), ("currency", "EUR")):
        page.fill(f"#{name}", text)
        page.press(f"#{name}", "Enter")
    page.wait_for_selector("#card dd:text-matches('109 h, 868 device-hours; costs 2,600 EUR')")
    page.wait_for_selector("#card dd:text-matches('2,560 tokens/s')")
    page.click("#plot-options summary")
    page.click("#axis-y")
    page.click("[role=option]:has-text('up: tokens/s')")
    page.wait_for_function(f"{UP} === 'throughput, tokens/s'")
    page.wait_for_function("location.search.includes('up=rate')")
    # Keys still walk along the frontier, and the mark stands where the point is.
    page.focus("#plot")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#card-title:text-matches('Point 1 of 2')")
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot').data[9].y[0] === 1280")
    page.fill("#amount", "lots")
    page.press("#amount", "Enter")
    page.wait_for_selector("text=is no amount of training")
    again = opened(page.url)
    again.wait_for_selector("#card dd:text-matches('EUR')")
    again.wait_for_function(f"{UP} === 'throughput, tokens/s'")


@pytest.mark.slow
def test_a_budget_dragged_over_other_axes_is_answered_by_the_server(
    shops: Site, opened: Callable[..., Any]
) -> None:
    page = opened(shops.url(query="x=opened-fast&up=rate&across=hours&point=2"))
    page.wait_for_selector("text=Not drawn over these axes: what a device has.")
    page.fill("#budget-text", "15 GiB")
    page.press("#budget-text", "Enter")
    page.wait_for_selector("#card-title:text-matches('Point 1 of 2')")
    page.wait_for_selector("text=the memory budget, which still selects a point")
    assert page.evaluate(
        "document.querySelector('#graph .js-plotly-plot').layout.shapes.every((s) => s.visible === false)"
    )
