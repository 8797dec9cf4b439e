"""A reply's ids to what the client sees: reasoning, content, tool calls, and nothing after a stop string."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Literal

import msgspec

from dgpp_core.text.decode import Utf8Decoder
from dgpp_core.text.stops import Scanner
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.tools.events import CallEvent, CallOpened, Event, Text
from dgpp_core.text.tools.parser import CallParser

LEADING_SPACE = 16
"""White space that a model may write before it opens reasoning, in characters."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of a reply.

    Attributes:
        kind: the member of the message that ``text`` continues.
        tokens: indexes, in push order from 0, of the tokens whose first visible content is here. Each token that
            contributes content is in exactly one delta; reasoning, markers and what a stop string cut have none.
    """

    kind: Literal["content", "reasoning"]
    text: str
    tokens: tuple[int, ...] = ()


Part = Delta | CallEvent


class _Phase(Enum):
    OPENING = auto()  # nothing has come yet that is neither white space nor the start of the opening marker
    REASONING = auto()
    CONTENT = auto()


class _Ledger:
    """Which tokens the characters of the reply came from, for characters that are not yet given out."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int, int]] = deque()
        self._given = 0
        self._named = -1

    def add(self, token: int, start: int, end: int) -> None:
        """Token ``token`` has bytes in the characters ``start`` to ``end`` - 1 of the reply."""
        self._spans.append((token, start, end))

    def give(self, count: int) -> tuple[int, ...]:
        """Pass ``count`` characters and return the tokens in them that no earlier call returned."""
        end = self._given + count
        tokens = []
        for token, start, _ in self._spans:
            if start >= end:
                break
            if token > self._named:
                tokens.append(token)
        if tokens:
            self._named = tokens[-1]
        self.skip(count)
        return tuple(tokens)

    def skip(self, count: int) -> None:
        """Pass ``count`` characters that are no visible content."""
        self._given += count
        while self._spans and self._spans[0][2] <= self._given:
            self._spans.popleft()


class ReplyParser:
    """Splits one reply into reasoning, content and tool calls as its ids arrive.

    However the reply is cut into tokens, the concatenated deltas are the same, and markers and stop strings are found
    across any boundary. Markers are found in the text, so it makes no difference whether one is a single id or spelled
    by several. Only a reply that starts with the opening marker (or whose prompt ended in it) has reasoning: later on,
    a marker is text that the model writes about.

    The markers of tool calls are ids, and nothing else: spelled out they are text. A call ends reasoning, wherever it
    begins; a block that turns out to be none leaves it as it was. Content before and after a call is not searched for a
    stop string that spans it.

    Args:
        reasoning: the markers that open and close reasoning; None takes everything for content.
        in_reasoning: the prompt ends inside reasoning.
        stops: strings that end the content; reasoning is not searched.
        hidden_ids: ids that are shown as nothing (the ones that end a reply), as are special tokens.
        reasoning_in_content: give reasoning out as content, with its markers as the model wrote them.
        calls: takes the tool calls out; without it their markers are text.
        shown: further tokens that are shown although they are marked special.

    Attributes:
        stopped: a stop string matched; nothing after it is shown, and further pushes return nothing.
        reasoning_tokens: ids up to and including the one that completes the closing marker, or up to the call that ends
            reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: tuple[str, str] | None,
        in_reasoning: bool,
        stops: tuple[str, ...] = (),
        hidden_ids: frozenset[int] = frozenset(),
        reasoning_in_content: bool = False,
        calls: CallParser | None = None,
        shown: tuple[str, ...] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._markers = reasoning or ("", "")
        self._marker_ids = frozenset(tokenizer.id_of(marker) for marker in (*self._markers, *shown))
        self._reasoning_kind: Literal["content", "reasoning"] = "content" if reasoning_in_content else "reasoning"
        self._phase = _Phase.CONTENT
        if reasoning is not None:
            self._phase = _Phase.REASONING if in_reasoning else _Phase.OPENING
        self._opening = ""
        self._closer = Scanner((self._markers[1],) if reasoning else ())
        self._stop_strings = stops
        self._stops = Scanner(stops) if stops else None
        self._calls = calls
        self._call_markers = (
            {} if calls is None else {tokenizer.id_of(name): at for at, name in enumerate(calls.dialect.markers)}
        )
        self._utf8 = Utf8Decoder()
        self._ledger = _Ledger()
        self._pushed = 0
        self._decoded = 0
        self._routed = 0
        self._reasoned = 0
        self.stopped = False
        self.reasoning_tokens = 0

    @property
    def stop_string(self) -> str:
        """The stop string that matched, empty where none did."""
        return "" if self._stops is None else self._stops.found

    @property
    def call_count(self) -> int:
        """Tool calls so far."""
        return 0 if self._calls is None else self._calls.calls

    def push(self, token_id: int) -> tuple[Part, ...]:
        """Take the reply's next id; returns what may be shown now."""
        if self.stopped:
            return ()
        index = self._pushed
        self._pushed += 1
        if token_id in self._hidden_ids:
            return ()
        in_block = self._calls is not None and self._calls.inside
        if self._phase is _Phase.REASONING:
            if not in_block:
                self._reasoned = self.reasoning_tokens
            self.reasoning_tokens += 1
        if (marker := self._call_markers.get(token_id)) is not None:
            return tuple(self._mark_call(index, marker))
        if self._tokenizer.is_special(token_id) and token_id not in self._marker_ids and not in_block:
            return ()
        piece = self._tokenizer.token_bytes(token_id)
        text = self._decode(index, piece) if piece else ""
        return tuple(self._pass(text)) if text else ()

    def finish(self) -> tuple[Part, ...]:
        """What was held back, when no more ids come; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ()
        parts = self._pass(self._utf8.finish())
        if self._calls is not None:
            parts += self._dispatch(self._calls.finish())
        deltas: list[Delta] = []
        self._release(deltas)
        return (*parts, *deltas)

    def _release(self, deltas: list[Delta]) -> None:
        """Give out what was held back because more text could have followed."""
        if self._phase is _Phase.REASONING:
            self._reason(self._closer.finish(), deltas)
        if self._phase is _Phase.OPENING:
            self._phase = _Phase.CONTENT
            self._show(self._opening, deltas)
        if self._stops is not None and not self.stopped:
            self._emit(self._stops.finish(), deltas)

    def _pass(self, text: str) -> list[Part]:
        return list(self._route(text)) if self._calls is None else self._dispatch(self._calls.push(text))

    def _mark_call(self, index: int, marker: int) -> list[Part]:
        """Token ``index`` is a marker of calls: what comes before it is complete, an incomplete character too."""
        assert self._calls is not None
        broken = self._utf8.finish()
        parts = self._pass(broken)
        start = self._decoded + len(broken)
        self._decoded = start + len(self._calls.dialect.markers[marker])
        self._ledger.add(index, start, self._decoded)
        return parts + self._dispatch(self._calls.mark(marker))

    def _dispatch(self, events: list[Event]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            if self.stopped:
                break
            if isinstance(event, Text):
                self._ledger.skip(event.start - self._routed)
                self._routed = event.start + len(event.text)
                parts += self._route(event.text)
                continue
            if isinstance(event, CallOpened):
                parts += self._before_call()
            if not self.stopped:
                parts.append(event)
        return parts

    def _before_call(self) -> list[Delta]:
        """Complete the text before a call. A call ends reasoning."""
        deltas: list[Delta] = []
        self._release(deltas)
        if self._phase is _Phase.REASONING:
            self._phase, self.reasoning_tokens = _Phase.CONTENT, self._reasoned
        self._stops = Scanner(self._stop_strings) if self._stop_strings else None
        return deltas

    def _decode(self, index: int, piece: bytes) -> str:
        """Text that token ``index`` completes; notes which characters its bytes went into."""
        pending = self._utf8.pending
        # The token has a share in a held-back character if its first byte continues it. Otherwise that character is
        # broken off and the token starts after its U+FFFD.
        joins = not pending or len((pending + piece[:1]).decode("utf-8", "replace")) == 1
        text = self._utf8.push(piece)
        start = self._decoded + (not joins)
        self._decoded += len(text)
        self._ledger.add(index, start, self._decoded + bool(self._utf8.pending))
        return text

    def _route(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if self._phase is _Phase.OPENING:
            text = self._open(text, deltas)
        if self._phase is _Phase.REASONING:
            shown, rest = self._closer.scan(text)
            self._reason(shown, deltas)
            if rest is None:
                return deltas
            self._mark(self._markers[1], deltas)
            self._phase, text = _Phase.CONTENT, rest
        if self._phase is _Phase.CONTENT:
            self._show(text, deltas)
        return deltas

    def _open(self, text: str, deltas: list[Delta]) -> str:
        """Decide how the reply starts; returns the text to go on with, once that is known."""
        opener = self._markers[0]
        text = self._opening + text
        start = text.lstrip()
        space = len(text) - len(start)
        if space <= LEADING_SPACE and len(start) < len(opener) and opener.startswith(start):
            self._opening = text
            return ""
        self._opening = ""
        if space > LEADING_SPACE or not start.startswith(opener):
            self._phase = _Phase.CONTENT
            return text
        self._phase = _Phase.REASONING
        self.reasoning_tokens = self._pushed
        self._mark(text[: space + len(opener)], deltas)
        return start[len(opener) :]

    def _mark(self, text: str, deltas: list[Delta]) -> None:
        """Pass a marker: hidden, unless reasoning is shown as content."""
        if self._reasoning_kind == "content":
            self._reason(text, deltas)
        else:
            self._ledger.skip(len(text))

    def _reason(self, text: str, deltas: list[Delta]) -> None:
        if text:
            self._ledger.skip(len(text))
            deltas.append(Delta(self._reasoning_kind, text))

    def _show(self, text: str, deltas: list[Delta]) -> None:
        """Give content out, up to a stop string."""
        if self._stops is not None:
            text, rest = self._stops.scan(text)
            self.stopped = rest is not None
        self._emit(text, deltas)

    def _emit(self, text: str, deltas: list[Delta]) -> None:
        if text:
            deltas.append(Delta("content", text, self._ledger.give(len(text))))
