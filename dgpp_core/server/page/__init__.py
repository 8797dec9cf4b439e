"""The page at `/`: static files of this package, sent with a policy that lets them load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec
from litestar import Request, get
from litestar.datastructures import State
from litestar.response.base import ASGIResponse

from dgpp_core.api.errors import RequestError
from dgpp_core.server.access import OPEN

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
INDEX = "index.html"


class PageFile(msgspec.Struct, frozen=True):
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def read_files() -> Mapping[str, PageFile]:
    """The page's files by name."""
    found = {}
    for file in (files(__package__) / "static").iterdir():
        body = file.read_bytes()
        kind = TYPES[file.name.rpartition(".")[2]]
        found[file.name] = PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


def page_routes() -> tuple[Any, ...]:
    """The routes of the page and its files. Neither needs an API key: the page asks for one where it needs it."""
    known = read_files()

    def answer(request: Request[Any, Any, State], name: str) -> ASGIResponse:
        file = known.get(name.removeprefix("/"))
        if file is None:
            raise RequestError(f"there is no GET {request.scope['path']}", status=404)
        headers = HEADERS | {"etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return ASGIResponse(status_code=304, media_type=file.media_type, headers=headers)
        return ASGIResponse(body=file.body, media_type=file.media_type, headers=headers)

    @get("/", opt=OPEN)
    async def index(request: Request[Any, Any, State]) -> ASGIResponse:
        return answer(request, INDEX)

    @get("/page/{name:path}", opt=OPEN)
    async def page_file(request: Request[Any, Any, State]) -> ASGIResponse:
        return answer(request, str(request.path_params["name"]))

    return index, page_file
