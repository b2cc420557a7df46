"""The index of a rank within the flattened group of several axes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.ops.layouts import flat_index


@given(st.data())
def test_flat_index_is_row_major_in_the_order_of_the_axes(data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    coordinate = [data.draw(st.integers(0, size - 1)) for size in mesh]
    axes = data.draw(st.lists(st.sampled_from(range(len(mesh))), unique=True))
    expected = np.ravel_multi_index([coordinate[a] for a in axes], [mesh[a] for a in axes]) if axes else 0
    assert flat_index(mesh, coordinate, axes) == expected
