"""Which of many points are drawn: those left out are covered by one that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tensoropt_app.figures.thinning import MOST, PLACES, Window, apart

LINEAR = (False, False)


def test_few_points_are_all_drawn() -> None:
    values = np.zeros(MOST)
    assert apart(values, values, LINEAR).tolist() == list(range(MOST))


@given(arrays.arrays(float, (2, 3000), elements=st.floats(-1e6, 1e6)))
def test_every_point_lies_in_a_place_that_is_drawn(points: np.ndarray) -> None:
    """Curves keep the finest places; of points all over the plot, places grow until there are few enough."""
    x, y = points
    found = apart(x, y, LINEAR)
    assert len(found) <= MOST + 2
    assert found.tolist() == sorted(set(found.tolist()))
    assert {0, len(x) - 1} <= set(found.tolist())


@pytest.mark.parametrize("logs", [LINEAR, (True, False), (True, True)])
def test_what_is_left_out_of_a_curve_is_covered(logs: tuple[bool, bool]) -> None:
    x = np.geomspace(1, 1000, 30_000)
    y = 1 / x
    found = apart(x, y, logs)
    across, up = (np.log10(v) if log else v for v, log in zip((x, y), logs, strict=True))
    across, up = (across - across.min()) / np.ptp(across), (up - up.min()) / np.ptp(up)
    places = np.stack([across[found], up[found]])
    for i in range(0, len(x), 97):
        near = np.abs(places - [[across[i]], [up[i]]])
        # A grid that has grown once is half as fine again.
        assert np.any((near[0] <= 1.6 / PLACES[0]) & (near[1] <= 1.6 / PLACES[1]))


def test_a_window_has_points_of_its_own() -> None:
    x = np.linspace(0, 1, 50_000)
    whole, near = apart(x, -x, LINEAR), apart(x, -x, LINEAR, Window("", (0.5, 0.51), (-0.51, -0.5)))
    assert set(whole) < set(near)
    inside = near[(x[near] >= 0.5) & (x[near] <= 0.51)]
    assert len(inside) > 20 * np.count_nonzero((x[whole] >= 0.5) & (x[whole] <= 0.51))
    # Plotly's ends of an axis may run either way.
    assert apart(x, -x, LINEAR, Window("", (0.51, 0.5), (-0.5, -0.51))).tolist() == near.tolist()


def test_what_has_no_place_on_a_logarithmic_axis_is_left_out() -> None:
    x = np.arange(3000.0)
    found = apart(x, np.where(x % 2, x, 0.0), (False, True))
    assert all(n % 2 for n in found[1:-1])


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["of", "x", "y"]), inner)))  # fmt: skip
def test_what_a_browser_sends_is_a_window_or_none(sent: object) -> None:
    found = Window.read(sent)
    assert found is None or np.isfinite([*found.x, *found.y]).all()


def test_a_window_is_read() -> None:
    assert Window.read({"of": "a", "x": [1, 2.5], "y": [3, 4]}) == Window("a", (1, 2.5), (3, 4))
