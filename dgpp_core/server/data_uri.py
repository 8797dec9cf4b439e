"""Files that come inside a request: data URIs and base64. Nothing is ever fetched."""

from __future__ import annotations

import base64
import binascii
import re

import msgspec

from dgpp_core.api.errors import RequestError

_HEAD = re.compile(r"data:([A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+)?((?:;[A-Za-z0-9.+-]+=[^;,]*)*);base64,", re.IGNORECASE)
_STEP = 1 << 20
"""Characters decoded at once, so that other threads get their turn; a multiple of four."""


class Inline(msgspec.Struct, frozen=True):
    """The bytes of a file, and the media type they are said to have; empty where nothing is said."""

    media_type: str
    data: bytes


def is_uri(text: str) -> bool:
    """Whether ``text`` names a place of any kind, rather than being base64."""
    return re.match(r"[A-Za-z][A-Za-z0-9.+-]{0,31}:", text[:33]) is not None


def read_data_uri(text: str, most: int, param: str, code: str) -> Inline:
    """What a data URI holds.

    Args:
        most: bytes that it may hold.
        code: of the errors.

    Raises:
        RequestError: 400, it is another kind of URI, no valid base64, or too large.
    """
    head = _HEAD.match(text[:256])
    if head is None:
        example = "data:image/png;base64,iVBORw0..."
        found = "an http address" if text[:8].lower().startswith(("http:", "https:")) else "something else"
        what = f"`{param}`: expected a data URI such as {example}, found {found}; nothing is fetched from elsewhere"
        raise RequestError(what, param=param, code=code, hint="send the file itself, in base64, as a data URI")
    return Inline((head[1] or "").lower(), read_base64(text[head.end() :], most, param, code))


def read_base64(text: str, most: int, param: str, code: str) -> bytes:
    """The bytes that ``text`` spells in padded base64.

    Args:
        most: bytes there may be.

    Raises:
        RequestError: 400, it is something else, or too much.
    """
    if len(text) // 4 * 3 - 2 > most:
        what = f"`{param}`: at most {most} bytes are taken, found about {len(text) // 4 * 3}"
        raise RequestError(what, param=param, code=code)
    try:
        parts = [binascii.a2b_base64(text[at : at + _STEP], strict_mode=True) for at in range(0, len(text), _STEP)]
    except ValueError as error:
        raise RequestError(f"`{param}`: this is no base64: {error}", param=param, code=code) from None
    data = b"".join(parts)
    # Padding inside, and spare bits that are set, would be two spellings of one file.
    if len(text) != -(-len(data) // 3) * 4 or not text.endswith(base64.b64encode(data[len(data) // 3 * 3 :]).decode()):
        raise RequestError(f"`{param}`: this is no canonical base64 with its padding", param=param, code=code)
    return data
