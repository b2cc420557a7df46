"""A component of our own: what is drawn when it is first needed (``assets/later.js``)."""

from __future__ import annotations

from typing import Any

from dash.development.base_component import Component


class Later(Component):
    """Children that the browser draws once their page is shown, or when it is at rest.

    They are part of the layout from the beginning, so that callbacks know them and may fill them; only
    drawing them waits. What has been drawn stays.

    Args:
        children: what is drawn later.
        page: the page that needs them.
    """

    _namespace = "tensoropt_components"
    _type = "Later"

    def __init__(self, children: Any = None, *, id: str, page: str):
        self._prop_names = ["children", "id", "page"]
        self._valid_wildcard_attributes: list[str] = []
        self.available_properties = self._prop_names
        self.available_wildcard_properties: list[str] = []
        self._children_props: list[str] = []
        self._base_nodes = ["children"]
        super().__init__(children=children, id=id, page=page)
