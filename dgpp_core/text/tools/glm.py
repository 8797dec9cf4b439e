"""GLM's calls: every boundary is a token of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dgpp_core.text.tools.dialect import Call, ToolDialect, written
from dgpp_core.text.tools.machine import LONGEST_NAME, SPACE, Machine, is_plain, sentinel
from dgpp_core.text.tools.rules import Tool
from dgpp_core.text.tools.writer import CallWriter, Malformed

_CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END = map(sentinel, range(1, 6))
_BEGINS_NAME = re.compile(r"[ \t\r\n]*[A-Za-z0-9_-]{0,64}[ \t\r\n]*")
_NAME_END = re.compile(f"[{_CLOSE}{_KEY}]")


class GlmDialect(ToolDialect):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``.

    Names and keys are trimmed, and white space may stand between markers; values are taken as they are.
    """

    name = "glm"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    turn_end = "<|observation|>"

    def machine(self, writer: CallWriter) -> Machine:
        """A reader of one call."""
        return _GlmMachine(writer)

    def render(self, calls: Sequence[Call], *, after_text: bool = False, tools: Sequence[Tool] = ()) -> str:
        """Calls one behind the other, with nothing between them."""
        return "".join(f"<tool_call>{call.name}{_arguments(call)}</tool_call>" for call in calls)


def _arguments(call: Call) -> str:
    return "".join(
        f"<arg_key>{key}</arg_key><arg_value>{written(value)}</arg_value>" for key, value in call.arguments.items()
    )


class _GlmMachine(Machine):
    def _begin(self) -> bool:
        end = _NAME_END.search(self.rest)
        name = self.rest[: end.start()] if end else self.rest
        if len(name) > LONGEST_NAME or not _BEGINS_NAME.fullmatch(name):
            raise Malformed
        if end is None:
            return False
        self._writer.open(name.strip(SPACE))
        self.rest = self.rest[end.start() :]
        self._step = self._next
        return True

    def _next(self) -> bool:
        tag = self._take(_KEY, _CLOSE)
        if tag == _CLOSE:
            self._writer.close()
            self.done = True
        self._step = self._key if tag == _KEY else self._step
        return tag is not None

    def _key(self) -> bool:
        key, found, after = self.rest.partition(_KEY_END)
        name = key.strip(SPACE)
        if len(key) > LONGEST_NAME or not is_plain(key) or (found and not name):
            raise Malformed
        if not found:
            return False
        self.rest = after
        self._writer.key(name)
        self._step = self._value_start
        return True

    def _value_start(self) -> bool:
        tag = self._take(_VALUE)
        self._step = self._value if tag else self._step
        return tag is not None

    def _value(self) -> bool:
        ended = self._pass_value(_VALUE_END, newline=False)
        self._step = self._next if ended else self._step
        return ended
