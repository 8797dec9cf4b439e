"""What a family's way of writing tool calls has to offer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from dgpp_core.text.tools.machine import Machine, sentinel
from dgpp_core.text.tools.rules import Tool
from dgpp_core.text.tools.writer import CallWriter


class Call(msgspec.Struct, frozen=True):
    """A call that is known: the function's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


class ToolDialect(ABC):
    """How calls are written: as text with markers that are single tokens.

    Attributes:
        name: for messages and tests.
        markers: the added tokens; the first one opens a block.
        lead: text that stands before the opening marker and belongs to it.
        turn_end: a token that ends a turn with calls, where the vocabulary has it.
        always_complete: calls without a required argument are not wanted even of tools that are not strict.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    lead: ClassVar[str] = ""
    turn_end: ClassVar[str | None] = None
    always_complete: ClassVar[bool] = False

    @abstractmethod
    def machine(self, writer: CallWriter) -> Machine:
        """A reader of one block."""

    @abstractmethod
    def render(self, calls: Sequence[Call], *, after_text: bool = False, tools: Sequence[Tool] = ()) -> str:
        """What a reply writes to make ``calls``, as the chat template shows it.

        Args:
            after_text: the reply has text before its calls.
            tools: the declared ones, for dialects whose names depend on them.
        """

    def literal(self, text: str) -> str:
        """``text`` of a machine with its markers written out."""
        for index, marker in enumerate(self.markers):
            text = text.replace(sentinel(index), marker)
        return text


def written(value: Any) -> str:
    """A value as templates write it: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
