"""What the frontier page shows before a callback has run: the plot and the card of its address.

Callbacks follow the document one after the other; the first picture need not wait for them. The address is
the one that the layout was asked from; scheme and width are cookies that ``assets/scheme.js`` sets before.
Where address or scheme is missing nothing is filled in, and the callbacks do all.
"""

from __future__ import annotations

from typing import Any, get_args
from urllib.parse import urlsplit

from flask import has_request_context, request

from ..context import Context
from ..figures.palette import Scheme
from ..state import PAGES
from .frontier_callbacks import view_from_url
from .look import look
from .view_store import stored

SCHEME_COOKIE = "tensoropt-scheme"
NARROW_COOKIE = "tensoropt-narrow"


def page() -> str:
    """The page of the address that the layout was asked from; "" where that is not known."""
    if not has_request_context() or not request.referrer:
        return ""
    name = urlsplit(request.referrer).path.strip("/")
    return name if name in PAGES else "frontier"


def fill(tree: Any, context: Context) -> Any:
    """The layout, with what the frontier page shows first."""
    if not has_request_context() or not request.referrer:
        return tree
    scheme, address = request.cookies.get(SCHEME_COOKIE), urlsplit(request.referrer)
    if scheme is None or scheme not in get_args(Scheme) or page() != "frontier":
        return tree
    view = view_from_url(context, address.query)
    data = context.frontier(view)
    if data is None or view.point is None:
        return tree
    narrow = request.cookies.get(NARROW_COOKIE) == "1"
    for name, properties in look(context, data, view, scheme, narrow=narrow).items():
        for title, value in properties.items():
            setattr(tree[name], title, value)
    # For whoever presses a button before the first answer is there.
    tree["state"].data = stored(view)
    return tree
