"""`reasoning_effort` and `chat_template_kwargs`: what a request may set in the chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

from dgpp_core.api.errors import RequestError
from dgpp_core.server.parse import shorten
from dgpp_core.server.requests import Effort
from dgpp_core.text.switches import HISTORY

EFFORTS: tuple[str, ...] = get_args(Effort)
SWITCHES = ("enable_thinking", "thinking")
"""Two names of one thing in a request."""


def effort_mapping(native: Mapping[str, str], switches: Collection[str]) -> dict[str, dict[str, Any]]:
    """The template variables that each available effort sets.

    Args:
        native: by effort, what the template calls it; empty where it does not read `reasoning_effort`.
        switches: the variables that turn thinking on and off.
    """
    mapping: dict[str, dict[str, Any]] = {}
    if switches:
        mapping["none"] = dict.fromkeys(switches, False)
    for effort in EFFORTS[1:]:
        if effort in native:
            mapping[effort] = {"reasoning_effort": native[effort]} | dict.fromkeys(switches, True)
        elif switches:
            mapping[effort] = dict.fromkeys(switches, True)
    return mapping


def template_variables(
    effort: str | None,
    kwargs: Mapping[str, Any] | None,
    *,
    efforts: Mapping[str, Mapping[str, Any]],
    variables: Collection[str],
    switches: Collection[str],
) -> dict[str, Any]:
    """What the template gets, from a request's ``effort`` and ``kwargs``.

    Raises:
        RequestError: an effort or switch that the model does not have, or two that contradict each other.
    """
    given = {name: value for name, value in (kwargs or {}).items() if value is not None}
    thinking = _thinking(given, switches)
    effort = _effort(effort, given, efforts)
    if effort is not None and thinking is not None and thinking != (effort != "none"):
        raise RequestError(
            f"`reasoning_effort` {effort!r} contradicts the thinking switch in `chat_template_kwargs`",
            param="chat_template_kwargs",
        )
    found: dict[str, Any] = {}
    if thinking is not None:
        found |= dict.fromkeys(switches, thinking)
    if effort is not None:
        found |= efforts[effort]
    for name, value in given.items():
        if name in HISTORY:
            found[name] = _history(name, value, variables)
        elif name not in (*SWITCHES, "reasoning_effort"):
            raise _unknown(name, "is not known")
    return found


def _thinking(given: Mapping[str, Any], switches: Collection[str]) -> bool | None:
    values: dict[bool, str] = {}
    for name in SWITCHES:
        if name in given:
            value = given[name]
            if not isinstance(value, bool):
                raise _not_boolean(name, value)
            if not switches:
                raise _unknown(name, "changes nothing: this model's chat template has no thinking switch")
            values[value] = name
    if len(values) == 2:
        raise RequestError(
            "`chat_template_kwargs`: `thinking` contradicts `enable_thinking`", param="chat_template_kwargs.thinking"
        )
    return next(iter(values), None)


def _effort(effort: str | None, given: Mapping[str, Any], efforts: Mapping[str, Any]) -> str | None:
    param = "reasoning_effort"
    if (other := given.get("reasoning_effort")) is not None:
        if effort is not None and effort != other:
            raise RequestError(
                f"`reasoning_effort` {effort!r} contradicts {shorten(other)} in `chat_template_kwargs`",
                param="chat_template_kwargs.reasoning_effort",
            )
        param, effort = "chat_template_kwargs.reasoning_effort", other
    if effort is None or (isinstance(effort, str) and effort in efforts):
        return effort
    available = ", ".join(efforts) or "none at all"
    raise RequestError(
        f"`{param}`: {shorten(effort)} is not available for this model; available: {available}",
        param=param,
        code="unsupported_reasoning_effort",
    )


def _history(name: str, value: Any, variables: Collection[str]) -> bool:
    if not isinstance(value, bool):
        raise _not_boolean(name, value)
    if name not in variables:
        raise _unknown(name, "changes nothing: this model's chat template does not read it")
    return value


def _not_boolean(name: str, value: Any) -> RequestError:
    param = f"chat_template_kwargs.{name}"
    return RequestError(f"`{param}`: expected true or false, found {shorten(value)}", param=param)


def _unknown(name: str, what: str) -> RequestError:
    param = f"chat_template_kwargs.{name}"
    return RequestError(f"`{param}` {what}", param=param, code="unsupported_parameter")
