"""Ids to text while they arrive, byte for byte what decoding all of them at once gives."""

from __future__ import annotations

import codecs

from dgpp_core.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Utf8Decoder:
    """Bytes to text: holds back a character that is not complete; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = _utf8("replace")

    @property
    def pending(self) -> bytes:
        """The held-back start of a character, at most 3 bytes."""
        return self._decoder.getstate()[0]

    def push(self, piece: bytes) -> str:
        """The text that ``piece`` completes."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """U+FFFD if a character is incomplete, else nothing."""
        return self._decoder.decode(b"", True)


class IncrementalDecoder:
    """One reply's ids to text. Keeps at most three bytes, so each id costs the same however long the reply is.

    Args:
        tokenizer: gives the bytes of each id.
        skip_special: leave out added tokens that are marked special.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = Utf8Decoder()

    def push(self, token_id: int) -> str:
        """The text that is complete with ``token_id``; may be empty, may end amid what a reader sees as one symbol."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.push(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left after the last id: U+FFFD for an incomplete character."""
        return self._utf8.finish()
