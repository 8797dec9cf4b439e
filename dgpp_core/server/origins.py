"""No page of another site may make a browser act here.

A browser sends a POST for any page that asks for one, and needs nobody's leave where the body is plain text or a form;
only the answer is kept from the page. What it sends tells whose page it was, in headers that no page can write:
``Sec-Fetch-Site`` (W3C Fetch Metadata) where the connection is trusted, ``Origin`` (RFC 6454) always.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from dgpp_core.api.errors import RequestError

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing and compute nothing here (RFC 9110, 9.2.1)."""
_PORTS = {"http": 80, "https": 443}


async def origin_guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuse what a browser sends for a page of another site.

    Raises:
        RequestError: 403.
    """
    headers = connection.headers
    origin = headers.get("origin")
    if str(connection.scope.get("method")) in SAFE or not foreign(
        origin, headers.get("sec-fetch-site"), headers.get("host")
    ):
        return
    raise RequestError(
        "a web page of another site may not use this service",
        status=403,
        code="foreign_origin",
        hint=f"the page is of {origin or 'another site'}: let the server behind it ask, or use a proxy of its own site",
    )


def foreign(origin: str | None, site: str | None, host: str | None) -> bool:
    """Whether a request was made by a page of another site.

    A program that is no browser sends neither of the first two. One that shows pages of its own, as editors do, has an
    origin of a scheme of its own, which no page of the network has. An empty one is as
    none, and one without a scheme or a host is nobody's.

    Args:
        origin: of the page.
        site: what the browser says of it, which goes before a comparison: a proxy may have put another ``host`` there.
        host: who was asked.
    """
    try:
        parts = urlsplit(origin or "")
        if origin and "://" in origin and parts.scheme and parts.scheme not in _PORTS:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        if not origin:
            return False
        default = _PORTS.get(parts.scheme)
        asked = urlsplit(f"//{host or ''}")
        own = parts.hostname is not None and parts.hostname == asked.hostname
        return not own or (parts.port or default) != (asked.port or default)
    except ValueError:  # a port that is none, or half an IPv6 address
        return True
