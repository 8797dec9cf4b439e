"""JSON that is one line to every reader."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def line_json(value: Any) -> bytes:
    """``value`` as JSON for an event stream.

    Lines of a stream end in CR and LF alone, but readers are in use (httpx's is one) that also break them where Unicode
    has a line end: those characters are escaped. JSON escapes the ones below U+0020 anyway.
    """
    raw = _encode(value)
    if raw.isascii():
        return raw
    found = raw.replace(b"\xc2\x85", b"\\u0085")
    return found.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
