"""An image in a prompt, as it travels from the front end to the engine."""

from __future__ import annotations

import hashlib

import msgspec


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An image on its canvas.

    Attributes:
        height, width: of the canvas, in pixels.
        rgb: ``height * width * 3`` bytes, row by row.
        tokens: placeholders it has in the prompt.
        start: index of the first of them.
        digest: `picture_digest`: two pictures with one digest are one picture.
    """

    height: int
    width: int
    rgb: bytes
    tokens: int
    digest: bytes
    start: int = 0

    @property
    def end(self) -> int:
        """Index of the first token after it."""
        return self.start + self.tokens


def picture_digest(height: int, width: int, rgb: bytes) -> bytes:
    """32 bytes that name a picture: everything that an encoder sees of it goes in."""
    size = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    return hashlib.blake2b(rgb, digest_size=32, key=size).digest()
