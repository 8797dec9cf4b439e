"""What a browser sends for pages of other sites is refused on every route that does something."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from dgpp_core.server.openapi import document
from dgpp_core.server.origins import SAFE, foreign

EVIL = "https://evil.example"
ACTING = [
    (method.upper(), path.replace("{file_id}", "file-0"))
    for path, item in json.loads(document())["paths"].items()
    for method in item
    if method != "parameters" and method.upper() not in SAFE
]
REQUEST = b'{"model": "fake", "messages": [{"role": "user", "content": "colors"}], "max_tokens": 5}'


@pytest.mark.parametrize(
    ("origin", "site", "host", "refused"),
    [
        (None, None, "127.0.0.1:18080", False),  # curl, SDKs
        (None, None, None, False),
        ("http://127.0.0.1:18080", None, "127.0.0.1:18080", False),
        ("http://spark1.local:18080", None, "SPARK1.local:18080", False),
        ("http://[::1]:18080", None, "[::1]:18080", False),
        ("http://spark1", None, "spark1:80", False),
        ("https://models.example", None, "models.example", False),  # TLS ends at a proxy
        ("https://models.example", "same-origin", "127.0.0.1:18080", False),  # and it puts its own Host
        (None, "none", "127.0.0.1:18080", False),
        ("vscode-webview://0abc", "cross-site", "127.0.0.1:18080", False),
        ("app://obsidian.md", None, "127.0.0.1:18080", False),
        (EVIL, None, "127.0.0.1:18080", True),
        (EVIL, "cross-site", "127.0.0.1:18080", True),
        (EVIL, "cross-site", "evil.example", True),  # the browser knows better than a comparison
        (None, "cross-site", "127.0.0.1:18080", True),
        ("null", None, "127.0.0.1:18080", True),  # a frame in a sandbox
        ("null", "cross-site", "127.0.0.1:18080", True),
        ("http://127.0.0.1:3000", None, "127.0.0.1:18080", True),  # another service of this machine
        ("http://127.0.0.1:3000", "same-site", "127.0.0.1:18080", True),
        ("http://localhost:18080", None, "127.0.0.1:18080", True),
        ("http://models.example:443", None, "models.example", True),
        ("http://127.0.0.1:18080.evil.example", None, "127.0.0.1:18080", True),
        ("", "cross-site", "127.0.0.1:18080", True),  # as if there were none
        ("", "same-origin", "127.0.0.1:18080", False),
        ("", None, "127.0.0.1:18080", False),
        ("127.0.0.1:18080", "cross-site", "127.0.0.1:18080", True),  # no scheme, and no editor's
        ("localhost:18080", "cross-site", "localhost:18080", True),
        ("evil", None, "evil", True),
        ("//evil", "cross-site", "evil", True),
        ("http://", None, None, True),
        ("http://[::1", None, "[::1]", True),
        ("http://127.0.0.1:18080", None, None, True),
    ],
)
def test_whose_page_it_was(origin: str | None, site: str | None, host: str | None, refused: bool) -> None:
    assert foreign(origin, site, host) is refused


@pytest.mark.parametrize(("method", "path"), ACTING)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_no_route_acts_for_another_site(fake: Any, method: str, path: str, kind: str) -> None:
    """With the types of bodies that a browser sends without asking first."""
    headers = {"origin": EVIL, "content-type": kind}
    before = len(fake.messages("submit"))
    response = httpx.request(method, fake.url + path, content=REQUEST, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 403
    assert "another site" in error["message"]
    assert error.get("code", error.get("details", {}).get("error_code")) == "foreign_origin"
    assert "access-control-allow-origin" not in response.headers
    assert len(fake.messages("submit")) == before


def test_what_acts_is_known() -> None:
    assert len(ACTING) >= 9
    assert ("POST", "/v1/files") in ACTING
    assert ("DELETE", "/v1/files/file-0") in ACTING


def test_reading_and_pages_of_our_own_are_served(fake: Any) -> None:
    evil, own = {"origin": EVIL, "sec-fetch-site": "cross-site"}, {"origin": fake.url}
    assert httpx.get(fake.url + "/health", headers=evil).status_code == 200
    assert "access-control-allow-origin" not in httpx.get(fake.url + "/v1/models", headers=evil).headers
    for headers in (own, own | {"content-type": "text/plain"}, {"content-type": "text/plain"}):
        assert httpx.post(fake.url + "/v1/chat/completions", content=REQUEST, headers=headers).status_code == 200
