"""Calls in the XML of Qwen and MiMo: the block is between tokens, the tags in it are text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dgpp_core.text.tools.dialect import Call, ToolDialect, written
from dgpp_core.text.tools.machine import Machine, sentinel
from dgpp_core.text.tools.rules import Tool
from dgpp_core.text.tools.writer import CallWriter, Malformed

_CLOSE = sentinel(1)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BEGINS_NAME = re.compile(r"[A-Za-z0-9_-]{0,64}(>.*)?", re.DOTALL)


class QwenDialect(ToolDialect):
    """``<tool_call>`` and ``<function=name>``, ``<parameter=key>``, a value and their ends, each on a line of its own.

    One newline before a value and one behind it are not the value's.
    """

    name = "qwen"
    markers = ("<tool_call>", "</tool_call>")

    def machine(self, writer: CallWriter) -> Machine:
        """A reader of one call."""
        return _XmlMachine(writer, lines=True)

    def render(self, calls: Sequence[Call], *, after_text: bool = False, tools: Sequence[Tool] = ()) -> str:
        """A blank line after text, and one newline between calls."""
        return "\n\n" * (after_text and bool(calls)) + "\n".join(
            f"<tool_call>\n<function={call.name}>\n{self._arguments(call)}</function>\n</tool_call>" for call in calls
        )

    def _arguments(self, call: Call) -> str:
        return "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in call.arguments.items())


class CompactDialect(ToolDialect):
    """The same without newlines; a call with one behind ``<function=name>`` is read as Qwen's."""

    name = "compact"
    markers = ("<tool_call>", "</tool_call>")
    always_complete = True

    def machine(self, writer: CallWriter) -> Machine:
        """A reader of one call."""
        return _XmlMachine(writer, lines=False)

    def render(self, calls: Sequence[Call], *, after_text: bool = False, tools: Sequence[Tool] = ()) -> str:
        """Calls one behind the other, with nothing between them."""
        return "".join(
            f"<tool_call><function={call.name}>{self._arguments(call)}</function></tool_call>" for call in calls
        )

    def _arguments(self, call: Call) -> str:
        return "".join(f"<parameter={key}>{written(value)}</parameter>" for key, value in call.arguments.items())


class _XmlMachine(Machine):
    """Args:
    lines: values stand on lines of their own, whatever follows the function's name.
    """

    def __init__(self, writer: CallWriter, *, lines: bool) -> None:
        super().__init__(writer)
        self._lines = lines

    def _begin(self) -> bool:
        tag = self._take(_FUNCTION)
        self._step = self._name if tag else self._step
        return tag is not None

    def _name(self) -> bool:
        if not _BEGINS_NAME.fullmatch(self.rest):
            raise Malformed
        name = self._read(">")
        if name is None:
            return False
        self._writer.open(name)
        self._step = self._name_end
        return True

    def _name_end(self) -> bool:
        if not self.rest:
            return False
        self._lines = self._lines or self.rest.startswith("\n")
        self._step = self._next
        return True

    def _next(self) -> bool:
        tag = self._take(_PARAMETER, _FUNCTION_END)
        if tag is not None:
            self._step = self._key if tag == _PARAMETER else self._end
        return tag is not None

    def _key(self) -> bool:
        key = self._read(">")
        if key is None:
            return False
        if not key:
            raise Malformed
        self._writer.key(key)
        self._step = self._value_start
        return True

    def _value_start(self) -> bool:
        if not self.rest:
            return False
        if self._lines:
            self.rest = self.rest.removeprefix("\n")
        self._step = self._value
        return True

    def _value(self) -> bool:
        ended = self._pass_value(_PARAMETER_END, newline=self._lines)
        self._step = self._next if ended else self._step
        return ended

    def _end(self) -> bool:
        tag = self._take(_CLOSE)
        if tag is not None:
            self._writer.close()
            self.done = True
        return tag is not None
