"""An image in a prompt, as it travels from the front end to the engine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

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


def prompt_keys(tokens: Sequence[int], pictures: Sequence[Picture]) -> array[int]:
    """What a prefix of a prompt is known by: its ids and, in the place of each picture's, what it shows.

    A picture's tokens get the 64-bit words of its digest in turn, made negative as no id is.
    """
    keys = array("q", tokens)
    for picture in pictures:
        words = [word if word < 0 else word - 2**63 for word in array("q", picture.digest)]
        keys[picture.start : picture.end] = array("q", words * (picture.tokens // len(words) + 1))[: picture.tokens]
    return keys


def misplaced(tokens: int, pictures: Sequence[Picture]) -> str:
    """What is wrong with pictures in a prompt of so many tokens; empty where nothing is."""
    end = 0
    for picture in pictures:
        if picture.start < end or picture.tokens < 1 or picture.end > tokens:
            return (
                f"a picture lies at {picture.start} .. {picture.end} of {tokens} tokens, behind one that ends at {end}"
            )
        if len(picture.rgb) != picture.height * picture.width * 3 or len(picture.digest) != 32:
            return f"a picture of {picture.height} x {picture.width} pixels has {len(picture.rgb)} bytes"
        end = picture.end
    return ""
