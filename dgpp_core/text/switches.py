"""What of a request's reasoning controls a chat template acts on, found by trying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.text.template import ChatTemplate

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
HISTORY = (
    "preserve_thinking", "preserve_reasoning", "clear_thinking", "drop_thinking", "truncate_history_thinking",
)  # fmt: skip
"""Booleans about the reasoning of earlier turns."""
_NEIGHBOURS = {"minimal": "low", "low": "minimal", "medium": "high", "high": "xhigh", "xhigh": "max", "max": "xhigh"}
_UNKNOWN = "qZ7effort"
USUAL = ("enable_thinking", "thinking")
"""Thinking switches to look for where a model's family names none."""


class Switches(msgspec.Struct, frozen=True):
    """The reasoning controls of a template.

    Attributes:
        thinking: variables that change the prompt when they are turned on and off.
        efforts: what `reasoning_effort` is set to for each effort; empty where the template makes no difference.
        ignored: variables that were declared, or that the template reads, and that change no prompt that was tried.
    """

    thinking: tuple[str, ...] = ()
    efforts: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()


def find_switches(template: ChatTemplate, declared: Sequence[str] = ()) -> Switches:
    """The controls of ``template``.

    Args:
        declared: thinking switches that the model's family says there are.
    """
    thinking = tuple(name for name in declared or USUAL if _differs(template, name, {}))
    on = dict.fromkeys(thinking, True)
    efforts = _efforts(template, on)
    read = [name for name in (*USUAL, *HISTORY) if name in template.variables]
    known = dict.fromkeys((*declared, *read))
    dead = [name for name in known if not (_differs(template, name, {}) or _differs(template, name, on))]
    if "reasoning_effort" in template.variables and not efforts:
        dead.append("reasoning_effort")
    return Switches(thinking, efforts, tuple(dead))


def _efforts(template: ChatTemplate, on: Mapping[str, bool]) -> dict[str, str]:
    """The template's own name for each effort.

    A name is known if it is taken and gives another prompt than one that nobody knows. An effort whose name is not
    known gets that of its neighbour. Where neither is, a template that takes any name decides itself, and one that
    refuses gets the nearest that it knows.
    """
    if "reasoning_effort" not in template.variables:
        return {}
    tried = {name: _prompts(template, {**on, "reasoning_effort": name}) for name in (*EFFORTS, _UNKNOWN)}
    other = tried[_UNKNOWN]
    known = [name for name in EFFORTS if _taken(tried[name]) and tried[name] != other]
    if not known:
        return {}
    return {name: _native(name, known, takes_any=_taken(other)) for name in EFFORTS}


def _taken(prompts: Sequence[str | None]) -> bool:
    return any(prompt is not None for prompt in prompts)


def _native(effort: str, known: Sequence[str], *, takes_any: bool) -> str:
    for name in (effort, _NEIGHBOURS[effort]):
        if name in known:
            return name
    if takes_any:
        return "max" if effort == "xhigh" else effort
    return min(known, key=lambda name: abs(EFFORTS.index(name) - EFFORTS.index(effort)))


def _differs(template: ChatTemplate, name: str, on: Mapping[str, bool]) -> bool:
    """Whether the template reads ``name`` and renders another prompt for it."""
    if name not in template.variables:
        return False
    first, second = (_prompts(template, {**on, name: value}) for value in (True, False))
    return any(one != two and None not in (one, two) for one, two in zip(first, second, strict=True))


def _prompts(template: ChatTemplate, variables: Mapping[str, Any]) -> tuple[str | None, ...]:
    """What short conversations come to, one with reasoning in its history; None what the template refuses."""
    user: dict[str, Any] = {"role": "user", "content": "x"}
    thought: dict[str, Any] = {"role": "assistant", "content": "y", "reasoning_content": "qZ7thought"}
    call: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    calls = [user, thought | {"tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "z"}]
    return tuple(_rendered(template, messages, variables) for messages in ([user], [user, thought, user], calls))


def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str | None:
    try:
        return template.render(messages, kwargs=variables)
    except RequestError:
        return None
