"""What the service and the processes that try grammars say to each other. Imports no grammar library."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from dgpp_core.text.tokenizer import Tokenizer


class Tokens(msgspec.Struct, frozen=True):
    """First frame: the model's control tokens by id, and ``width`` and ``end`` as in `Vocabulary`."""

    width: int
    end: int
    control: dict[int, bytes]

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int, end: int) -> Tokens:
        """The control tokens of ``tokenizer``."""
        return cls(width, end, control_tokens(tokenizer))


class Verdict(msgspec.Struct, frozen=True):
    """Answer to a source: what is wrong with it, or nothing."""

    error: str = ""


def read_frame(stream: BinaryIO) -> bytes | None:
    """A little-endian uint32 length and that many bytes; None at the end."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def write_frame(stream: BinaryIO, message: object) -> None:
    """``message`` as a frame of msgpack."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


def control_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Added tokens that are not white space: no text that a grammar matches has them."""
    pieces = ((token, tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    return {
        token: piece
        for token, piece in pieces
        if not piece.isspace() and tokenizer.is_added(piece.decode("utf-8", "replace"))
    }
