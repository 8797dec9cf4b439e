"""What a request's tools say about calls: names, keys and the form of each value. Parsers and grammars read this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dgpp_core.text.tools.kinds import Known, arguments_schema, choices_of, types_of

INPUT = "input"
"""The argument that the text of a custom tool is written as."""

Form = Literal["text", "json", "either"]
"""How a value stands in a reply: raw text, one JSON text, or whichever of the two it turns out to be."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An argument of a tool.

    Attributes:
        types: the JSON types that its schema allows; None where nothing is said.
        choices: all that a string with ``enum`` may be.
        schema: as the client wrote it; references in it start from the tool's ``parameters``.
    """

    name: str
    types: frozenset[str] | None = None
    choices: tuple[str, ...] | None = None
    schema: Any = None
    required: bool = False

    @property
    def form(self) -> Form:
        """Strings are raw text and everything else is JSON; a union of both, or an unknown type, may be either."""
        if self.types is None:
            return "either"
        if self.types == {"string"}:
            return "text"
        return "either" if "string" in self.types else "json"


class InputGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the input of a custom tool must be."""

    syntax: Literal["regex", "lark"]
    definition: str


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function or custom tool that the model may call.

    Attributes:
        keys: the declared arguments, in the order of the schema.
        other: what arguments that are not declared look like.
        open: arguments that are not declared may be written.
        strict: a call must conform to the schema.
        namespace: part of the name in dialects that have namespaces.
        parameters: the schema of the arguments object.
        custom: the tool takes one text, which is written as the argument `INPUT`.
        grammar: what a custom tool's text must be, if it is not free.
    """

    name: str
    keys: tuple[Key, ...] = ()
    other: Key = Key(name="")
    open: bool = True
    strict: bool = False
    namespace: str = ""
    parameters: Any = None
    custom: bool = False
    grammar: InputGrammar | None = None

    def key(self, name: str) -> Key:
        """The argument ``name``, declared or not."""
        return next((key for key in self.keys if key.name == name), self.other)

    @property
    def required(self) -> tuple[str, ...]:
        """Arguments that a complete call has."""
        return tuple(key.name for key in self.keys if key.required)


class CallRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls a reply may, or must, have.

    Attributes:
        tools: what may be called.
        required: the reply has a call.
        parallel: it may have more than one.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True

    def tool(self, name: str) -> Tool:
        """The tool ``name``; for one that is not declared, a tool of which nothing is known."""
        return next((tool for tool in self.tools if tool.name == name), Tool(name=name))


def tool_of(name: str, parameters: Any, *, strict: bool = False, namespace: str = "") -> Tool:
    """The rules of a function from the JSON schema of its arguments, which may be None."""
    schema = arguments_schema(parameters)
    properties = schema.get("properties")
    declared: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    listed = schema.get("required")
    required = listed if isinstance(listed, list) else []
    further = schema.get("additionalProperties")
    known: Known = {}
    return Tool(
        name=name,
        keys=tuple(
            Key(
                name=key,
                types=types_of(part, parameters, known),
                choices=choices_of(part),
                schema=part,
                required=key in required,
            )
            for key, part in declared.items()
        ),
        other=Key(name="", types=types_of(further, parameters, known), schema=further),
        open=further is True or (not declared and further is not False),
        strict=strict,
        namespace=namespace,
        parameters=parameters,
    )


def custom_tool(name: str, grammar: InputGrammar | None = None) -> Tool:
    """The rules of a custom tool: a function with one argument, without which there is no call."""
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    found = tool_of(name, parameters | {"additionalProperties": False}, strict=True)
    return msgspec.structs.replace(found, custom=True, grammar=grammar)
