"""Turns of blocks as chat messages."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from dgpp_core.api.errors import RequestError
from dgpp_core.server.messages.requests import (
    DocumentBlock,
    FileSource,
    HiddenThinkingBlock,
    ImageBlock,
    InlineSource,
    InputBlock,
    InputTurn,
    PartBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from dgpp_core.server.translate import CallOrder, Paths

BILLING = "x-anthropic-billing-header:"
"""Begins a system block in which Claude Code tells who pays: it differs each time, and is not for the model."""
FAILED = "Error: "
"""Begins the result of a call that failed, which templates have no other way to show."""


def chat_messages(
    turns: Sequence[InputTurn], system: str | Sequence[TextBlock] | None, paths: Paths
) -> list[dict[str, Any]]:
    """The chat messages of ``turns``, behind one of ``system``.

    Args:
        paths: notes which block each part of a message was made from.

    Raises:
        RequestError: 400 with the path of what is wrong.
    """
    history = _History(paths)
    if isinstance(system, str):
        history.add({"role": "system", "content": system}, "system")
    elif texts := [block for block in system or () if not block.text.startswith(BILLING)]:
        history.add({"role": "system", "content": [_part(block) for block in texts]}, "system")
    for at, turn in enumerate(turns):
        history.take(turn, f"messages[{at}]")
    if turns[-1].role == "assistant":
        path = f"messages[{len(turns) - 1}].role"
        what = f"`{path}`: the last message must be the user's; a reply that goes on from a given text is not supported"
        raise RequestError(what, param=path, code="unsupported_parameter")
    return history.messages


class _History:
    """Messages as they are put together."""

    def __init__(self, paths: Paths) -> None:
        self.messages: list[dict[str, Any]] = []
        self._paths = paths
        self._calls = CallOrder()

    def add(self, message: dict[str, Any], path: str, content: str = "") -> None:
        """A message made from ``path``, whose content stands in ``content`` where that is another place."""
        at = f"messages[{len(self.messages)}]"
        self._paths.add(at, path)
        self._paths.add(f"{at}.content", content or path)
        self.messages.append(message)

    def take(self, turn: InputTurn, path: str) -> None:
        """The next turn."""
        if isinstance(turn.content, str):
            self.add({"role": turn.role, "content": turn.content}, path, f"{path}.content")
            return
        blocks = [(block, f"{path}.content[{at}]") for at, block in enumerate(turn.content)]
        if turn.role == "assistant":
            self._model(blocks, path)
        else:
            self._others(turn.role, blocks, path)

    def _model(self, blocks: Sequence[tuple[InputBlock, str]], path: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        at = f"messages[{len(self.messages)}]"
        self.add(message, path, f"{path}.content")
        for block, own in blocks:
            if isinstance(block, TextBlock):
                message["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                self._calls.add(block.id)
                calls = message.setdefault("tool_calls", [])
                for member in ("", ".function"):
                    self._paths.add(f"{at}.tool_calls[{len(calls)}]{member}", own)
                body = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": body})
            elif not isinstance(block, HiddenThinkingBlock):
                raise _misplaced(block, own, "a user")

    def _others(self, role: str, blocks: Sequence[tuple[InputBlock, str]], path: str) -> None:
        """Results first, in the order of their calls; the rest is one message."""
        results: list[tuple[str, tuple[ToolResultBlock, str]]] = []
        parts: list[tuple[PartBlock, str]] = []
        for block, own in blocks:
            if isinstance(block, ToolResultBlock) and role == "user":
                self._calls.check(block.tool_use_id, f"{own}.tool_use_id")
                results.append((block.tool_use_id, (block, own)))
            elif isinstance(block, PartBlock):
                parts.append((block, own))
            else:
                raise _misplaced(block, own, "an assistant" if role == "user" else "another")
        for block, own in self._calls.sort(results):
            self._result(block, own)
        if parts or not results:
            self._add_parts({"role": role}, path, path, parts)

    def _result(self, block: ToolResultBlock, own: str) -> None:
        message: dict[str, Any] = {"role": "tool", "tool_call_id": block.tool_use_id}
        content = block.content or ""
        if isinstance(content, str):
            self.add({**message, "content": FAILED * bool(block.is_error) + content}, own, f"{own}.content")
            return
        parts: list[tuple[PartBlock, str]] = [(part, f"{own}.content[{at}]") for at, part in enumerate(content)]
        if block.is_error:
            parts.insert(0, (TextBlock(text=FAILED), f"{own}.content"))
        self._add_parts(message, own, f"{own}.content", parts)

    def _add_parts(
        self, message: dict[str, Any], path: str, content: str, parts: Sequence[tuple[PartBlock, str]]
    ) -> None:
        """A message whose content is made of blocks."""
        at = f"messages[{len(self.messages)}].content"
        self.add({**message, "content": [_part(block) for block, _ in parts]}, path, content)
        for index, (block, own) in enumerate(parts):
            self._paths.add(f"{at}[{index}]", own)
            for chat, member in _members(block).items():
                self._paths.add(f"{at}[{index}].{chat}", f"{own}.{member}")


def _members(block: PartBlock) -> Mapping[str, str]:
    """Members of a chat part, and those of the block that they were made from."""
    if isinstance(block, ImageBlock):
        source = "source.data" if isinstance(block.source, InlineSource) else "source.url"
        return {"image_url": "source", "image_url.url": source}
    if isinstance(block, DocumentBlock):
        source = "source.url" if isinstance(block.source, UrlSource) else "source.data"
        return {"file": "source", "file.file_data": source, "file.filename": "title"}
    return {}


def _part(block: PartBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, DocumentBlock):
        return {"type": "file", "file": _file(block)}
    source = block.source
    if isinstance(source, FileSource):
        return {"type": "image_url", "image_url": {"file_id": source.file_id}}
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, InlineSource) else source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _file(block: DocumentBlock) -> dict[str, Any]:
    source = block.source
    if isinstance(source, FileSource):
        return {"file_id": source.file_id} | ({"filename": block.title} if block.title else {})
    if isinstance(source, UrlSource):
        return {"filename": block.title or "document", "file_data": source.url}
    if isinstance(source, TextSource):
        data, ending = base64.b64encode(source.data.encode()).decode(), ".txt"
    else:
        data, ending = source.data, ".pdf" if source.media_type == "application/pdf" else ""
    name = block.title or "document"
    return {"filename": name if name.lower().endswith(ending) else name + ending, "file_data": data}


def _misplaced(block: InputBlock, path: str, whose: str) -> RequestError:
    kind = block.__struct_config__.tag
    return RequestError(f"`{path}.type`: {kind} belongs in {whose} message", param=f"{path}.type")
