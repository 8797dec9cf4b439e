"""The stream of a message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.blocks import Block, BlockStream
from dgpp_core.server.generation import CallArguments, Piece, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.lines import line_json
from dgpp_core.server.messages import events
from dgpp_core.server.messages.bodies import (
    SIGNATURE,
    MessageBody,
    UsedTool,
    message_error,
    message_usage,
    stop_reason,
)
from dgpp_core.server.messages.requests import TextBlock, ThinkingBlock
from dgpp_core.server.replies import Head
from dgpp_core.text.tokenizer import Tokenizer


def _event(event: msgspec.Struct) -> bytes:
    name = str(event.__struct_config__.tag)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), line_json(event))


class MessageStream(BlockStream):
    """Encodes a message as its events. The dialect has no padding."""

    keep_alive = _event(events.Ping())

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer, random_bytes: Callable[[int], bytes]) -> None:
        del tokenizer, random_bytes
        super().__init__()
        self._head, self._job = head, job

    def begin(self) -> bytes:
        """The message, with nothing in it yet."""
        usage = message_usage(Usage(prompt=len(self._job.tokens), completion=0, cached=0, reasoning=0))
        return _event(events.MessageStart(message=MessageBody(id=self._head.id, model=self._head.model, usage=usage)))

    def end(self, usage: Usage) -> bytes:
        """Why the message ended."""
        finish = self.reply.finish
        assert finish is not None
        stopped = events.Stopped(stop_reason=stop_reason(finish), stop_sequence=finish.stop or None)
        delta = events.MessageDelta(delta=stopped, usage=message_usage(usage))
        return _event(delta) + _event(events.MessageStop())

    def fail(self, error: RequestError) -> bytes:
        """The error."""
        return b"event: error\ndata: %b\n\n" % message_error(error)

    def _open(self, index: int, block: Block) -> bytes:
        content: TextBlock | ThinkingBlock | UsedTool
        if block.call is not None:
            content = UsedTool(id=block.call.id, name=block.call.name, input=msgspec.Raw(b"{}"))
        else:
            content = ThinkingBlock(thinking="") if block.kind == "reasoning" else TextBlock(text="")
        return _event(events.BlockStart(index=index, content_block=content))

    def _grow(self, index: int, block: Block, event: Piece | CallArguments) -> bytes:
        delta: events.MoreInput | events.MoreThinking | events.MoreText
        if isinstance(event, CallArguments):
            delta = events.MoreInput(partial_json=event.text)
        else:
            delta = events.MoreThinking(thinking=event.text) if event.reasoning else events.MoreText(text=event.text)
        return _event(events.BlockDelta(index=index, delta=delta))

    def _close(self, index: int, block: Block) -> bytes:
        signed = b""
        if block.kind == "reasoning":
            signed = _event(events.BlockDelta(index=index, delta=events.Signature(signature=SIGNATURE)))
        return signed + _event(events.BlockStop(index=index))
