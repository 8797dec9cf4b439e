"""What a reply is held to: one value that travels to every rank."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Start = Literal["content", "reasoning", "either"]
"""Where a reply begins: in its content, inside reasoning, or in either, as the model chooses."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of a reply's content.

    Attributes:
        source: the grammar in the library's Lark dialect; empty where the content may be anything.
        ends: ids that end the reply, each allowed where the content is complete and nowhere else.
        start: where the reply begins; the grammar starts with the content.
        opener: text that opens reasoning; only looked at for ``either``.
        closer: text that closes reasoning.
        budget: most tokens of reasoning before its closer has to come; -1 for any number.
        barred: ids that reasoning has none of, beside the ends: those that open a call.
    """

    source: str
    ends: tuple[int, ...]
    start: Start = "content"
    opener: str = ""
    closer: str = ""
    barred: tuple[int, ...] = ()
    budget: int = -1

    @property
    def digest(self) -> str:
        """128 bits over every field, as hex digits."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
