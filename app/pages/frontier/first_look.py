"""The content of the frontier page before any callback has run: the plot and the card of its address.

Callbacks run after the document, one after another; the first picture need not wait for them. The address is
the one from which the layout was requested; scheme and width are cookies that ``assets/scheme.js`` sets
before. If address or scheme is missing, nothing is filled in, and the callbacks do everything.
"""

from __future__ import annotations

from typing import Any, get_args
from urllib.parse import urlsplit

from flask import has_request_context, request

from ...context import Context
from ...figures.palette import Scheme
from ...state import PAGES
from ..parts import stored
from .callbacks import view_from_url
from .look import look

SCHEME_COOKIE = "tensoropt-scheme"
NARROW_COOKIE = "tensoropt-narrow"


def page() -> str:
    """Return the page of the address from which the layout was requested; "" if that is not known."""
    if not has_request_context() or not request.referrer:
        return ""
    name = urlsplit(request.referrer).path.strip("/")
    return name if name in PAGES else "frontier"


def fill(tree: Any, context: Context) -> Any:
    """Return the layout in the person's scheme, with the first content of the frontier page."""
    if not has_request_context() or not request.referrer:
        return tree
    scheme, address = request.cookies.get(SCHEME_COOKIE), urlsplit(request.referrer)
    if scheme is None or scheme not in get_args(Scheme):
        return tree
    tree.forceColorScheme = scheme
    if page() != "frontier":
        return tree
    view = view_from_url(context, address.query)
    data = context.frontier(view)
    if data is None or view.point is None:
        return tree
    narrow = request.cookies.get(NARROW_COOKIE) == "1"
    for name, properties in look(context, data, view, scheme, narrow=narrow).items():
        for title, value in properties.items():
            setattr(tree[name], title, value)
    # For those who press a button before the first answer has arrived.
    tree["state"].data = stored(view)
    return tree
