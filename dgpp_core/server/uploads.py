"""Uploads: a form of `multipart/form-data`, read as it arrives and given up as soon as it is too much."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable
from typing import get_args

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from dgpp_core.api.errors import RequestError
from dgpp_core.server.files import MAX_NAME_BYTES, file_too_large
from dgpp_core.server.store import Purpose

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_MOST = {"purpose": 64}
_HEAD_BYTES = 4096 + MAX_NAME_BYTES


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was sent."""

    filename: str
    purpose: Purpose
    data: bytes


async def read_upload(
    content_type: str, body: AsyncIterable[bytes], most: int, purpose: Purpose | None = None
) -> Upload:
    """The fields `file` and `purpose` of a form, each of which must be there once, and no other.

    Args:
        body: pieces of the request's body.
        most: bytes that the file may have.
        purpose: where the form has none.

    Raises:
        RequestError: 400 or 413 with the field that is wrong.
    """
    form = _Form(most)
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        what = f"expected a body of multipart/form-data with its boundary, found {content_type[:80]!r}"
        raise RequestError(what, param="body", hint="curl -F purpose=user_data -F file=@notes.md")
    try:
        with PushMultipartParser(options["boundary"].encode(), max_header_size=_HEAD_BYTES) as parser:
            async for piece in body:
                for event in parser.parse(piece) if piece else ():
                    form.take(event)
    except (MultipartError, UnicodeError) as error:
        raise RequestError(f"the body is no form of multipart/form-data: {error}", param="body") from None
    return form.upload(purpose)


class _Form:
    """Fields as they come."""

    def __init__(self, most: int) -> None:
        self._most = {"file": most, **_MOST}
        self._found: dict[str, bytearray] = {}
        self._name, self._filename = "", ""

    def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """A field's head, more of its bytes, or its end."""
        if isinstance(event, MultipartSegment):
            self._begin(event)
        elif event is not None:
            found = self._found[self._name]
            if len(found) + len(event) > self._most[self._name]:
                raise self._too_much()
            found += event

    def upload(self, default: Purpose | None) -> Upload:
        """What was sent, once all of it is there."""
        if default is not None:
            self._found.setdefault("purpose", bytearray(default.encode()))
        for name in ("file", "purpose"):
            if name not in self._found:
                raise RequestError(f"`{name}` is required", param=name)
        purpose = self._found["purpose"].decode(errors="replace")
        if purpose not in PURPOSES:
            raise _bad_purpose(repr(purpose))
        return Upload(filename=self._filename, purpose=purpose, data=bytes(self._found["file"]))

    def _begin(self, segment: MultipartSegment) -> None:
        name = segment.name or ""
        if name not in self._most:
            what = f"`{name[:60]}` is no field of an upload: `file` and `purpose` are"
            raise RequestError(what, param=name[:60] or "body", code="unsupported_parameter")
        if name in self._found:
            raise RequestError(f"`{name}` is given more than once", param=name, code="invalid_parameter")
        if name == "file":
            self._filename = _base_name(segment.filename)
        self._name, self._found[name] = name, bytearray()

    def _too_much(self) -> RequestError:
        if self._name == "purpose":
            return _bad_purpose("a longer text")
        return file_too_large("file", f"a file may have {self._most['file']} bytes")


def _base_name(given: str | None) -> str:
    """The last part of a name: some clients send the path that the file has on their side."""
    name = re.split(r"[/\\]", given or "")[-1]
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        what = f"`file`: expected a filename of 1 to {MAX_NAME_BYTES} bytes without control characters"
        raise RequestError(what, param="file")
    return name


def _bad_purpose(found: str) -> RequestError:
    return RequestError(f"`purpose`: expected one of {', '.join(PURPOSES)}, found {found}", param="purpose")
