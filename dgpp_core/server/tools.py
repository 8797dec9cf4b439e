"""`tools`, `tool_choice` and `parallel_tool_calls`: what the model is shown, and which calls it may make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.parse import shorten
from dgpp_core.server.requests import ChatRequest
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tools.dialect import ToolDialect
from dgpp_core.text.tools.rules import CallRules, InputGrammar, Tool, custom_tool, tool_of
from dgpp_core.text.tools.writer import NAME

SHOWN = ("name", "description", "parameters", "strict")
"""Members of a function that reach the chat template."""

_CHOICES = ("auto", "none", "required")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for.

    Attributes:
        shown: definitions for the chat template, or None.
        rules: which calls the reply may have; None where calls are text like any other.
    """

    shown: tuple[dict[str, Any], ...] | None = None
    rules: CallRules | None = None


class _Defined(msgspec.Struct, frozen=True):
    """A definition: as the template sees it, and as its calls are read."""

    shown: dict[str, Any]
    tool: Tool


def read_tools(
    request: ChatRequest, dialect: ToolDialect | None, template: ChatTemplate | None, *, constrained: bool
) -> ToolUse:
    """The tools of ``request``.

    Args:
        dialect: how the model writes calls, or None.
        template: the chat template, of which an error tells.
        constrained: replies can be kept to a grammar.

    Raises:
        RequestError: 400 with the path of what is malformed, contradictory or cannot be guaranteed.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice != "none":
            raise RequestError("`tool_choice` needs `tools`", param="tool_choice")
        return ToolUse()
    if dialect is None:
        raise _cannot_call(template)
    spaces = dialect.name == "dsml"
    defined = [_defined(raw, f"tools[{at}]", spaces, constrained) for at, raw in enumerate(request.tools)]
    _check_unique(defined, request.tools)
    named, required, alone = _chosen(choice, defined)
    if choice == "none":
        return ToolUse()
    if named is not None or required:
        _needs_masks("tool_choice", f"`tool_choice` {shorten(choice)}", constrained)
    if request.parallel_tool_calls is False:
        _needs_masks("parallel_tool_calls", "`parallel_tool_calls: false`", constrained)
    kept = defined if named is None else [found for found in defined if found.tool.name in named]
    rules = CallRules(
        tools=tuple(found.tool for found in kept),
        required=required,
        parallel=not alone and request.parallel_tool_calls is not False,
    )
    # A tool that must be called stays among the others, as it was in the turns before: only a subset is shown alone.
    shown = defined if alone else kept
    return ToolUse(shown=tuple(found.shown for found in shown), rules=rules)


def _cannot_call(template: ChatTemplate | None) -> RequestError:
    hint = (
        "leave `tools` out, or serve a release whose chat template has such a form; the template is "
        "chat_template.jinja in the checkpoint's folder, or `chat_template` in tokenizer_config.json there"
    )
    if template is None:
        why = "the checkpoint has no chat template"
    elif "tools" not in template.variables:
        why = "the chat template of the checkpoint has no form for tools"
    else:
        why = "chat template and added tokens of the checkpoint have no form of calls that is known here"
        hint += "; known are those of GLM, DeepSeek, Qwen and MiMo"
    return RequestError(f"this model cannot call tools: {why}", param="tools", code="tools_unsupported", hint=hint)


def _defined(raw: Any, path: str, spaces: bool, constrained: bool) -> _Defined:
    if not isinstance(raw, Mapping):
        raise _wrong(path, "an object", raw)
    kind = raw.get("type", "function")
    if kind == "custom":
        return _custom(raw.get("custom"), f"{path}.custom", constrained)
    if kind != "function":
        raise _wrong(f"{path}.type", '"function" or "custom"', kind)
    body, path = (raw["function"], f"{path}.function") if "function" in raw else (raw, path)
    name = _named(body, path)
    _check_members(body, path, {"parameters": (Mapping, "an object"), "strict": (bool, "true or false")})
    strict = body.get("strict") is True
    if strict:
        _needs_masks(f"{path}.strict", f"`{path}.strict`: true", constrained)
    members = (*SHOWN, "namespace") if spaces else SHOWN
    function = {key: value for key, value in body.items() if key in members and value is not None}
    shown = {key: function if key == "function" else kind for key in raw if key in ("type", "function")}
    return _Defined(
        {"type": kind, "function": function} if len(shown) < 2 else shown,
        tool_of(name, body.get("parameters"), strict=strict, namespace=(body.get("namespace") or "") if spaces else ""),
    )


def _custom(body: Any, path: str, constrained: bool) -> _Defined:
    """A custom tool, which the model is shown as a function of one string."""
    name = _named(body, path)
    _check_members(body, path, {"format": (Mapping, "an object")})
    tool = custom_tool(name, _grammar(body.get("format") or {"type": "text"}, f"{path}.format", constrained))
    about = {"description": body["description"]} if body.get("description") is not None else {}
    return _Defined({"type": "function", "function": {"name": name, **about, "parameters": tool.parameters}}, tool)


def _grammar(form: Mapping[str, Any], path: str, constrained: bool) -> InputGrammar | None:
    if form.get("type") == "text":
        return None
    if form.get("type") != "grammar":
        raise _wrong(f"{path}.type", '"text" or "grammar"', form.get("type"))
    grammar = form.get("grammar")
    if not isinstance(grammar, Mapping):
        raise _wrong(f"{path}.grammar", "an object", grammar)
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in ("regex", "lark"):
        raise _wrong(f"{path}.grammar.syntax", '"regex" or "lark"', syntax)
    if not isinstance(definition, str):
        raise _wrong(f"{path}.grammar.definition", "a string", definition)
    _needs_masks(path, f"`{path}`: a grammar", constrained)
    return InputGrammar(syntax=syntax, definition=definition)


def _named(body: Any, path: str) -> str:
    """The name of a definition, whose description is checked with it."""
    if not isinstance(body, Mapping):
        raise _wrong(path, "an object", body)
    name = body.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{path}.name", "1 to 64 of A-Z, a-z, 0-9, _ and -", name)
    _check_members(body, path, {"description": (str, "a string"), "namespace": (str, "a string")})
    return name


def _check_members(body: Mapping[str, Any], path: str, forms: Mapping[str, tuple[type, str]]) -> None:
    for member, (form, expected) in forms.items():
        if body.get(member) is not None and not isinstance(body[member], form):
            raise _wrong(f"{path}.{member}", expected, body[member])


def _check_unique(defined: Sequence[_Defined], raw: Sequence[Any]) -> None:
    seen: set[str] = set()
    for at, found in enumerate(defined):
        if found.tool.name in seen:
            inside = "custom." if found.tool.custom else "function." if "function" in raw[at] else ""
            path = f"tools[{at}].{inside}name"
            raise RequestError(f"`{path}`: the name {found.tool.name!r} is given twice", param=path)
        seen.add(found.tool.name)


def _chosen(choice: Any, defined: Sequence[_Defined]) -> tuple[frozenset[str] | None, bool, bool]:
    """The names that a choice allows (None: all), whether it wants a call, and whether it wants exactly one."""
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _CHOICES:
            raise _wrong("tool_choice", ", ".join(_CHOICES) + " or an object", choice)
        return None, choice == "required", False
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return frozenset({_reference(choice, "tool_choice", defined)}), True, True
    if kind != "allowed_tools":
        raise _wrong("tool_choice.type", '"function", "custom" or "allowed_tools"', kind)
    path, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise _wrong(path, "an object", allowed)
    if allowed.get("mode") not in ("auto", "required"):
        raise _wrong(f"{path}.mode", '"auto" or "required"', allowed.get("mode"))
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise _wrong(f"{path}.tools", "an array that is not empty", listed)
    names = [_reference(part, f"{path}.tools[{at}]", defined) for at, part in enumerate(listed)]
    if len(set(names)) < len(names):
        raise RequestError(f"`{path}.tools`: a tool is named twice", param=f"{path}.tools")
    return frozenset(names), allowed["mode"] == "required", False


def _reference(part: Any, path: str, defined: Sequence[_Defined]) -> str:
    """The name of a declared tool that ``part`` names."""
    if not isinstance(part, Mapping):
        raise _wrong(path, "an object", part)
    kind = part.get("type")
    if kind not in ("function", "custom"):
        raise _wrong(f"{path}.type", '"function" or "custom"', kind)
    body = part.get(kind)
    if not isinstance(body, Mapping):
        raise _wrong(f"{path}.{kind}", "an object with a name", body)
    name = body.get("name")
    found = next((found for found in defined if found.tool.name == name), None)
    if found is None or found.tool.custom != (kind == "custom"):
        raise _wrong(f"{path}.{kind}.name", f"the name of a {kind} in `tools`", name)
    return found.tool.name


def _needs_masks(param: str, what: str, constrained: bool) -> None:
    if not constrained:
        raise RequestError(
            f"{what} needs constrained decoding, which is not supported here",
            param=param,
            code="constrained_decoding_unsupported",
        )


def _wrong(param: str, expected: str, found: Any) -> RequestError:
    return RequestError(f"`{param}`: expected {expected}, found {shorten(found)}", param=param)
