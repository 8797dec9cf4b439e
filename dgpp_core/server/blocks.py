"""A reply as the blocks it is written in: reasoning, text and calls, each as it opens, grows and closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from dgpp_core.server.generation import CallArguments, CallStart, Event, Finish, Piece, TokenEntry


class Block(msgspec.Struct, kw_only=True, eq=False):
    """A run of one kind.

    Attributes:
        call: how the call began, in a block that is one.
        pieces: the text, the JSON text of the arguments, or the input of a custom call.
        entries: tokens that became visible in it.
    """

    kind: Literal["reasoning", "text", "call"]
    call: CallStart | None = None
    pieces: list[str] = []
    entries: list[TokenEntry] = []

    @property
    def text(self) -> str:
        """What there is of it."""
        return "".join(self.pieces)


class Collected:
    """The events of one choice, put together.

    Attributes:
        blocks: in the order in which they were written.
        finish: why the choice ended, once it has.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish: Finish | None = None

    def add(self, event: Event) -> None:
        """Take the next event of this choice."""
        if isinstance(event, Finish):
            self.finish = event
        elif isinstance(event, CallStart):
            self.blocks.append(Block(kind="call", call=event))
        elif isinstance(event, CallArguments):
            self.blocks[-1].pieces.append(event.text)
        else:
            kind: Literal["reasoning", "text"] = "reasoning" if event.reasoning else "text"
            if not self.blocks or self.blocks[-1].kind != kind:
                self.blocks.append(Block(kind=kind))
            self.blocks[-1].pieces.append(event.text)
            self.blocks[-1].entries += event.entries

    @property
    def finish_reason(self) -> Any:
        """Why the choice ended; only of one that has."""
        assert self.finish is not None
        return self.finish.reason

    @property
    def content(self) -> str:
        """All text."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def entries(self) -> list[TokenEntry]:
        """Tokens of the text."""
        return [entry for block in self.blocks if block.kind == "text" for entry in block.entries]

    @property
    def calls(self) -> list[tuple[CallStart, str]]:
        """How each call began, and its arguments or input."""
        return [(block.call, block.text) for block in self.blocks if block.call is not None]

    def is_whole(self, block: Block) -> bool:
        """Whether ``block`` was written to its end: the token limit cuts off the last one."""
        return block is not self.blocks[-1] or self.finish_reason != "length"


def collect(events: Iterable[Event], count: int) -> list[Collected]:
    """The ``count`` choices that ``events`` make."""
    choices = [Collected() for _ in range(count)]
    for event in events:
        choices[event.index].add(event)
    return choices


class BlockStream(ABC):
    """Encodes a reply of one choice, for dialects whose streams open and close each block.

    Attributes:
        reply: what there is of it.
    """

    def __init__(self) -> None:
        self.reply = Collected()

    def encode(self, events: Sequence[Event]) -> bytes:
        """``events`` as events of the dialect."""
        found: list[bytes] = []
        blocks = self.reply.blocks
        for event in events:
            known = len(blocks)
            self.reply.add(event)
            if blocks and known and (len(blocks) > known or isinstance(event, Finish)):
                found.append(self._close(known - 1, blocks[known - 1]))
            if len(blocks) > known:
                found.append(self._open(known, blocks[known]))
            if isinstance(event, Piece | CallArguments) and event.text:
                found.append(self._grow(len(blocks) - 1, blocks[-1], event))
        return b"".join(found)

    @abstractmethod
    def _open(self, index: int, block: Block) -> bytes:
        """Block number ``index`` begins."""

    @abstractmethod
    def _grow(self, index: int, block: Block, event: Piece | CallArguments) -> bytes:
        """``event`` has been added to the block."""

    @abstractmethod
    def _close(self, index: int, block: Block) -> bytes:
        """The block is complete, or the reply has ended in it."""
