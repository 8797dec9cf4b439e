"""Server-sent events: chunks of a streamed reply, put together from parts that were encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dgpp_core.api.errors import RequestError
from dgpp_core.server.call_bodies import call_delta
from dgpp_core.server.generation import CallArguments, CallStart, Event, Finish, Piece, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.lines import line_json
from dgpp_core.server.replies import Head, chat_logprobs, completion_logprobs, error_body, usage_body
from dgpp_core.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
PADDING_UNIT = 128
"""Obfuscated events are a multiple of this many bytes long."""
PADDING_MIN = 16

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_TO_ALPHABET = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))


def error_event(error: RequestError) -> bytes:
    """An error after the headers: the object, then the end of the stream."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def padding(length: int, random_bytes: Callable[[int], bytes]) -> bytes:
    """The last member of an event of ``length`` bytes, which hides how long it is."""
    length += len(b',"obfuscation":""')
    letters = random_bytes(PADDING_MIN + -(length + PADDING_MIN) % PADDING_UNIT).translate(_TO_ALPHABET)
    return b',"obfuscation":"%b"' % letters


class _Chunks:
    """What chat and legacy chunks have in common: their first and last members, and the end of the stream."""

    keep_alive = KEEP_ALIVE

    def __init__(self, kind: str, head: Head, job: Job, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._front = (
            b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":null,"choices":['
            % (line_json(head.id), line_json(kind), head.created, line_json(head.model))
        )  # fmt: skip
        self._tier = b',"service_tier":"default"' if job.tier else b""
        self._include_usage = job.include_usage
        self._back = b"}]" + (b',"usage":null' if job.include_usage else b"") + self._tier
        self._logprobs = job.logprobs >= 0

    def begin(self) -> bytes:
        """Nothing is said before there is output."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """The usage chunk if it is wanted, which has no choices and no padding, and the end."""
        if not self._include_usage:
            return DONE
        return self._front + b'],"usage":' + line_json(usage_body(usage)) + self._tier + b"}\n\n" + DONE

    def fail(self, error: RequestError) -> bytes:
        """The error as one more event, and the end."""
        return error_event(error)


class ChatStream(_Chunks):
    """Encodes the events of a chat reply.

    Args:
        random_bytes: for the padding that hides the length of tokens; independent of all sampling.
    """

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer, random_bytes: Callable[[int], bytes]) -> None:
        super().__init__("chat.completion.chunk", head, job, tokenizer)
        self._random_bytes = random_bytes
        self._obfuscate = job.obfuscate
        self._opened = [False] * job.n

    def encode(self, events: Sequence[Event]) -> bytes:
        """``events`` as one or more chunks; a choice's first is preceded by its preamble."""
        chunks: list[bytes] = []
        for event in events:
            if not self._opened[event.index]:
                self._opened[event.index] = True
                chunks.append(self._chunk(event.index, b'{"role":"assistant","content":""}', b"null", b"null"))
            chunks.append(self._event(event))
        return b"".join(chunks)

    def _event(self, event: Event) -> bytes:
        if isinstance(event, Finish):
            return self._chunk(event.index, b"{}", b"null", b'"' + event.reason.encode() + b'"')
        if isinstance(event, CallStart | CallArguments):
            return self._chunk(event.index, call_delta(event), b"null", b"null")
        name = b'{"reasoning_content":' if event.reasoning else b'{"content":'
        return self._chunk(event.index, name + line_json(event.text) + b"}", self._logprobs_of(event), b"null")

    def _logprobs_of(self, piece: Piece) -> bytes:
        if not self._logprobs or not piece.entries:
            return b"null"
        return line_json(chat_logprobs(piece.entries, self._tokenizer))

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        body = b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._front, index, delta, logprobs, reason, self._back,
        )  # fmt: skip
        if not self._obfuscate:
            return body + b"}\n\n"
        return body + padding(len(body) + len(b"}\n\n"), self._random_bytes) + b"}\n\n"


class CompletionStream(_Chunks):
    """Encodes the events of a legacy completion, which has one choice and no padding."""

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer, random_bytes: Callable[[int], bytes]) -> None:
        del random_bytes  # legacy chunks are never padded
        super().__init__("text_completion", head, job, tokenizer)
        self._opened = False
        self._offset = 0

    def encode(self, events: Sequence[Event]) -> bytes:
        """``events`` as one or more chunks, the very first preceded by one with empty text."""
        chunks: list[bytes] = []
        if not self._opened:
            self._opened = True
            chunks.append(self._chunk(b'""', b"null", b"null"))
        chunks.extend(map(self._event, events))
        return b"".join(chunks)

    def _event(self, event: Event) -> bytes:
        if isinstance(event, Finish):
            return self._chunk(b'""', b"null", b'"' + event.reason.encode() + b'"')
        assert isinstance(event, Piece)  # a legacy completion has no tools
        return self._chunk(line_json(event.text), self._logprobs_of(event), b"null")

    def _logprobs_of(self, piece: Piece) -> bytes:
        if not self._logprobs or not piece.entries:
            return b"null"
        logprobs = completion_logprobs(piece.entries, self._tokenizer, self._offset)
        self._offset += sum(len(self._tokenizer.token_bytes(entry.id)) for entry in piece.entries)
        return line_json(logprobs)

    def _chunk(self, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b{"index":0,"text":%b,"logprobs":%b,"finish_reason":%b%b}\n\n' % (
            self._front, text, logprobs, reason, self._back,
        )  # fmt: skip
