"""Units people decide by on the frontier page, and the page of clusters, in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from samples_app import CALL, GIB, exploration, of_model, point, space
from site_app import Site, running
from tensoropt_app.jobs.worker import run

CLUSTER_PIXEL = """([trace, at]) => {
  const plot = document.querySelector('#clusters-graph .js-plotly-plot'), l = plot._fullLayout;
  const box = plot.getBoundingClientRect(), of = plot.data[trace];
  const { xaxis, yaxis } = l;
  return [box.left + xaxis._offset + xaxis.d2p(of.x[at]), box.top + yaxis._offset + yaxis.d2p(of.y[at])];
}"""
UP = "document.querySelector('#graph .js-plotly-plot')?._fullLayout?.yaxis.title.text"


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard with one step on two clusters."""
    folder = tmp_path_factory.mktemp("shops")
    for name, cluster, points in (
        ("fast", "dgx-h100", [(10, 0.8), (20, 0.4)]),
        ("slow", "dgx-a100", [(10, 0.9), (20, 0.6)]),
    ):
        found = exploration([point(m * GIB, t) for m, t in points], [space((2, 4))], cluster=cluster)
        of_model(found, call=CALL).save(folder / name)
    with running(tmp_path_factory.mktemp("shops-home"), folder, run) as site:
        yield site


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


@pytest.mark.slow
def test_clusters_are_compared_and_a_click_opens_the_point(shops: Site, opened: Callable[..., Any]) -> None:
    page = opened(shops.url("clusters", "x=opened-fast"))
    page.wait_for_selector("text=No price is known, so the plot shows device-hours")
    page.fill("#shop-prices", "H100-80GB=3, A100-80GB=1")
    page.press("#shop-prices", "Enter")
    page.wait_for_selector("#clusters-answer p:text-matches('Cheapest without limits: dgx-a100')")
    page.click("#shop-budget-40")
    page.wait_for_selector("#clusters-answer p:text-matches('Cheapest within 40 GiB a device: dgx-a100')")
    page.fill("#shop-budget", "")
    page.press("#shop-budget", "Enter")
    page.wait_for_selector("#clusters-answer p:text-matches('Cheapest without limits')")
    page.fill("#shop-within", "500ms")
    page.press("#shop-within", "Enter")
    page.wait_for_selector("#clusters-answer p:text-matches('Cheapest within 500 ms a step: dgx-h100')")
    page.wait_for_selector("#clusters-table td:text-matches('too slow: 600 ms a step')")
    page.wait_for_function("location.search.includes('within=0.5')")
    page.wait_for_function(
        "document.querySelector('#clusters-graph .js-plotly-plot')?.layout.shapes.length === 1"
    )
    page.fill("#shop-prices", "free")
    page.press("#shop-prices", "Enter")
    page.wait_for_selector("text=is no price")
    x, y = page.evaluate(CLUSTER_PIXEL, [2, 0])
    page.mouse.move(x - 25, y - 25)
    page.mouse.move(x, y)
    page.wait_for_function("document.querySelector('#clusters-graph .hoverlayer')?.childElementCount > 0")
    page.mouse.click(x, y)
    page.wait_for_selector("#card-title:text-matches('Point 2 of 2')")
    page.wait_for_function("location.pathname === '/frontier' && location.search.includes('x=opened-slow')")
