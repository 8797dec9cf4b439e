"""Request bodies that are nearly right: valid ones of every route with values or bytes changed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

MODEL = "fake"
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, None]}},
    "required": ["a"], "additionalProperties": False, "$defs": {"n": {"type": "integer", "minimum": 0}},
}  # fmt: skip
FUNCTION: dict[str, Any] = {"name": "f", "description": "é", "parameters": SCHEMA, "strict": True}
CALLED: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "colors"}],
    "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 2,
    "stop": ["x", "yz"], "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.5},
    "stream": True, "stream_options": {"include_usage": True}, "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": True},
}  # fmt: skip
TOOL_CHAT: dict[str, Any] = {
    "model": MODEL, "max_tokens": 20, "parallel_tool_calls": False, "reasoning_effort": None,
    "tools": [{"type": "function", "function": FUNCTION},
              {"type": "custom", "custom": {"name": "g", "format": {"type": "grammar", "grammar": {
                  "syntax": "regex", "definition": "[a-z]+"}}}}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "colors"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "a", "content": "y"},
    ],
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model": MODEL, "prompt": "colors", "max_tokens": 20, "temperature": 0.5, "logprobs": 2, "stop": "x",
    "stream": False, "logit_bias": {"5": 1.5}, "seed": -3,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": MODEL, "instructions": "Be brief.", "max_output_tokens": 20, "stream": True, "seed": 7, "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "metadata": {"a": "b"},
    "reasoning": {"effort": "high", "summary": "auto"}, "text": {"format": {"type": "text"}}, "store": False,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "colors"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "dgpp1.SG0u"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"a\": [1]}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "y"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "y"}]},
    ],
}  # fmt: skip
TOOL_RESPONSES: dict[str, Any] = {
    "model": MODEL, "max_output_tokens": 20, "input": "colors", "parallel_tool_calls": True,
    "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g", "format": {
        "type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "s", "strict": True, "schema": SCHEMA}},
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": MODEL, "max_tokens": 2000, "system": [{"type": "text", "text": "Be brief."}], "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x", "yz"], "metadata": {"user_id": "u"},
    "output_config": {"effort": "high"}, "context_management": {"edits": [{"type": "clear_thinking_1", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "colors", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [1]}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "y"}], "is_error": True},
        ]},
    ],
}  # fmt: skip
TOOL_MESSAGES: dict[str, Any] = {
    "model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "colors"}],
    "tools": [{"name": "f", "description": "é", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
}  # fmt: skip
TOKENS: dict[str, Any] = {"model": MODEL, "prompt": "colors", "add_special_tokens": True, "return_token_strs": True}
IDS: dict[str, Any] = {"tokens": [1, 2, 3]}
ROUTES = [
    ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/responses", RESPONSES),
    ("/v1/responses/input_tokens", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES),
    ("/tokenize", TOKENS), ("/detokenize", IDS),
]  # fmt: skip
"""Routes with a valid body of each, for a service that offers no tools."""
TOOL_ROUTES = [
    ("/v1/chat/completions", TOOL_CHAT), ("/v1/responses", TOOL_RESPONSES), ("/v1/messages", TOOL_MESSAGES),
    ("/v1/messages/count_tokens", TOOL_MESSAGES), ("/v1/responses/input_tokens", TOOL_RESPONSES),
]  # fmt: skip
"""Further bodies for one that does."""
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e300, -0.0, "", "x", "\x00", "\U0010ffff",
    "é" * 500, [], {}, [[]], [None], {"": None}, {"type": "text"}, [{"type": "text", "text": "x"}], ["x"] * 40,
    {"role": "user"},
]  # fmt: skip
"""Values that some check may not expect."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in ``value``."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def change_values(body: dict[str, Any], generator: random.Random) -> bytes:
    """One to three values replaced, removed, added, repeated or moved to another place."""
    body = copy.deepcopy(body)
    for _ in range(generator.randint(1, 3)):
        paths = [path for path in places(body) if path] or [("model",)]
        *path, key = generator.choice(paths)
        parent = _at(body, path)
        chance = generator.random()
        if chance < 0.2 and body:
            del parent[key]
        elif chance < 0.3 and isinstance(parent, dict):
            parent[generator.choice(["tools", "tool_choice", "response_format", "n", "zzz"])] = generator.choice(ODD)
        elif chance < 0.4 and isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[key]) for _ in range(generator.choice((1, 3, 200))))
        elif chance < 0.5:
            parent[key] = copy.deepcopy(_at(body, generator.choice(paths)) if body else None)
        else:
            parent[key] = copy.deepcopy(generator.choice(ODD))
    return json.dumps(body, ensure_ascii=generator.random() < 0.5).encode()


def _at(value: Any, path: list[Any] | tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def change_bytes(body: dict[str, Any], generator: random.Random) -> bytes:
    """Bytes replaced, removed, inserted or cut off."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(max(len(raw) - 1, 1))
        kind = generator.randrange(4)
        if kind == 0:
            raw[at : at + 1] = bytes([generator.randrange(256)])
        elif kind == 1:
            del raw[at : at + generator.randint(1, 10)]
        elif kind == 2:
            raw[at:at] = generator.choice([b'"', b"{", b"[", b"}", b"\\", b"\\ud800", b",", b"1e999", b"\xff", b"\x00"])
        else:
            del raw[max(at, 1) :]
    return bytes(raw)
