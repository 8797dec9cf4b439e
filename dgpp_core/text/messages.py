"""Request messages, checked, in the form that chat templates take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from dgpp_core.api.errors import RequestError
from dgpp_core.text.template import ChatTemplate

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REFUSED_MEMBERS = ("audio", "function_call")
_KINDS = {
    type(None): "nothing", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array",
    dict: "an object",
}  # fmt: skip

IMAGE: Mapping[str, str] = MappingProxyType({"type": "image"})
"""What stands in a message for an image that was taken out of it: this very object, which no body can hold."""


def normalise_messages(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """What ``template`` may see of a request's messages.

    ``developer`` becomes ``system``. Null members are dropped and absent content is ``""``. Text parts become one
    string, unless the template takes lists in that role or `IMAGE` is among them. A call's arguments are an object,
    never a string; a custom call is a function call with the one argument ``input``. Members that no template is
    promised are left out.

    Raises:
        RequestError: status 400, with the path of the member that is wrong.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise _wrong("messages", "must be a non-empty array")
    return [_message(message, f"messages[{index}]", template) for index, message in enumerate(messages)]


def _message(message: Any, path: str, template: ChatTemplate) -> dict[str, Any]:
    _expect(message, Mapping, path, "an object")
    members = {key: value for key, value in message.items() if value is not None}
    role = members.get("role")
    if role not in _ROLES:
        raise _wrong(f"{path}.role", f"must be one of {', '.join(_ROLES)}; found {role!r}")
    for key in _REFUSED_MEMBERS:
        if key in members:
            raise _wrong(f"{path}.{key}", "is not supported", code="unsupported_parameter")
    if role == "developer":
        role = "system"
    found: dict[str, Any] = {"role": role, "content": _content(members, role, path, template)}
    if "name" in members:
        found["name"] = _expect(members["name"], str, f"{path}.name", "a string")
    if role == "assistant":
        found |= _assistant(members, path)
    elif members.get("tool_calls"):
        raise _wrong(f"{path}.tool_calls", "belongs in an assistant message")
    elif "refusal" in members:
        raise _wrong(f"{path}.refusal", "belongs in an assistant message")
    if role == "tool" and ("tool_call_id" in members or not _lists_objects(members.get("content"))):
        found["tool_call_id"] = _expect(members.get("tool_call_id"), str, f"{path}.tool_call_id", "a string")
    return found


def _assistant(members: Mapping[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "reasoning_content" in members:
        value = members["reasoning_content"]
        found["reasoning_content"] = _expect(value, str, f"{path}.reasoning_content", "a string")
    calls = _expect(members.get("tool_calls", []), list, f"{path}.tool_calls", "an array")
    if calls:
        found["tool_calls"] = [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return found


def _content(members: Mapping[str, Any], role: str, path: str, template: ChatTemplate) -> Any:
    content, path = members.get("content"), f"{path}.content"
    if content is None:
        return _absent_content(members, role, path)
    if isinstance(content, str):
        return content
    _expect(content, list, path, "a string or an array of parts")
    if role == "tool" and _lists_objects(content):
        return content
    if role == "assistant" and len(content) == 1 and _is_refusal(content[0]):
        return _expect(content[0].get("refusal"), str, f"{path}[0].refusal", "a string")
    if content and all(isinstance(part, str) for part in content) and role in template.string_list_roles:
        return content
    if any(part is IMAGE for part in content):
        return [dict(part) if part is IMAGE else _text_part(part, f"{path}[{at}]") for at, part in enumerate(content)]
    texts = [_text(part, f"{path}[{index}]") for index, part in enumerate(content)]
    if role in template.part_roles and role != "tool":
        return [{"type": "text", "text": text} for text in texts]
    return "".join(texts)


def _absent_content(members: Mapping[str, Any], role: str, path: str) -> str:
    if role == "assistant":
        if "refusal" in members:
            return str(_expect(members["refusal"], str, path.replace(".content", ".refusal"), "a string"))
        if members.get("tool_calls") or "reasoning_content" in members:
            return ""
    raise _wrong(
        path, "must be a string or an array of text parts" + " or come with tool_calls" * (role == "assistant")
    )


def _lists_objects(content: Any) -> bool:
    """Whether content is a list of objects without a type, which some templates take for tool results."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(part, Mapping) and "type" not in part for part in content)
    )


CUT_OFF = "arguments"
"""The argument that holds a call's arguments where they are no JSON object."""


def _is_refusal(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "refusal"


def _text(part: Any, path: str) -> str:
    _expect(part, Mapping, path, "an object with type and text")
    kind = _expect(part.get("type"), str, f"{path}.type", "a string")
    if kind != "text":
        raise _wrong(f"{path}.type", f"content of type {kind!r} is not accepted here", code="unsupported_content_type")
    if "prompt_cache_breakpoint" in part:
        raise _wrong(f"{path}.prompt_cache_breakpoint", "is not supported", code="unsupported_parameter")
    return str(_expect(part.get("text"), str, f"{path}.text", "a string"))


def _text_part(part: Any, path: str) -> dict[str, Any]:
    return {"type": "text", "text": _text(part, path)}


def _call(call: Any, path: str) -> dict[str, Any]:
    _expect(call, Mapping, path, "an object")
    kind = call.get("type") or "function"
    if kind not in ("function", "custom"):
        raise _wrong(f"{path}.type", f"must be function or custom; found {kind!r}")
    number = _expect(call.get("id"), str, f"{path}.id", "a string")
    body = _expect(call.get(kind), Mapping, f"{path}.{kind}", "an object")
    name = _expect(body.get("name"), str, f"{path}.{kind}.name", "a string")
    if kind == "function":
        arguments = _arguments(body.get("arguments"), f"{path}.function.arguments")
    else:
        if not number:
            raise _wrong(f"{path}.id", "must not be empty")
        if not _NAME.fullmatch(name):
            raise _wrong(f"{path}.custom.name", "must be 1 to 64 of A-Z, a-z, 0-9, _ and -")
        arguments = {"input": _expect(body.get("input"), str, f"{path}.custom.input", "a string")}
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: Any, path: str) -> dict[str, Any]:
    """The arguments as an object.

    A text that is none is the one argument `CUT_OFF`: a client sends back what it got, and the token limit may have cut
    a call off. Refused, every later turn of its conversation would be.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            found = json.loads(value, parse_float=_number, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {CUT_OFF: value}
    return dict(_expect(value, Mapping, path, "an object, or a string that holds one JSON object"))


def _number(spelled: str) -> float | str:
    """A number, or its own text where no float can hold it: as infinity it would be no JSON in the prompt."""
    value = float(spelled)
    return value if math.isfinite(value) else spelled


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _expect(value: Any, kind: type, path: str, expected: str) -> Any:
    if not isinstance(value, kind):
        found = _KINDS.get(type(value), type(value).__name__)
        raise _wrong(path, f"must be {expected}; found {found}")
    return value


def _wrong(path: str, reason: str, *, code: str | None = None) -> RequestError:
    return RequestError(f"{path} {reason}", param=path, code=code)
