"""Which dialect a checkpoint writes calls in: by its added tokens, and where those do not tell, by its template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgpp_core.api.errors import RequestError
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tools.dialect import Call, ToolDialect
from dgpp_core.text.tools.dsml import DsmlDialect
from dgpp_core.text.tools.glm import GlmDialect
from dgpp_core.text.tools.xml import CompactDialect, QwenDialect

DIALECTS: tuple[ToolDialect, ...] = (GlmDialect(), DsmlDialect(), QwenDialect(), CompactDialect())
"""In the order in which they are tried."""

_PROBE = Call("qz_probe", {"key": "value", "number": 1})


def detect_dialect(is_added: Callable[[str], bool], template: ChatTemplate | None) -> ToolDialect | None:
    """The dialect of a model, or None where its calls cannot be read.

    Two dialects have the same markers; the template decides by how it writes a call of an earlier turn. A template that
    puts something else between those markers is of none of them.
    """
    if template is None:
        return None
    fitting = [dialect for dialect in DIALECTS if all(map(is_added, dialect.markers))]
    if fitting and not isinstance(fitting[0], QwenDialect | CompactDialect):
        return fitting[0]
    shown = _shown(template)
    return next((dialect for dialect in fitting if dialect.render([_PROBE]) in shown), None)


def _shown(template: ChatTemplate) -> str:
    """A prompt in which the probe was called, or nothing where the template takes no calls."""
    function = {"name": _PROBE.name, "arguments": dict(_PROBE.arguments)}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    tools = [{"type": "function", "function": {"name": _PROBE.name, "description": "", "parameters": {}}}]
    try:
        return template.render(messages, tools=tools)
    except RequestError:
        return ""
