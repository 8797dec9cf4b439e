"""DeepSeek's calls: tags of a markup whose names begin with a token of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dgpp_core.text.tools.dialect import Call, ToolDialect, written
from dgpp_core.text.tools.machine import Machine, sentinel
from dgpp_core.text.tools.rules import Tool
from dgpp_core.text.tools.writer import CallWriter, Malformed

_TAG = sentinel(0)
_INVOKE, _INVOKE_END = f'<{_TAG} invoke name="', f"</{_TAG} invoke>"
_PARAMETER, _PARAMETER_END = f'<{_TAG} parameter name="', f"</{_TAG} parameter>"
_CALLS, _CALLS_END = " calls>", f"</{_TAG} calls>"
_STRING, _JSON, _UNMARKED = 'string="true">', 'string="false">', ">"
_BEGINS_NAME = re.compile(r'[A-Za-z0-9_:-]{0,130}("(>.*)?)?', re.DOTALL)


class DsmlDialect(ToolDialect):
    """A block of one or more calls, each value marked as raw text or as JSON.

    All calls of a block stand or fall together. A name may have a namespace, ``space::name``, which is taken off.
    """

    name = "dsml"
    markers = ("｜DSML｜",)  # noqa: RUF001 - the token has full-width bars
    lead = "<"

    def machine(self, writer: CallWriter) -> Machine:
        """A reader of one block."""
        return _DsmlMachine(writer)

    def render(self, calls: Sequence[Call], *, after_text: bool = False, tools: Sequence[Tool] = ()) -> str:
        """One block for all calls, after a blank line."""
        if not calls:
            return ""
        spaces = {tool.name: tool.namespace for tool in tools if tool.namespace}
        names = [f"{spaces[call.name]}::{call.name}" if call.name in spaces else call.name for call in calls]
        body = "\n".join(
            f'{_INVOKE}{name}">\n{_arguments(call)}{_INVOKE_END}' for name, call in zip(names, calls, strict=True)
        )
        return self.literal(f"\n\n<{_TAG}{_CALLS}\n{body}\n{_CALLS_END}")


def _arguments(call: Call) -> str:
    return "".join(
        f'{_PARAMETER}{key}" {_STRING if isinstance(value, str) else _JSON}{written(value)}{_PARAMETER_END}\n'
        for key, value in call.arguments.items()
    )


class _DsmlMachine(Machine):
    _key_name = ""
    _any_call = False

    def _begin(self) -> bool:
        tag = self._take(_CALLS, space=False)
        self._step = self._next_call if tag else self._step
        return tag is not None

    def _next_call(self) -> bool:
        tag = self._take(_INVOKE, _CALLS_END) if self._any_call else self._take(_INVOKE)
        self.done = tag == _CALLS_END
        self._step = self._name if tag == _INVOKE else self._step
        return tag is not None

    def _name(self) -> bool:
        if not _BEGINS_NAME.fullmatch(self.rest):
            raise Malformed
        name = self._read('">')
        if name is None:
            return False
        self._any_call = True
        self._writer.open(name.rpartition("::")[2])
        self._step = self._next_key
        return True

    def _next_key(self) -> bool:
        tag = self._take(_PARAMETER, _INVOKE_END)
        if tag == _INVOKE_END:
            self._writer.close()
            self._step = self._next_call
        elif tag is not None:
            self._step = self._key
        return tag is not None

    def _key(self) -> bool:
        key = self._read('"')
        if key is None:
            return False
        if not key:
            raise Malformed
        self._key_name, self._step = key, self._marked
        return True

    def _marked(self) -> bool:
        tag = self._take(_STRING, _JSON, _UNMARKED)
        if tag is not None:
            self._writer.key(self._key_name, marked=tag == _STRING)
            self._step = self._value
        return tag is not None

    def _value(self) -> bool:
        ended = self._pass_value(_PARAMETER_END, newline=False)
        self._step = self._next_key if ended else self._step
        return ended
