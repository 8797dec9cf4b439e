"""The stream of a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.blocks import Block, BlockStream
from dgpp_core.server.generation import CallArguments, Piece, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.lines import line_json
from dgpp_core.server.replies import Head, chat_logprobs, error_message
from dgpp_core.server.responses import events
from dgpp_core.server.responses.bodies import (
    ItemStatus,
    ResponseFault,
    ResponseText,
    blank,
    item_of,
    response,
    text_part,
)
from dgpp_core.server.responses.requests import ReasoningText
from dgpp_core.server.sse import KEEP_ALIVE, padding
from dgpp_core.text.tokenizer import Tokenizer


class ResponseStream(BlockStream):
    """Encodes a response as its events: it is created, its items come and go, and it ends in exactly one way."""

    keep_alive = KEEP_ALIVE

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer, random_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._head, self._job, self._tokenizer, self._random_bytes = head, job, tokenizer, random_bytes
        self._sent = 0
        self._item_id = ""

    def begin(self) -> bytes:
        """The response as it begins, twice: as created and as in progress."""
        body = blank(self._head, self._job)
        return self._event(events.Created, response=body) + self._event(events.InProgress, response=body)

    def end(self, usage: Usage) -> bytes:
        """The whole response."""
        body = response(self._head, self._job, (self.reply,), usage, self._tokenizer)
        kind = events.Completed if body.status == "completed" else events.IncompleteEnd
        return self._event(kind, response=body)

    def fail(self, error: RequestError) -> bytes:
        """The error, and the response as failed."""
        code, message = error.code or "server_error", error_message(error)
        body = msgspec.structs.replace(
            blank(self._head, self._job), status="failed", error=ResponseFault(code=code, message=message)
        )
        fault = self._event(events.Fault, code=code, message=message, param=error.param)
        return fault + self._event(events.Failed, response=body)

    def _open(self, index: int, block: Block) -> bytes:
        item = item_of(self._head, self._job, index, block, self._tokenizer, "in_progress")
        self._item_id = item.id
        added = self._event(events.ItemAdded, output_index=index, item=item)
        if block.call is not None:
            return added
        part = ResponseText(text="") if block.kind == "text" else ReasoningText(text="")
        return added + self._of(index, events.PartAdded, part=part)

    def _grow(self, index: int, block: Block, event: Piece | CallArguments) -> bytes:
        if isinstance(event, CallArguments):
            kind: type[events.ResponseEvent] = events.InputDelta if event.custom else events.ArgumentsDelta
            return self._delta(index, kind, delta=event.text)
        if event.reasoning:
            return self._delta(index, events.ReasoningDelta, delta=event.text)
        logprobs = chat_logprobs(event.entries, self._tokenizer).content if event.entries else ()
        return self._delta(index, events.TextDelta, delta=event.text, logprobs=logprobs)

    def _close(self, index: int, block: Block) -> bytes:
        status: ItemStatus = "completed" if self.reply.is_whole(block) else "incomplete"
        item = item_of(self._head, self._job, index, block, self._tokenizer, status)
        done = self._event_done(index, block)
        return done + self._event(events.ItemDone, output_index=index, item=item)

    def _event_done(self, index: int, block: Block) -> bytes:
        text = block.text
        if block.call is not None:
            if block.call.custom:
                return self._of(index, events.InputDone, input=text)
            return self._of(index, events.ArgumentsDone, name=block.call.name, arguments=text)
        if block.kind == "reasoning":
            done = self._of(index, events.ReasoningDone, text=text)
            return done + self._of(index, events.PartDone, part=ReasoningText(text=text))
        part = text_part(self._job, block, self._tokenizer)
        done = self._of(index, events.TextDone, text=text, logprobs=part.logprobs)
        return done + self._of(index, events.PartDone, part=part)

    def _of(self, index: int, kind: type[events.ResponseEvent], **members: Any) -> bytes:
        """An event of the item that is open."""
        return self._event(kind, item_id=self._item_id, output_index=index, **members)

    def _delta(self, index: int, kind: type[events.ResponseEvent], **members: Any) -> bytes:
        """An event whose length would tell what was said, if it were not padded."""
        event = self._of(index, kind, **members)
        if not self._job.obfuscate:
            return event
        body = event.removesuffix(b"}\n\n")
        return body + padding(len(event), self._random_bytes) + b"}\n\n"

    def _event(self, kind: type[Any], **members: Any) -> bytes:
        name = kind.__struct_config__.tag
        number, self._sent = self._sent, self._sent + 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), line_json(kind(sequence_number=number, **members)))
