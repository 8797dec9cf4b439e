"""`reasoning_effort` and `chat_template_kwargs`: what a request may set in the chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

from dgpp_core.api.errors import RequestError
from dgpp_core.server.parse import shorten
from dgpp_core.server.requests import Effort
from dgpp_core.text.switches import HISTORY, Switches

EFFORTS: tuple[str, ...] = get_args(Effort)
SWITCHES = ("enable_thinking", "thinking")
"""Two names of one thing in a request."""
DOES_NOT_THINK = (
    "this model does not think: its family names no marks of reasoning, "
    "and `<think>` and `</think>` are no tokens of the checkpoint"
)


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


def without_effect(switches: Switches) -> str:
    """What requests that set the ignored of ``switches`` come to, and how that could be changed; for the log."""
    dead = [name for name in switches.ignored if name not in HISTORY and name != "reasoning_effort"]
    on = " and ".join(switches.thinking)
    told = []
    if dead:
        refused = "a request that turns thinking on or off gets a 400"
        told.append(f"requests turn thinking on and off through {on} alone" if on else refused)
    if "reasoning_effort" in switches.ignored:
        told.append(f"reasoning_effort only turns thinking on or off, through {on}" if on else "an effort gets a 400")
    if history := [name for name in switches.ignored if name in HISTORY]:
        told.append(f"{', '.join(history)} may be sent and changes nothing")
    return "; ".join([*told, "where the release has another chat_template.jinja, put it into the checkpoint's folder"])


def _thinking(given: Mapping[str, Any], switches: Collection[str]) -> bool | None:
    values: dict[bool, str] = {}
    for name in SWITCHES:
        if name in given:
            value = given[name]
            if not isinstance(value, bool):
                raise _not_boolean(name, value)
            if not switches:
                raise _unknown(
                    name,
                    "changes nothing: the chat template of the checkpoint has no thinking switch",
                    "leave it out, or serve a release whose chat template acts on `enable_thinking` or `thinking`; the "
                    "template is chat_template.jinja in the checkpoint's folder, or `chat_template` in "
                    "tokenizer_config.json there",
                )
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
    no_effort = "leave it out: the chat template of the checkpoint acts on no effort and has no thinking switch"
    raise RequestError(
        f"`{param}`: {shorten(effort)} is not available for this model; available: {available}",
        param=param,
        code="unsupported_reasoning_effort",
        hint="" if efforts else no_effort,
    )


def _history(name: str, value: Any, variables: Collection[str]) -> bool:
    if not isinstance(value, bool):
        raise _not_boolean(name, value)
    if name not in variables:
        raise _unknown(name, "changes nothing: the chat template of the checkpoint does not read it", "leave it out")
    return value


def _not_boolean(name: str, value: Any) -> RequestError:
    param = f"chat_template_kwargs.{name}"
    return RequestError(f"`{param}`: expected true or false, found {shorten(value)}", param=param)


def _unknown(name: str, what: str, hint: str = "") -> RequestError:
    param = f"chat_template_kwargs.{name}"
    return RequestError(f"`{param}` {what}", param=param, code="unsupported_parameter", hint=hint)
